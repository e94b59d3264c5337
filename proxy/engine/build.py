"""From a plan to a finished engine: fetch, patch, configure, compile; built once, interrupted at will."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.engine.cache import Cache, cache_from_environment, file_lock, make_dir
from proxy.engine.errors import EngineToolError, os_errors_below
from proxy.engine.fetch import fetch, source_archive
from proxy.engine.finish import finish
from proxy.engine.harness import cmake_argument, in_tree
from proxy.engine.manifest import source_identity
from proxy.engine.options import BuildOptions, identity_definitions
from proxy.engine.plan import EnginePaths, Plan, find_engine, make_plan
from proxy.engine.process import Work, run
from proxy.engine.progress import Progress, SilentProgress
from proxy.engine.source import ArchiveSource, CheckoutSource, Source, identify_checkout
from proxy.engine.toolchain import BuildTools, find_build_tools
from proxy.engine.tree import compose, sync_tree

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

_CONFIGURE_TIMEOUT_S = 900.0
_COMPILE_TIMEOUT_S = 6 * 3600.0
_NINJA_STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)$")


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
    with (
        os_errors_below(where.root, "building the engine"),
        file_lock(work / "lock", f"building engine {plan.key}", listener, cancel=cancel),
    ):
        if ready := find_engine(plan, where):
            return ready
        _Builder(plan, where, work, listener, cancel).build()
    ready = find_engine(plan, where)
    if ready is None:
        raise EngineToolError(
            f"{where.engines / plan.key} changed while it was being finished; run this again"
        )
    return ready


class _Builder:
    """One build under the lock of its work directory."""

    def __init__(
        self, plan: Plan, cache: Cache, work: Path, progress: Progress, cancel: threading.Event | None
    ) -> None:
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
        finish(self._plan, self._cache, self._work, self._progress)

    def _prepare_source(self) -> None:
        plan = self._plan
        source: Source
        if plan.options.llama_cpp_dir is None:
            source = ArchiveSource(
                fetch(self._cache, source_archive(plan.upstream), self._progress, self._cancel)
            )
        else:
            source = CheckoutSource(plan.options.llama_cpp_dir)
        files = itertools.chain(compose(source, plan.patch_set), in_tree(plan.harness))
        result = sync_tree(files, self._source)
        if (
            isinstance(source, CheckoutSource)
            and identify_checkout(source.root).content_sha256 != plan.content
        ):
            raise EngineToolError(f"{source.root} changed while it was being read; run this again")
        self._progress.note(
            f"source {source_identity(plan.pin, plan.series)}: "
            f"{len(result.written)} files written, {len(result.deleted)} removed, {result.unchanged} unchanged"
        )

    def _definitions(self, tools: BuildTools) -> dict[str, str]:
        compiler, options = self._plan.compiler, self._plan.options
        defs = options.definitions() | dict(compiler.definitions)
        defs |= {"CMAKE_C_COMPILER": compiler.cc, "CMAKE_CXX_COMPILER": compiler.cxx}
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
        argv.append(cmake_argument(plan.harness, self._source))
        self._run("configuring with cmake", argv, _CONFIGURE_TIMEOUT_S, None)

    def _compile(self, tools: BuildTools) -> None:
        jobs = self._plan.options.jobs or len(os.sched_getaffinity(0))
        argv = [tools.ninja, "-C", str(self._build), "-j", str(jobs), *self._plan.options.targets]

        def on_line(line: str) -> None:
            if found := _NINJA_STEP.match(line):
                self._progress.step(int(found[1]), int(found[2]), "compile")

        self._run("compiling with ninja", argv, _COMPILE_TIMEOUT_S, on_line)

    def _run(
        self, what: str, argv: list[str], deadline_s: float, on_line: Callable[[str], None] | None
    ) -> None:
        env = os.environ | {"NINJA_STATUS": "[%f/%t] "}
        for name in ("CFLAGS", "CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "CMAKE_GENERATOR", "DESTDIR"):
            env.pop(name, None)
        # The tree asks git for a commit; a repository that happens to hold the cache must not answer.
        env["GIT_CEILING_DIRECTORIES"] = str(self._work)
        # Paths below the work directory enter the compiler cache as relative ones, so that it serves any location.
        # Nothing else of the environment is changed: locale and sloppiness are part of ccache's keys.
        env.setdefault("CCACHE_BASEDIR", str(self._work))
        work = Work(what, argv, self._work, self._log, deadline_s, env)
        run(work, on_line=on_line, cancel=self._cancel)


def _cuda_libraries(nvcc: str) -> str:
    return str(Path(nvcc).resolve().parents[1] / "lib64")


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""
