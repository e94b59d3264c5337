"""Check an engine's files, and a running engine process, against the manifest."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from proxy.engine.errors import EngineToolError
from proxy.engine.fetch import sha256_of
from proxy.engine.manifest import MANIFEST_NAME, FileEntry, FileKind, Manifest, read_manifest

_CACHE_ENTRIES = 512
_DELETED = " (deleted)"


class MismatchReason(StrEnum):
    """Why a file or a mapping is not what the manifest says."""

    MISSING = "missing"
    KIND = "kind"
    SIZE = "size"
    MODE = "mode"
    SHA256 = "sha256"
    TARGET = "target"
    UNLISTED = "unlisted"
    NOT_MAPPED = "not_mapped"
    ELSEWHERE = "elsewhere"
    DELETED = "deleted"
    REPLACED = "replaced"
    EXECUTABLE = "executable"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One lie: the file, what the manifest expects, what was found."""

    path: str
    reason: MismatchReason
    expected: str
    actual: str

    def __str__(self) -> str:
        """One line that names the file and both values."""
        return f"{self.path}: {self.reason} expected {self.expected or 'nothing'}, found {self.actual or 'nothing'}"


class HashCache:
    """SHA-256 by (device, inode, size, mtime, ctime): a file that did not change is read once. Safe across threads."""

    def __init__(self, entries: int = _CACHE_ENTRIES) -> None:
        """Keep at most ``entries`` hashes, the oldest leave first."""
        self._entries = entries
        self._known: OrderedDict[tuple[int, int, int, int, int], str] = OrderedDict()
        self._lock = threading.Lock()

    def sha256(self, path: Path) -> str:
        """Hash of the file behind ``path``; OSError when it cannot be read."""
        status = path.stat()
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        digest = sha256_of(path)
        with self._lock:
            self._known[key] = digest
            while len(self._known) > self._entries:
                self._known.popitem(last=False)
        return digest


_HASHES = HashCache()


def verify_files(directory: Path, *, cache: HashCache | None = None) -> list[Mismatch]:
    """Compare an engine directory with its manifest; an empty list means every file is as it was built.

    Files that the manifest does not list are reported too: a library dropped in would be loaded. Raises
    EngineToolError when there is no readable manifest.
    """
    manifest = read_manifest(directory)
    hashes = cache or _HASHES
    found = [lie for entry in manifest.files if (lie := _check_entry(directory, entry, hashes)) is not None]
    listed = {entry.path for entry in manifest.files} | {MANIFEST_NAME}
    found += [
        Mismatch(path.name, MismatchReason.UNLISTED, "", "a file the manifest does not list")
        for path in sorted(directory.iterdir())
        if path.name not in listed
    ]
    return found


def _check_entry(directory: Path, entry: FileEntry, hashes: HashCache) -> Mismatch | None:
    path = directory / entry.path
    wanted = f"a {entry.kind}"
    try:
        status = path.lstat()
    except OSError as error:
        return Mismatch(entry.path, MismatchReason.MISSING, wanted, str(error.strerror or error))
    if stat.S_ISLNK(status.st_mode):
        if entry.kind is not FileKind.LINK:
            return Mismatch(entry.path, MismatchReason.KIND, wanted, "a link")
        target = str(path.readlink())
        if target != entry.target:
            return Mismatch(entry.path, MismatchReason.TARGET, entry.target, target)
        return None
    if entry.kind is not FileKind.FILE or not stat.S_ISREG(status.st_mode):
        return Mismatch(entry.path, MismatchReason.KIND, wanted, "something else")
    try:
        digest = hashes.sha256(path)
    except OSError as error:
        return Mismatch(entry.path, MismatchReason.MISSING, wanted, str(error.strerror or error))
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    for reason, expected, actual in (
        (MismatchReason.SHA256, entry.sha256, digest),
        (MismatchReason.SIZE, str(entry.size_bytes), str(status.st_size)),
        (MismatchReason.MODE, entry.mode, mode),
    ):
        if expected != actual:
            return Mismatch(entry.path, reason, expected, actual)
    return None


@dataclass(frozen=True, slots=True)
class Mapping:
    """One mapped file of a process: device and inode as the kernel has them, and the path it was opened by."""

    span: str
    device: int
    inode: int
    path: str


