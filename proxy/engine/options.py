"""What kind of engine to build, as cmake understands it. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.engine.errors import EngineToolError
from proxy.engine.harness import HARNESS_BINARY

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVER_BINARY = "llama-server"
RPC_BINARY = "ggml-rpc-server"


class Sanitizer(StrEnum):
    """Compiler sanitizers a test build can carry. ``thread`` goes with no other."""

    ADDRESS = "address"
    UNDEFINED = "undefined"
    THREAD = "thread"


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """One engine flavour. ``jobs`` and ``llama_cpp_dir`` say how and from what, the rest is what the engine is.

    ``stock`` builds the source without our series, for comparisons. ``harness`` adds the scheduling harness.
    """

    rpc: bool = False
    harness: bool = False
    cuda: bool = False
    cuda_architectures: str = ""
    release: bool = False
    sanitize: tuple[Sanitizer, ...] = ()
    stock: bool = False
    jobs: int | None = None
    llama_cpp_dir: Path | None = None

    def __post_init__(self) -> None:
        """Refuse combinations no compiler takes."""
        if Sanitizer.THREAD in self.sanitize and len(self.sanitize) > 1:
            raise EngineToolError(
                "--sanitize thread cannot be combined with another sanitizer; build two engines"
            )
        if self.stock and self.sanitize and Sanitizer.THREAD not in self.sanitize:
            raise EngineToolError("--stock has no instrumented overlay; only --sanitize thread goes with it")
        if self.cuda_architectures and not self.cuda:
            raise EngineToolError("--cuda-arch needs --cuda")
        if self.jobs is not None and self.jobs < 1:
            raise EngineToolError(f"--jobs must be at least 1, got {self.jobs}")

    @property
    def flavour(self) -> str:
        """A directory name that keeps unlike engines apart."""
        parts = [
            self.work_flavour,
            *(["stock"] if self.stock else []),
            *(["harness"] if self.harness else []),
        ]
        return "-".join(parts)

    @property
    def work_flavour(self) -> str:
        """A directory name that keeps unlike compilations apart.

        With and without the series is one tree: a build of the other then recompiles only what the series touches. With
        and without the harness is one tree too: it adds one program to it.
        """
        parts = ["cuda" if self.cuda else "cpu", "portable" if self.release else "native"]
        if self.cuda_architectures:
            parts.append("sm" + "".join(c if c.isalnum() else "-" for c in self.cuda_architectures))
        if self.rpc:
            parts.append("rpc")
        parts += list(self.sanitize)
        return "-".join(parts)

    @property
    def flags(self) -> str:
        """The options that make a difference at run time, for ``/props`` and the manifest."""
        pairs = [
            ("GGML_NATIVE", _on(not self.release)),
            ("GGML_CUDA", _on(self.cuda)),
            ("GGML_RPC", _on(self.rpc)),
        ]
        if self.cuda_architectures:
            # A semicolon would end the value where CMake reads it as a list.
            pairs.append(("CMAKE_CUDA_ARCHITECTURES", self.cuda_architectures.replace(";", ",")))
        if self.sanitize:
            pairs.append(("SANITIZE", ",".join(self.sanitize)))
        return " ".join(f"{key}={value}" for key, value in pairs)

    @property
    def targets(self) -> tuple[str, ...]:
        """What ninja is asked for."""
        rpc = (RPC_BINARY,) if self.rpc else ()
        harness = (HARNESS_BINARY,) if self.harness else ()
        return (SERVER_BINARY, *rpc, *harness)

    def definitions(self) -> dict[str, str]:
        """CMake cache entries of this flavour, without those that name the source (see ``identity_definitions``)."""
        defs = {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
            "CMAKE_INSTALL_RPATH": "$ORIGIN",
            "LLAMA_BUILD_TESTS": "OFF",
            "LLAMA_BUILD_EXAMPLES": "OFF",
            "LLAMA_BUILD_TOOLS": "ON",
            "LLAMA_BUILD_SERVER": "ON",
            "LLAMA_BUILD_APP": "OFF",
            "LLAMA_BUILD_UI": "OFF",
            "LLAMA_USE_PREBUILT_UI": "OFF",
            "LLAMA_OPENSSL": "OFF",
            "GGML_NATIVE": _on(not self.release),
            "GGML_CUDA": _on(self.cuda),
            "GGML_RPC": _on(self.rpc),
        }
        if self.cuda_architectures:
            defs["CMAKE_CUDA_ARCHITECTURES"] = self.cuda_architectures
        if self.sanitize and self.stock:
            # Without the overlay only llama.cpp's own switch is left. OpenMP's barriers are invisible to the sanitizer.
            defs |= {"LLAMA_SANITIZE_THREAD": "ON", "GGML_OPENMP": "OFF"}
        elif self.sanitize:
            # phase.cmake instruments the server's own sources; the rest stays fast and only links the runtime. So does
            # ggml, whose threads then are of no interest, OpenMP's or others; tests run it with one thread.
            link = f"-fsanitize={','.join(self.sanitize)}"
            defs |= {
                "PHASE_SANITIZE": ",".join(self.sanitize),
                "CMAKE_EXE_LINKER_FLAGS": link,
                "CMAKE_SHARED_LINKER_FLAGS": link,
            }
        return defs


def identity_definitions(pin: str, build_number: int, series: str, flags: str) -> dict[str, str]:
    """CMake cache entries that make the binary tell what it was built from."""
    return {
        "LLAMA_BUILD_NUMBER": str(build_number),
        "LLAMA_BUILD_COMMIT": series,
        "PHASE_BUILD_PIN": pin,
        "PHASE_BUILD_SERIES": series,
        "PHASE_BUILD_FLAGS": flags,
    }


def parse_sanitizers(text: str) -> tuple[Sanitizer, ...]:
    """Read ``address,undefined`` or ``thread``; order does not matter."""
    chosen = {part.strip() for part in text.split(",") if part.strip()}
    if unknown := sorted(chosen - set(Sanitizer)):
        raise EngineToolError(f"--sanitize: unknown {', '.join(unknown)}; choose from {', '.join(Sanitizer)}")
    return tuple(sanitizer for sanitizer in Sanitizer if sanitizer in chosen)


def options_from_environment(environ: Mapping[str, str] | None = None) -> BuildOptions:
    """The default flavour, with ``CUDA=1``, ``CUDA_ARCHITECTURES=`` and ``LLAMA_CPP_DIR=`` of the environment applied."""
    env = os.environ if environ is None else environ
    cuda = env.get("CUDA", "").strip().lower()
    if cuda not in ("", "0", "1", "on", "off", "true", "false", "yes", "no"):
        raise EngineToolError(f"CUDA={cuda!r}: expected 1 or 0")
    use_cuda = cuda in ("1", "on", "true", "yes")
    checkout = env.get("LLAMA_CPP_DIR", "")
    return BuildOptions(
        cuda=use_cuda,
        cuda_architectures=env.get("CUDA_ARCHITECTURES", "") if use_cuda else "",
        llama_cpp_dir=Path(checkout).expanduser().absolute() if checkout else None,
    )


def _on(value: bool) -> str:
    return "ON" if value else "OFF"
