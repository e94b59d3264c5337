"""The scheduling harness: a program on libllama that is compiled in the engine's own tree, and no part of the engine.

Its sources are in no engine's identity: they enter the key of engines that were asked for with it, and no other.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from proxy.engine.errors import EngineToolError
from proxy.engine.series import OverlayFile, read_flat
from proxy.engine.source import SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HARNESS_BINARY = "llama-phase-harness"
HARNESS_DIR = "tools/phase-harness"
# Read by CMake after each project() call: it adds HARNESS_DIR without a patch.
_ATTACH = "attach.cmake"
_INCLUDE_VARIABLE = "CMAKE_PROJECT_INCLUDE"


def read_harness(native_patch: Path) -> tuple[OverlayFile, ...]:
    """Read the files of ``harness/`` by name. Raises EngineToolError where there are none."""
    directory = native_patch / "harness"
    files = read_flat(directory)
    if not any(item.name == _ATTACH for item in files):
        raise EngineToolError(f"{directory / _ATTACH} is missing, so the harness cannot be built")
    return files


def harness_digest(files: tuple[OverlayFile, ...]) -> str:
    """SHA-256 over names and bytes."""
    total = hashlib.sha256()
    for item in files:
        total.update(f"{item.name} {len(item.data)}\n".encode())
        total.update(item.data)
    return total.hexdigest()


def in_tree(files: tuple[OverlayFile, ...]) -> Iterator[SourceFile]:
    """The files at their place in the tree that is compiled."""
    for item in files:
        yield SourceFile(f"{HARNESS_DIR}/{item.name}", item.data)


def cmake_argument(files: tuple[OverlayFile, ...], tree: Path) -> str:
    """CMake's argument that adds the harness, or takes it out of a build folder that knew it."""
    if not files:
        return f"-U{_INCLUDE_VARIABLE}"
    return f"-D{_INCLUDE_VARIABLE}={tree / HARNESS_DIR / _ATTACH}"
