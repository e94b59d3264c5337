"""The unpatched tree as a stream of files: out of the checked archive, or out of a user's own checkout."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from proxy.engine.errors import EngineToolError

if TYPE_CHECKING:
    from collections.abc import Iterator

_TREE = "llama.cpp"
_MUST_HOLD = ("CMakeLists.txt", "tools/server/CMakeLists.txt")
_GIT_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One regular file: a relative POSIX path inside the tree, its bytes, and whether it may be executed."""

    path: str
    data: bytes
    executable: bool = False


class Source(Protocol):
    """An unpatched llama.cpp tree that can be read any number of times and is never written."""

    def files(self) -> Iterator[SourceFile]:
        """Every file of the tree, in any order."""


def safe_relative(path: str) -> str | None:
    """``path`` in normal form when it stays inside the tree it is relative to, else None."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or not pure.parts or "\\" in path or "\0" in path:
        return None
    if any(part in ("..", "") for part in pure.parts):
        return None
    return str(pure)


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """The ``llama.cpp/`` folder of a source archive whose hash was checked before."""

    archive: Path

    def files(self) -> Iterator[SourceFile]:
        """Read member by member; nothing is written, so nothing can escape.

        A member of the tree that is neither a plain file nor a folder, or whose name leaves the tree, is an error.
        """
        seen: set[str] = set()
        try:
            with tarfile.open(self.archive, "r:*") as tar:
                for member in tar:
                    found = self._member(tar, member)
                    if found is not None:
                        seen.add(found.path)
                        yield found
        except (tarfile.TarError, EOFError, OSError) as error:
            raise EngineToolError(
                f"{self.archive} cannot be unpacked: {error}; delete it and run this again"
            ) from error
        _require(seen, str(self.archive))

    def _member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> SourceFile | None:
        name = safe_relative(member.name)
        if name is None:
            raise EngineToolError(f"{self.archive}: unsafe member name {member.name!r}")
        parts = PurePosixPath(name).parts
        if len(parts) < 3 or parts[1] != _TREE or member.isdir():
            return None
        if not member.isreg():
            raise EngineToolError(
                f"{self.archive}: {member.name} is a link or a device; expected plain files only"
            )
        stream = tar.extractfile(member)
        if stream is None:
            raise EngineToolError(f"{self.archive}: {member.name} has no content")
        return SourceFile(str(PurePosixPath(*parts[2:])), stream.read(), bool(member.mode & 0o100))


@dataclass(frozen=True, slots=True)
class CheckoutSource:
    """A user's own llama.cpp directory; read only."""

    root: Path

    def files(self) -> Iterator[SourceFile]:
        """Tracked and untracked files that git does not ignore, or every file where there is no git."""
        seen: set[str] = set()
        base = self.root.resolve()
        for relative in sorted(self._names()):
            path = self.root / relative
            if not path.exists() or path.is_dir():
                continue
            if not path.resolve().is_relative_to(base):
                raise EngineToolError(f"{path} is a link out of {self.root}; copy the file in")
            seen.add(relative)
            yield SourceFile(relative, path.read_bytes(), os.access(path, os.X_OK))
        _require(seen, str(self.root))

    def _names(self) -> Iterator[str]:
        if (self.root / ".git").exists():
            listed = _git(self.root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
            yield from (name for name in listed.split("\0") if name)
            return
        for folder, folders, names in os.walk(self.root):
            top = Path(folder) == self.root
            folders[:] = [name for name in folders if not (top and name.startswith("build"))]
            for name in names:
                yield str((Path(folder) / name).relative_to(self.root))


@dataclass(frozen=True, slots=True)
class CheckoutIdentity:
    """What a user's own checkout is called, and the hash of its content that the cache key uses."""

    identity: str
    content_sha256: str
    build_number: int


def identify_checkout(root: Path) -> CheckoutIdentity:
    """Name a checkout ``local:<git describe>``, with a content hash behind it when it is dirty or has no git."""
    if not root.is_dir():
        raise EngineToolError(f"LLAMA_CPP_DIR={root} is not a directory")
    total = hashlib.sha256()
    for item in CheckoutSource(root).files():
        total.update(f"{item.path} {int(item.executable)} {len(item.data)}\n".encode())
        total.update(item.data)
    content = total.hexdigest()
    if not (root / ".git").exists():
        return CheckoutIdentity(f"local:{content[:12]}", content, 0)
    described = _git(root, "describe", "--always", "--dirty", "--tags").strip()
    # The name goes through CMake and C string literals: nothing but plain characters may stay in it.
    described = re.sub(r"[^A-Za-z0-9._+-]", "-", described)
    name = f"local:{described}-{content[:8]}" if described.endswith("-dirty") else f"local:{described}"
    tag = re.match(r"b(\d+)(?:-|$)", described)
    return CheckoutIdentity(name, content, int(tag[1]) if tag else 0)


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineToolError(f"git {arguments[0]} in {root} failed: {error}") from error
    if done.returncode != 0:
        raise EngineToolError(f"git {arguments[0]} in {root} failed: {done.stderr.strip()}")
    return done.stdout


def _require(seen: set[str], origin: str) -> None:
    if missing := [name for name in _MUST_HOLD if name not in seen]:
        raise EngineToolError(f"{origin} does not hold a llama.cpp tree: {', '.join(missing)} missing")
