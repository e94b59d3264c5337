"""Which patches still apply on another version of the source. A report; nothing is rewritten."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.engine.errors import EngineToolError
from proxy.engine.fetch import Archive, fetch, sha256_of, source_archive
from proxy.engine.series import OVERLAY_DIR, Patch, PatchSet
from proxy.engine.source import ArchiveSource, Source
from proxy.engine.tree import apply_patch, run_apply, write_file

if TYPE_CHECKING:
    import threading

    from proxy.engine.cache import Cache
    from proxy.engine.pin import Upstream
    from proxy.engine.progress import Progress

_VERSION = re.compile(r"[0-9A-Za-z.!+_-]+")
_OFFSET = re.compile(r"Hunk #\d+ succeeded at .*offset")
_CHECKING = re.compile(r"Checking patch (.*)\.\.\.$")
_FAILED = re.compile(
    r"^error: (patch failed: .*|.*: No such file or directory|.*: does not exist in .*|.*: already exists in .*)$"
)


class Outcome(StrEnum):
    """How one patch fares on the other version."""

    CLEAN = "clean"
    OFFSET = "offset"
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class BumpRow:
    """One patch: its outcome and, line by line, what moved."""

    patch: str
    outcome: Outcome
    details: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BumpReport:
    """The other version as UPSTREAM would pin it, and how each patch fares on it."""

    pinned: str
    version: str
    sha256: str
    size_bytes: int
    build_number: int
    rows: tuple[BumpRow, ...]
    overlay_clash: tuple[str, ...]

    @property
    def applies(self) -> bool:
        """Whether the whole series applies as it is."""
        return not self.overlay_clash and all(row.outcome is not Outcome.CONFLICT for row in self.rows)


def bump_report(
    cache: Cache,
    pin: Upstream,
    patch_set: PatchSet,
    to: str | None,
    progress: Progress,
    *,
    cancel: threading.Event | None = None,
) -> BumpReport:
    """Try the series on version ``to`` of the source package, or on the newest one the index has."""
    if to is not None and not _VERSION.fullmatch(to):
        raise EngineToolError(f"--to {to!r} is not a version")
    archive = source_archive(pin) if to == pin.version else Archive(pin.package, to or "", "", 0, sdist=True)
    path = fetch(cache, archive, progress, cancel)
    version = re.sub(r"^.*-(\d[^-]*)\.tar\.\w+$", r"\1", path.name)
    rows, clash = try_series(ArchiveSource(path), patch_set)
    number = version.split(".")[0]
    return BumpReport(
        pinned=pin.version,
        version=version,
        sha256=sha256_of(path),
        size_bytes=path.stat().st_size,
        build_number=int(number) if number.isdigit() else 0,
        rows=rows,
        overlay_clash=clash,
    )


def try_series(source: Source, patch_set: PatchSet) -> tuple[tuple[BumpRow, ...], tuple[str, ...]]:
    """Apply patch by patch to a scratch copy of the touched files; a conflicting patch keeps the hunks that fit.

    Returns the rows and the source's own files in the overlay's place.
    """
    touched = patch_set.touched
    clash = []
    with tempfile.TemporaryDirectory(prefix="llama-proxy-bump-") as name:
        stage = Path(name) / "tree"
        stage.mkdir()
        for item in source.files():
            if item.path in touched:
                write_file(stage / item.path, item.data, executable=item.executable)
            if item.path.startswith(f"{OVERLAY_DIR}/"):
                clash.append(item.path)
        rows = tuple(_try_patch(stage, patch) for patch in patch_set.patches)
    return rows, tuple(clash)


def _try_patch(stage: Path, patch: Patch) -> BumpRow:
    try:
        said = apply_patch(stage, patch.file_name, patch.data)
    except EngineToolError:
        said = run_apply(stage, patch.data, "--reject").stderr
        for reject in stage.rglob("*.rej"):
            reject.unlink()
        details = dict.fromkeys(found[1] for line in said.split("\n") if (found := _FAILED.match(line)))
        return BumpRow(patch.name, Outcome.CONFLICT, tuple(details) or tuple(said.strip().split("\n")))
    moved = _moved_hunks(said)
    return BumpRow(patch.name, Outcome.OFFSET if moved else Outcome.CLEAN, moved)


def _moved_hunks(said: str) -> tuple[str, ...]:
    moved = []
    path = ""
    for line in said.split("\n"):
        if found := _CHECKING.match(line):
            path = found[1]
        elif _OFFSET.match(line):
            moved.append(f"{path}: {line.strip()}")
    return tuple(moved)
