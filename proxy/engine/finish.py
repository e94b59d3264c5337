"""The last step of a build: copy out what runs, prove that the copy runs, describe it, move it into place at once."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from proxy.engine.cache import Cache, make_dir
from proxy.engine.elf import read_elf
from proxy.engine.errors import EngineToolError
from proxy.engine.manifest import Manifest, closure, describe_files, source_identity, write_manifest
from proxy.engine.options import SERVER_BINARY

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.engine.plan import Plan
    from proxy.engine.progress import Progress

_VERSION_TIMEOUT_S = 60


def finish(plan: Plan, cache: Cache, work: Path, progress: Progress) -> Path:
    """Turn the outputs in ``work/build/bin`` into the engine directory of ``plan`` and return it.

    A program that is empty or not ELF, lacks a library, looks for libraries in the build folder, or whose
    ``--version`` does not name this source is an error, never an engine.
    """
    make_dir(cache.engines)
    staged = cache.engines / f".staged-{plan.work_name}"
    final = cache.engines / plan.key
    _remove(staged)
    staged.mkdir()
    for program in plan.options.targets:
        for name in closure(work / "build" / "bin", program):
            _install(work / "build" / "bin" / name, staged / name)
    refuse_foreign_libraries(staged, work)
    version = check_version(staged / SERVER_BINARY, plan.build_number, plan.series)
    write_manifest(staged, _describe(plan, staged, version))
    if final.exists():
        # Only a damaged engine gets here; a process that still runs it keeps its files.
        progress.note(f"{final} did not match its manifest; replacing it")
        old = cache.engines / f".broken-{plan.work_name}"
        _remove(old)
        final.rename(old)
        staged.rename(final)
        _remove(old)
    else:
        staged.rename(final)
    return final


def check_version(server: Path, build_number: int, series: str) -> str:
    """The line of ``--version`` that names build number and series; EngineToolError when the program says otherwise."""
    # A leak report at exit would hide the answer of a sanitizer build.
    env = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
    env.pop("LD_LIBRARY_PATH", None)
    try:
        done = subprocess.run(
            [str(server), "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_VERSION_TIMEOUT_S,
            env=env,
            cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineToolError(f"the built {server.name} does not run: {error}") from error
    text = (done.stdout + done.stderr).strip()
    expected = f"build {build_number}, commit {series})"
    if done.returncode != 0 or expected not in text:
        raise EngineToolError(
            f"the built {server.name} --version (exit status {done.returncode}) does not say '{expected}':\n{text}"
        )
    return next(line for line in text.split("\n") if expected in line).strip()


def refuse_foreign_libraries(folder: Path, work: Path) -> None:
    """A run path into the build folder would work here and break, or load something else, anywhere else."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        runpath = read_elf(path).runpath
        if str(work) in runpath or (runpath and not runpath.startswith("$ORIGIN")):
            raise EngineToolError(f"{path.name} looks for libraries in {runpath}; expected $ORIGIN first")


def _describe(plan: Plan, staged: Path, version: str) -> Manifest:
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
        built_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        files=describe_files(staged, plan.options.targets, SERVER_BINARY),
    )


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _install(source: Path, target: Path) -> None:
    if target.is_symlink() or target.exists():
        return
    if source.is_symlink():
        target.symlink_to(source.readlink())
    else:
        shutil.copyfile(source, target)
        target.chmod(0o755)
