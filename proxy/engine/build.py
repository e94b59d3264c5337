"""From pin, series and options to a finished engine directory: planned by content, built once, verified, moved in whole."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.engine.cache import Cache, cache_from_environment, file_lock, make_dir
from proxy.engine.elf import read_elf
from proxy.engine.errors import EngineToolError
from proxy.engine.fetch import fetch, source_archive
from proxy.engine.manifest import (
    MANIFEST_NAME,
    Manifest,
    closure,
    describe_files,
    read_manifest,
    source_identity,
    write_manifest,
)
from proxy.engine.options import (
    SERVER_BINARY,
    BuildOptions,
    Sanitizer,
    identity_definitions,
)
from proxy.engine.pin import Upstream, find_native_patch, read_upstream
from proxy.engine.process import Work, run
from proxy.engine.progress import Progress, SilentProgress
from proxy.engine.series import PatchSet, read_patch_set
from proxy.engine.source import ArchiveSource, CheckoutSource, Source, identify_checkout
from proxy.engine.toolchain import BuildTools, Compiler, find_build_tools, find_compiler
from proxy.engine.tree import compose, sync_tree
from proxy.engine.verify import verify_files

if TYPE_CHECKING:
    import threading
    from pathlib import Path

# Part of every key: raise it when the same inputs would give another engine than before.
_RECIPE = 1
_CONFIGURE_TIMEOUT_S = 900.0
_COMPILE_TIMEOUT_S = 6 * 3600.0
_VERSION_TIMEOUT_S = 60
_STOCK = "stock"
_NINJA_STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")


@dataclass(frozen=True, slots=True)
class EnginePaths:
    """A finished, verified engine."""

    server: Path
    dir: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides what the engine will be, and the key made of it."""

    options: BuildOptions
    upstream: Upstream
    patch_set: PatchSet
    compiler: Compiler
    pin: str
    build_number: int
    content: str

    @property
    def series(self) -> str:
        """The series hash, or ``stock`` for the unpatched source."""
        return _STOCK if self.options.stock else self.patch_set.series_hash

    @property
    def key(self) -> str:
        """Name of the finished engine's directory: the same inputs give the same key on the same kind of machine."""
        parts = {
            "recipe": _RECIPE,
            "content": self.content,
            "pin": self.pin,
            "series": self.patch_set.digest,
            "definitions": self.options.definitions(),
            "targets": self.options.targets,
            "flags": self.options.flags,
            "stock": self.options.stock,
            "compiler": self.compiler.version,
            "cpu": self.compiler.cpu_digest,
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        return f"{self.options.flavour}-{digest}"

    @property
    def work_name(self) -> str:
        """Name of the tree and build folder: fixed per pin and flavour, so that a changed series is a small rebuild."""
        if self.options.llama_cpp_dir is None:
            return f"{self.pin}-{self.options.flavour}"
        place = hashlib.sha256(str(self.options.llama_cpp_dir).encode()).hexdigest()[:8]
        return f"local-{place}-{self.options.flavour}"


def make_plan(options: BuildOptions, native_patch: Path | None = None) -> Plan:
    """Read the pin, the series and the machine's compilers. Needs no network. Raises EngineToolError on what is missing."""
    patch_dir = native_patch or find_native_patch()
    upstream = read_upstream(patch_dir)
    compiler = find_compiler(options)
    patch_set = PatchSet((), ()) if options.stock else read_patch_set(patch_dir)
    if options.llama_cpp_dir is None:
        return Plan(options, upstream, patch_set, compiler, upstream.identity, upstream.build_number, upstream.sha256)
    own = identify_checkout(options.llama_cpp_dir)
    return Plan(options, upstream, patch_set, compiler, own.identity, own.build_number, own.content_sha256)


def find_engine(plan: Plan, cache: Cache | None = None) -> EnginePaths | None:
    """The finished engine of ``plan``, when it is in the cache and every file of it is as it was built."""
    directory = (cache or cache_from_environment()).engines / plan.key
    if not (directory / MANIFEST_NAME).is_file():
        return None
    try:
        if verify_files(directory):
            return None
        manifest = read_manifest(directory)
    except EngineToolError:
        return None
    return EnginePaths(directory / SERVER_BINARY, directory, manifest)


def ensure_engine(
    options: BuildOptions,
    progress: Progress | None = None,
    *,
    cache: Cache | None = None,
    native_patch: Path | None = None,
    cancel: threading.Event | None = None,
) -> EnginePaths:
    """Return the engine for ``options``, building it where the cache does not hold it.

    With nothing changed this takes well under a second and no network. Blocks otherwise for as long as fetching and
    compiling take; setting ``cancel`` ends it within a second or so, and the next call continues. Raises EngineToolError.
    """
    listener = progress or SilentProgress()
    where = cache or cache_from_environment()
    plan = make_plan(options, native_patch)
    if ready := find_engine(plan, where):
        return ready
    work = make_dir(where.work / plan.work_name)
    with file_lock(work / "lock", f"building engine {plan.key}", listener, cancel=cancel):
        if ready := find_engine(plan, where):
            return ready
        _Builder(plan, where, work, listener, cancel).build()
    ready = find_engine(plan, where)
    if ready is None:
        raise EngineToolError(f"{where.engines / plan.key} changed while it was being finished; run this again")
    return ready


class _Builder:
    """One build under the lock of its work directory."""

    def __init__(self, plan: Plan, cache: Cache, work: Path, progress: Progress, cancel: threading.Event | None) -> None:
        self._plan = plan
        self._cache = cache
        # Sources lie two levels below the work directory; ccache then sees the same relative paths everywhere.
        self._source = work / "src" / "llama.cpp"
        self._build = work / "build"
        self._stamp = work / "configured.json"
        self._log = work / "build.log"
        self._work = work
        self._progress = progress
        self._cancel = cancel

    def build(self) -> None:
        tools = find_build_tools(self._cache, self._progress, self._cancel)
        self._log.unlink(missing_ok=True)
        self._prepare_source()
        self._configure(tools)
        self._compile(tools)
        self._finish()

    def _prepare_source(self) -> None:
        plan = self._plan
        source: Source
        if plan.options.llama_cpp_dir is None:
            source = ArchiveSource(fetch(self._cache, source_archive(plan.upstream), self._progress, self._cancel))
        else:
            source = CheckoutSource(plan.options.llama_cpp_dir)
        result = sync_tree(compose(source, plan.patch_set), self._source)
        self._progress.note(
            f"source {source_identity(plan.pin, plan.series)}: "
            f"{len(result.written)} files written, {len(result.deleted)} removed, {result.unchanged} unchanged"
        )

    def _definitions(self, tools: BuildTools) -> dict[str, str]:
        compiler, options = self._plan.compiler, self._plan.options
        defs = options.definitions() | {"CMAKE_C_COMPILER": compiler.cc, "CMAKE_CXX_COMPILER": compiler.cxx}
        defs["CMAKE_MAKE_PROGRAM"] = tools.ninja
        # Ours below decides about ccache; the tree's own switch would put it in front a second time.
        defs["GGML_CCACHE"] = "OFF"
        languages = ["C", "CXX"]
        if compiler.nvcc:
            defs["CMAKE_CUDA_COMPILER"] = compiler.nvcc
            defs["CMAKE_INSTALL_RPATH"] = f"$ORIGIN;{_cuda_libraries(compiler.nvcc)}"
            languages.append("CUDA")
        if tools.ccache:
            defs |= {f"CMAKE_{language}_COMPILER_LAUNCHER": tools.ccache for language in languages}
        return defs

    def _configure(self, tools: BuildTools) -> None:
        plan = self._plan
        defs = self._definitions(tools)
        stamp = json.dumps(
            {"defs": defs, "compiler": plan.compiler.version, "cpu": plan.compiler.cpu_digest}, sort_keys=True
        )
        if self._build.exists() and _read(self._stamp) != stamp:
            self._progress.note("compiler or options changed: starting the build folder anew")
            shutil.rmtree(self._build)
        self._stamp.write_text(stamp, encoding="utf-8")
        defs |= identity_definitions(plan.pin, plan.build_number, plan.series, plan.options.flags)
        if plan.options.stock:
            defs = {name: value for name, value in defs.items() if not name.startswith("PHASE_")}
        self._progress.step(0, 0, "configure")
        argv = [tools.cmake, "-S", str(self._source), "-B", str(self._build), "-G", "Ninja"]
        argv += [f"-D{name}={value}" for name, value in defs.items()]
        self._run("configuring with cmake", argv, _CONFIGURE_TIMEOUT_S, None)

    def _compile(self, tools: BuildTools) -> None:
        jobs = self._plan.options.jobs or len(os.sched_getaffinity(0))
        argv = [tools.ninja, "-C", str(self._build), "-j", str(jobs), *self._plan.options.targets]

        def on_line(line: str) -> None:
            if found := _NINJA_STEP.match(line):
                self._progress.step(int(found[1]), int(found[2]), "compile")

        self._run("compiling with ninja", argv, _COMPILE_TIMEOUT_S, on_line)

    def _run(self, what: str, argv: list[str], deadline_s: float, on_line: object) -> None:
        env = os.environ | {"NINJA_STATUS": "[%f/%t] "}
        # Paths below the work directory enter the compiler cache as relative ones, so that it serves any location.
        # Nothing else of the environment is changed: locale and sloppiness are part of ccache's keys.
        env.setdefault("CCACHE_BASEDIR", str(self._work))
        work = Work(what, argv, self._work, self._log, deadline_s, env)
        run(work, on_line=on_line if callable(on_line) else None, cancel=self._cancel)

    def _finish(self) -> None:
        """Copy what the programs need, prove that the copy runs, describe it, and move it into place in one step."""
        make_dir(self._cache.engines)
        staged = self._cache.engines / f".staged-{self._plan.key}"
        final = self._cache.engines / self._plan.key
        _remove(staged)
        staged.mkdir()
        built = self._build / "bin"
        for program in self._plan.options.targets:
            for name in closure(built, program):
                _install(built / name, staged / name)
        _refuse_foreign_libraries(staged, self._work)
        version = self._version(staged / SERVER_BINARY)
        write_manifest(staged, self._describe(staged, version))
        if final.exists():
            # Only a damaged engine gets here; a process that still runs it keeps its files.
            self._progress.note(f"{final} did not match its manifest; replacing it")
            old = self._cache.engines / f".broken-{self._plan.key}"
            _remove(old)
            final.rename(old)
            staged.rename(final)
            _remove(old)
        else:
            staged.rename(final)

    def _version(self, server: Path) -> str:
        # A leak report at exit would hide the answer of a sanitizer build.
        env = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
        env.pop("LD_LIBRARY_PATH", None)
        try:
            done = subprocess.run(
                [str(server), "--version"],
                capture_output=True, text=True, check=False, timeout=_VERSION_TIMEOUT_S, env=env, cwd="/",
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineToolError(f"the built {server.name} does not run: {error}") from error
        text = (done.stdout + done.stderr).strip()
        expected = f"build {self._plan.build_number}, commit {self._plan.series})"
        if done.returncode != 0 or expected not in text:
            raise EngineToolError(
                f"the built {server.name} --version (exit status {done.returncode}) does not say '{expected}':\n{text}"
            )
        return next(line for line in text.split("\n") if expected in line).strip()

    def _describe(self, staged: Path, version: str) -> Manifest:
        plan = self._plan
        return Manifest(
            identity=source_identity(plan.pin, plan.series),
            pin=plan.pin,
            series=plan.series,
            build_number=plan.build_number,
            flags=plan.options.flags,
            key=plan.key,
            version=version,
            compiler=plan.compiler.version,
            cmake=tuple(f"{name}={value}" for name, value in sorted(plan.options.definitions().items())),
            cpu_features=plan.compiler.cpu_features,
            built_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files=describe_files(staged, plan.options.targets, SERVER_BINARY),
        )


def _cuda_libraries(nvcc: str) -> str:
    return os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(nvcc))), "lib64")


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _install(source: Path, target: Path) -> None:
    if target.is_symlink() or target.exists():
        return
    if source.is_symlink():
        target.symlink_to(os.readlink(source))
    else:
        shutil.copyfile(source, target)
        target.chmod(0o755)


def _refuse_foreign_libraries(folder: Path, work: Path) -> None:
    """A run path into the build folder would work here and break, or load something else, anywhere else."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        runpath = read_elf(path).runpath
        if str(work) in runpath or (runpath and not runpath.startswith("$ORIGIN")):
            raise EngineToolError(f"{path.name} looks for libraries in {runpath}; expected $ORIGIN first")


__all__ = ["BuildOptions", "EnginePaths", "Plan", "Sanitizer", "ensure_engine", "find_engine", "make_plan"]
