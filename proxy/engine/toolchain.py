"""The compiler and build tools of this machine: found, named in the cache key, or missing with the command that installs them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.engine.errors import EngineToolError, ExitCode
from proxy.engine.process import Work, run

if TYPE_CHECKING:
    import threading

    from proxy.engine.cache import Cache
    from proxy.engine.options import BuildOptions
    from proxy.engine.progress import Progress

_PROBE_TIMEOUT_S = 60
_WHEEL_TIMEOUT_S = 900.0
# Old enough to be everywhere, new enough to know every option used here.
_WHEELS = ("cmake>=3.24,<5", "ninja>=1.11")

_PACKAGES: dict[str, dict[str, str]] = {
    "apt-get install -y": {
        "c++": "g++",
        "git": "git",
        "nvcc": "nvidia-cuda-toolkit",
        "cmake": "cmake",
        "ninja": "ninja-build",
    },
    "dnf install -y": {
        "c++": "gcc-c++",
        "git": "git",
        "nvcc": "cuda-toolkit",
        "cmake": "cmake",
        "ninja": "ninja-build",
    },
    "pacman -S --noconfirm": {"c++": "gcc", "git": "git", "nvcc": "cuda", "cmake": "cmake", "ninja": "ninja"},
    "apk add": {"c++": "g++", "git": "git", "nvcc": "cuda", "cmake": "cmake", "ninja": "ninja"},
    "zypper install -y": {
        "c++": "gcc-c++",
        "git": "git",
        "nvcc": "cuda-toolkit",
        "cmake": "cmake",
        "ninja": "ninja",
    },
}


@dataclass(frozen=True, slots=True)
class Compiler:
    """The compilers cmake will be told to use, and what they call themselves."""

    cc: str
    cxx: str
    nvcc: str
    version: str
    cpu_features: tuple[str, ...]

    @property
    def cpu_digest(self) -> str:
        """Short hash of the features a native build may use; empty features hash too, so a key is never ambiguous."""
        return hashlib.sha256(" ".join(self.cpu_features).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class BuildTools:
    """cmake, ninja and, where present, ccache, as absolute paths."""

    cmake: str
    ninja: str
    ccache: str


def install_hint(missing: list[str]) -> str:
    """The command that installs ``missing`` on this machine, as far as its package manager is known."""
    for command, names in _PACKAGES.items():
        if shutil.which(command.split(maxsplit=1)[0]):
            sudo = "" if os.geteuid() == 0 else "sudo "
            return f"{sudo}{command} {' '.join(names[tool] for tool in missing)}"
    return "install " + " and ".join(missing) + " with the machine's package manager"


def find_compiler(options: BuildOptions) -> Compiler:
    """Find git and the compilers. ``CC``, ``CXX`` and ``CUDACXX`` are honoured.

    Raises EngineToolError (MISSING_TOOL) naming everything that is missing at once.
    """
    cc = _which(os.environ.get("CC"), "cc", "gcc", "clang")
    cxx = _which(os.environ.get("CXX"), "c++", "g++", "clang++")
    nvcc = _which(os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc") if options.cuda else ""
    missing = [] if cc and cxx else ["c++"]
    if not shutil.which("git"):
        missing.append("git")
    if options.cuda and not nvcc:
        missing.append("nvcc")
    if missing:
        what = {"c++": "a C++ compiler", "git": "git", "nvcc": "the CUDA compiler nvcc"}
        raise EngineToolError(
            f"missing to build the engine: {', '.join(what[tool] for tool in missing)}; install with:\n"
            f"    {install_hint(missing)}",
            exit_code=ExitCode.MISSING_TOOL,
        )
    versions = [_first_line(cxx)]
    features: tuple[str, ...] = ()
    if not options.release:
        features = _native_features(cc)
    if nvcc:
        versions.append(_output([nvcc, "--version"]).strip().split("\n")[-1])
        if not options.release and not options.cuda_architectures:
            features += _gpu_features()
    return Compiler(cc, cxx, nvcc, " + ".join(versions), features)


def _which(wanted: str | None, *names: str) -> str:
    if wanted:
        found = shutil.which(wanted)
        if found is None:
            raise EngineToolError(
                f"the compiler {wanted!r} set in the environment (CC, CXX or CUDACXX) is not found; "
                "set it to one program's name or path, or unset it",
                exit_code=ExitCode.MISSING_TOOL,
            )
        return found
    return next((found for name in names if (found := shutil.which(name))), "")


def _output(argv: list[str], stdin: str = "") -> str:
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_TIMEOUT_S,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineToolError(f"{argv[0]} does not run: {error}", exit_code=ExitCode.MISSING_TOOL) from error
    return done.stdout if done.returncode == 0 else ""


def _first_line(compiler: str) -> str:
    version = _output([compiler, "--version"]).split("\n")[0].strip()
    if not version:
        raise EngineToolError(
            f"{compiler} --version says nothing; is it a compiler?", exit_code=ExitCode.MISSING_TOOL
        )
    return version


def _native_features(cc: str) -> tuple[str, ...]:
    """What the compiler would take from this CPU: the macros that native tuning adds, asked of the compiler itself."""

    def macros(*flags: str) -> set[str]:
        return set(_output([cc, *flags, "-dM", "-E", "-x", "c", "-"]).split("\n"))

    native = macros("-march=native")
    if native == {""}:
        native = macros("-mcpu=native")
    added = native - macros()
    return tuple(sorted(line.removeprefix("#define ").removesuffix(" 1") for line in added if line))


def _gpu_features() -> tuple[str, ...]:
    smi = shutil.which("nvidia-smi")
    if not smi:
        return ()
    caps = _output([smi, "--query-gpu=compute_cap", "--format=csv,noheader"])
    return tuple(sorted({f"sm_{line.strip()}" for line in caps.split("\n") if line.strip()}))


def find_build_tools(cache: Cache, progress: Progress, cancel: threading.Event | None = None) -> BuildTools:
    """Cmake and ninja from PATH or this Python's environment; where missing, from package wheels put into the cache."""
    cmake, ninja = _tool("cmake", cache), _tool("ninja", cache)
    if not cmake or not ninja:
        progress.note("cmake or ninja is missing; fetching both from the package index")
        _fetch_wheels(cache, cancel)
        cmake, ninja = _tool("cmake", cache), _tool("ninja", cache)
    missing = [name for name, path in (("cmake", cmake), ("ninja", ninja)) if not path]
    if missing:
        raise EngineToolError(
            f"{' and '.join(missing)} not found, not even in their package wheels; install with:\n"
            f"    {install_hint(missing)}",
            exit_code=ExitCode.MISSING_TOOL,
        )
    return BuildTools(cmake, ninja, shutil.which("ccache") or "")


def _tool(name: str, cache: Cache) -> str:
    if found := shutil.which(name):
        return found
    # Wheels keep the real program in <name>/data/bin or among the scripts, depending on their age.
    for path in (
        Path(sys.prefix) / "bin" / name,
        cache.tools / name / "data" / "bin" / name,
        cache.tools / "bin" / name,
    ):
        if path.is_file() and os.access(path, os.X_OK) and _output([str(path), "--version"]):
            return str(path)
    return ""


def _fetch_wheels(cache: Cache, cancel: threading.Event | None) -> None:
    work = Work(
        what="fetching cmake and ninja with pip",
        argv=[
            *(sys.executable, "-m", "pip", "install", "--upgrade", "--no-deps", "--only-binary", ":all:"),
            *("--progress-bar", "off", "--target", str(cache.tools), *_WHEELS),
        ],
        cwd=cache.root,
        log=cache.root / "tools.log",
        deadline_s=_WHEEL_TIMEOUT_S,
    )
    run(work, cancel=cancel)
