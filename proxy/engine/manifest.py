"""The manifest beside an engine: what it was built from, and every file it consists of."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.engine.elf import read_elf
from proxy.engine.errors import EngineToolError
from proxy.engine.fetch import sha256_of
from proxy.engine.source import safe_relative

if TYPE_CHECKING:
    from collections.abc import Iterable

MANIFEST_NAME = "manifest.json"
FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileKind(StrEnum):
    """What an entry of the manifest is on disk."""

    FILE = "file"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One installed file or link, by its path relative to the manifest.

    ``mode`` is octal text, ``size_bytes`` and ``sha256`` belong to files, ``target`` to links. ``used_by`` names the
    programs that cannot start without it; ``required`` is true when ``llama-server`` is one of them.
    """

    path: str
    kind: FileKind
    required: bool
    used_by: tuple[str, ...]
    size_bytes: int = 0
    mode: str = ""
    sha256: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Source identity, how it was compiled, and the files. ``identity`` is ``<pin> : <series hash>``."""

    identity: str
    pin: str
    series: str
    build_number: int
    flags: str
    key: str
    version: str
    compiler: str
    cmake: tuple[str, ...]
    cpu_features: tuple[str, ...]
    built_at: str
    files: tuple[FileEntry, ...]
    format: int = FORMAT

    def entry(self, path: str) -> FileEntry | None:
        """The entry for a relative path."""
        return next((item for item in self.files if item.path == path), None)


def source_identity(pin: str, series: str) -> str:
    """How pin and series hash are written together, wherever two builds are compared."""
    return f"{pin} : {series}"


def to_json(manifest: Manifest) -> str:
    """The manifest as the text of its file."""
    return json.dumps(asdict(manifest), indent=2, sort_keys=True) + "\n"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest into an engine directory that is being put together."""
    (directory / MANIFEST_NAME).write_text(to_json(manifest), encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Read an engine directory's manifest. Raises EngineToolError naming the file and the field that is wrong."""
    path = directory / MANIFEST_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EngineToolError(
            f"cannot read {path}: {error.strerror or error}; is {directory} an engine?"
        ) from error
    except ValueError as error:
        raise EngineToolError(f"{path} is not JSON: {error}") from error
    return parse_manifest(raw, str(path))


def parse_manifest(raw: object, origin: str) -> Manifest:
    """Turn parsed JSON into a Manifest, checking every field. ``origin`` names it in errors."""
    fields = _Fields(raw, origin)
    if (found := fields.number("format")) != FORMAT:
        raise EngineToolError(f"{origin}: format {found}, this program reads {FORMAT}; use matching versions")
    files = tuple(
        _parse_entry(item, f"{origin}: files[{index}]") for index, item in enumerate(fields.items("files"))
    )
    if len({entry.path for entry in files}) != len(files):
        raise EngineToolError(f"{origin}: a file is listed twice")
    return Manifest(
        identity=fields.text("identity"),
        pin=fields.text("pin"),
        series=fields.text("series"),
        build_number=fields.number("build_number"),
        flags=fields.text("flags"),
        key=fields.text("key"),
        version=fields.text("version"),
        compiler=fields.text("compiler"),
        cmake=fields.texts("cmake"),
        cpu_features=fields.texts("cpu_features"),
        built_at=fields.text("built_at"),
        files=files,
    )


def _parse_entry(raw: object, origin: str) -> FileEntry:
    fields = _Fields(raw, origin)
    path = fields.text("path")
    if safe_relative(path) != path:
        raise EngineToolError(f"{origin}: path {path!r} leaves the engine's directory")
    try:
        kind = FileKind(fields.text("kind"))
    except ValueError as error:
        raise EngineToolError(f"{origin}: kind must be one of {', '.join(FileKind)}") from error
    entry = FileEntry(
        path=path,
        kind=kind,
        required=fields.flag("required"),
        used_by=fields.texts("used_by"),
        size_bytes=fields.number("size_bytes"),
        mode=fields.text("mode"),
        sha256=fields.text("sha256"),
        target=fields.text("target"),
    )
    if kind is FileKind.FILE and not _SHA256.fullmatch(entry.sha256):
        raise EngineToolError(f"{origin}: sha256 of {path} must be 64 lower-case hex digits")
    return entry


class _Fields:
    """Typed access to one JSON object; every complaint names the field."""

    def __init__(self, raw: object, origin: str) -> None:
        if not isinstance(raw, dict):
            raise EngineToolError(f"{origin}: expected a JSON object")
        self._raw: dict[str, Any] = raw
        self._origin = origin

    def text(self, name: str) -> str:
        value = self._raw.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def number(self, name: str) -> int:
        value = self._raw.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(name, "a whole number")
        return value

    def flag(self, name: str) -> bool:
        value = self._raw.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def items(self, name: str) -> list[object]:
        value = self._raw.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.items(name)
        if not all(isinstance(value, str) for value in values):
            raise self._wrong(name, "a list of strings")
        return tuple(str(value) for value in values)

    def _wrong(self, name: str, expected: str) -> EngineToolError:
        return EngineToolError(f"{self._origin}: {name} must be {expected}, got {self._raw.get(name)!r}")


def closure(folder: Path, program: str) -> tuple[str, ...]:
    """Names in ``folder`` that ``program`` cannot start without: itself, its libraries, and the links they go by.

    Libraries that are not in ``folder`` are the system's and are left to it.
    """
    names: list[str] = []
    waiting = [program]
    while waiting:
        name = waiting.pop(0)
        if name in names:
            continue
        names.append(name)
        path = folder / name
        if path.is_symlink():
            target = str(path.readlink())
            if safe_relative(target) != target or "/" in target:
                raise EngineToolError(f"{path} links to {target}; expected a file beside it")
            waiting.append(target)
            continue
        if not path.is_file():
            raise EngineToolError(f"{path} is missing, but {program} needs it")
        waiting += [needed for needed in read_elf(path).needed if os.path.lexists(folder / needed)]
    return tuple(names)


def describe_files(folder: Path, programs: Iterable[str], main: str) -> tuple[FileEntry, ...]:
    """Entries for every file in ``folder``, with what each program needs of them; ``main`` decides ``required``."""
    needs = {program: set(closure(folder, program)) for program in programs}
    entries = []
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST_NAME:
            continue
        users = tuple(program for program, names in needs.items() if path.name in names)
        required = main in users
        if path.is_symlink():
            entries.append(FileEntry(path.name, FileKind.LINK, required, users, target=str(path.readlink())))
            continue
        status = path.stat()
        entries.append(
            FileEntry(
                path=path.name,
                kind=FileKind.FILE,
                required=required,
                used_by=users,
                size_bytes=status.st_size,
                mode=f"{stat.S_IMODE(status.st_mode):04o}",
                sha256=sha256_of(path),
            )
        )
    return tuple(entries)
