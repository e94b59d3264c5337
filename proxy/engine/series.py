"""The patch series and the overlay as values, and the hash that names them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.engine.errors import EngineToolError
from proxy.engine.mail import Mail, parse_mail

if TYPE_CHECKING:
    from pathlib import Path

OVERLAY_DIR = "tools/server/phase"
HASH_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch file: its name in ``series``, its bytes, and what they say."""

    file_name: str
    data: bytes
    mail: Mail

    @property
    def name(self) -> str:
        """The file name without its suffix."""
        return self.file_name.removesuffix(".patch")


@dataclass(frozen=True, slots=True)
class OverlayFile:
    """One file that is copied flat into the engine's tree."""

    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class PatchSet:
    """Everything we add to the unpatched source, in order of application."""

    patches: tuple[Patch, ...]
    overlay: tuple[OverlayFile, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over every patch in series order and every overlay file by name."""
        total = hashlib.sha256()
        for kind, name, data in (
            *(("patch", patch.file_name, patch.data) for patch in self.patches),
            *(("overlay", item.name, item.data) for item in self.overlay),
        ):
            total.update(f"{kind} {name} {len(data)}\n".encode())
            total.update(data)
        return total.hexdigest()

    @property
    def series_hash(self) -> str:
        """The digest, short enough to read out: it stands in ``--version``, ``/props`` and the manifest."""
        return self.digest[:HASH_DIGITS]

    @property
    def touched(self) -> frozenset[str]:
        """Paths of the unpatched tree that some patch changes or creates."""
        return frozenset(touch.path for patch in self.patches for touch in patch.mail.touches)


def read_series_names(native_patch: Path) -> tuple[str, ...]:
    """The lines of ``series``, in order."""
    path = native_patch / "series"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise EngineToolError(f"cannot read {path}: {error.strerror or error}") from error
    names = tuple(line.strip() for line in lines if line.strip())
    for name in names:
        if "/" in name or not name.endswith(".patch"):
            raise EngineToolError(
                f"{path}: {name!r} is not the name of a file in patches/ (one 'slug.patch' per line)"
            )
    if len(set(names)) != len(names):
        raise EngineToolError(f"{path}: a patch is listed twice")
    return names


def read_patch_set(native_patch: Path) -> PatchSet:
    """Read ``series``, ``patches/`` and ``overlay/``. A listed patch that is missing is an error naming its file."""
    patches = []
    for name in read_series_names(native_patch):
        path = native_patch / "patches" / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise EngineToolError(
                f"{path}, listed in series, cannot be read: {error.strerror or error}"
            ) from error
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise EngineToolError(f"{path} is not UTF-8 text: {error}") from error
        patches.append(Patch(name, data, parse_mail(name, text)))
    return PatchSet(tuple(patches), read_overlay(native_patch / "overlay"))


def read_overlay(directory: Path) -> tuple[OverlayFile, ...]:
    """Read the overlay's files by name. It is flat: a subdirectory or a link in it is an error."""
    return read_flat(directory)


def read_flat(directory: Path) -> tuple[OverlayFile, ...]:
    """Read the files of a flat directory by name; none where there is no such directory."""
    if not directory.is_dir():
        return ()
    files = []
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise EngineToolError(
                f"{path}: the {directory.name} is flat and holds plain files only; move it out of {directory.name}/"
            )
        files.append(OverlayFile(path.name, path.read_bytes()))
    return tuple(files)