def parse_maps(text: str) -> tuple[Mapping, ...]:
    """Read ``/proc/<pid>/maps``: one Mapping per file and path, anonymous memory and kernel pages left out."""
    found: dict[tuple[int, int, str], Mapping] = {}
    for line in text.split("\n"):
        parts = line.split(maxsplit=5)
        if len(parts) < 6 or not parts[5].startswith("/"):
            continue
        span, _, _, device, inode, path = parts
        major, _, minor = device.partition(":")
        path = path.replace("\\012", "\n")
        number = os.makedev(int(major, 16), int(minor, 16))
        mapping = Mapping(span, number, int(inode), path)
        found.setdefault((number, mapping.inode, path), mapping)
    return tuple(found.values())


def verify_process(pid: int, manifest_dir: Path, *, cache: HashCache | None = None) -> list[Mismatch]:
    """Compare what a running engine really has mapped with the manifest; an empty list means it is that engine.

    The executable must be a program of the manifest; every file that program needs must be mapped, from the
    manifest's directory, with the inode that lies there now and the listed hash; a library of the same name mapped from
    elsewhere, or one whose file was deleted or replaced since, is a lie. Raises EngineToolError when the process or the
    manifest cannot be read.
    """
    manifest = read_manifest(manifest_dir)
    hashes = cache or _HASHES
    proc = Path("/proc") / str(pid)
    try:
        text = (proc / "maps").read_text(encoding="utf-8", errors="surrogateescape")
        executable = str((proc / "exe").readlink())
    except OSError as error:
        raise EngineToolError(f"cannot look into process {pid}: {error.strerror or error}") from error
    base = manifest_dir.resolve()
    program = _program(manifest, base, executable)
    if isinstance(program, Mismatch):
        return [program]
    mappings = parse_maps(text)
    found: list[Mismatch] = []
    mapped: set[str] = set()
    files = {entry.path: entry for entry in manifest.files if entry.kind is FileKind.FILE}
    names = {entry.path for entry in manifest.files}
    for mapping in mappings:
        deleted = mapping.path.endswith(_DELETED)
        path = Path(mapping.path.removesuffix(_DELETED))
        if path.name not in names:
            continue
        if path.parent != base:
            found.append(Mismatch(path.name, MismatchReason.ELSEWHERE, str(base / path.name), mapping.path))
            continue
        mapped.add(path.name)
        if deleted:
            found.append(Mismatch(path.name, MismatchReason.DELETED, str(path), mapping.path))
        elif path.name in files and (lie := _check_mapping(proc, mapping, files[path.name], base, hashes)):
            found.append(lie)
    found += [
        Mismatch(entry.path, MismatchReason.NOT_MAPPED, f"mapped by pid {pid}", "")
        for entry in files.values()
        if program in entry.used_by and entry.path not in mapped
    ]
    return found


def _program(manifest: Manifest, base: Path, executable: str) -> str | Mismatch:
    programs = sorted({user for entry in manifest.files for user in entry.used_by})
    path = Path(executable.removesuffix(_DELETED))
    if path.parent == base and path.name in programs:
        return path.name
    expected = " or ".join(str(base / program) for program in programs)
    return Mismatch(path.name, MismatchReason.EXECUTABLE, expected, executable)


def _check_mapping(
    proc: Path, mapping: Mapping, entry: FileEntry, base: Path, hashes: HashCache
) -> Mismatch | None:
    path = base / entry.path
    try:
        status = path.stat()
        digest = hashes.sha256(path)
    except OSError as error:
        return Mismatch(entry.path, MismatchReason.MISSING, str(path), str(error.strerror or error))
    if (status.st_dev, status.st_ino) != (mapping.device, mapping.inode) and not _same_file(
        proc, mapping, status
    ):
        return Mismatch(
            entry.path,
            MismatchReason.REPLACED,
            f"device {status.st_dev:#x} inode {status.st_ino}",
            f"device {mapping.device:#x} inode {mapping.inode}",
        )
    if digest != entry.sha256:
        return Mismatch(entry.path, MismatchReason.SHA256, entry.sha256, digest)
    return None


def _same_file(proc: Path, mapping: Mapping, status: os.stat_result) -> bool:
    # Some file systems (btrfs, overlayfs) show another device number in maps than in stat; following the mapping itself
    # gives stat's view. The kernel allows it only with the right to trace the process.
    try:
        mapped = (proc / "map_files" / mapping.span).stat()
    except OSError:
        return False
    return (mapped.st_dev, mapped.st_ino) == (status.st_dev, status.st_ino)
