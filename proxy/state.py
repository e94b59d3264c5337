"""The state folder: what must outlive the proxy, as small versioned JSON files, each written whole or not at all.

Nothing here raises into a service that runs: a folder that cannot be used, a full disk and a file that cannot
be read become a warning that names the path and what follows from it (`problem`, the return of `write`).
One proxy owns a folder at a time (a lock that ends with the process); another one works without memory.

All methods block for as long as the disk does: call `write` from a worker thread where that matters.
"""

import fcntl
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

from proxy import logs

VERSION: Final = 1
LOCK: Final = "lock"
PROBE: Final = "probe.json"
ORPHAN_S: Final = 3.0
"""How long the lock of an owner that is dead is waited for."""
_RETRY_S: Final = 0.02
_MAX_NAME: Final = 120
_log = logs.get("state")
_T = TypeVar("_T")


def default_dir() -> Path:
    """Return the user's folder for the proxy's state (`$XDG_STATE_HOME`, else `~/.local/state`)."""
    base = os.environ.get("XDG_STATE_HOME") or ""
    root = Path(base) if Path(base).is_absolute() else Path("~/.local/state").expanduser()
    return root / "llama-proxy"


def file_name(name: str) -> str:
    """Return a file name for any text, different texts giving different names."""
    quoted = quote(name, safe=" +@,=~").replace(".", "%2E")
    if len(quoted) <= _MAX_NAME:
        return quoted
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return f"{quoted[: _MAX_NAME - 17]}~{digest}"


def _locked(lock: int) -> bool:
    """Lock an open file, if nobody else has it; a dead owner's lock is waited for.

    Who was killed while it started a process may live on in that for some milliseconds, until it becomes the other
    program.
    """
    deadline = time.monotonic() + ORPHAN_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = _owner(lock)
            if owner is None or _lives(owner) or time.monotonic() > deadline:
                return False
            time.sleep(_RETRY_S)
        else:
            return True


def _owner(lock: int) -> int | None:
    """Return the process that wrote itself into a lock file, None when that is not to be read."""
    with suppress(OSError, ValueError):
        return int(os.pread(lock, 20, 0))
    return None


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] != [b"Z"]
    return False


class StateDir:
    """One folder."""

    def __init__(self, path: Path | None, lock: int | None, problem: str = "") -> None:
        self.path: Final = path
        self._problem = problem
        self._lock = lock
        self._troubled: set[str] = set()
        self._unwritten: dict[str, str] = {}
        self._writing = threading.Lock()

    @classmethod
    def open(cls, path: Path | None) -> "StateDir":
        """Take a folder into use, making it where missing; None keeps nothing on disk, on purpose."""
        if path is None:
            return cls(None, None)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return cls._without(path, f"cannot be written ({error.strerror})")
        if not _locked(lock):
            owner = _owner(lock)
            os.close(lock)
            return cls._without(path, f"is used by another llama-proxy (pid {owner or 'unknown'})")
        state = cls(path, lock)
        with suppress(OSError):
            os.truncate(lock, 0)
            os.write(lock, f"{os.getpid()}\n".encode())
        # a lock may be left in a folder that is read-only by now, or on a disk that is full
        if not state.write(PROBE, {}, durable=False):
            state.remove(PROBE)
        return state

    @classmethod
    def _without(cls, path: Path, why: str) -> "StateDir":
        problem = (
            f"the state folder {path} {why}: gates, leases and kept engines will not survive this proxy; "
            "set server.state_dir to a folder of its own that can be written"
        )
        _log.warning("no state folder", path=str(path), problem=problem)
        return cls(None, None, problem)

    @property
    def problem(self) -> str:
        """Why something will not survive this proxy, and what to do; empty while everything does."""
        words = next(iter(self._unwritten.values()), "")
        if self._problem or not words:
            return self._problem
        return (
            f"{words}: what was changed since will not survive this proxy; make room or permit writing there"
        )

    def behind(self, name: str) -> bool:
        """Whether a file does not say what it should, because the last write failed."""
        return name in self._unwritten

    @property
    def kept(self) -> bool:
        """Whether anything written survives."""
        return self.path is not None

    def folder(self, name: str) -> Path | None:
        """Return a folder within, made where missing; None when state is not kept or it cannot be made."""
        if self.path is None:
            return None
        folder = self.path / name
        try:
            folder.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            self._trouble(folder, f"cannot be made: {error.strerror}")
            return None
        return folder

    def read(self, name: str, decode: Callable[[Any], _T]) -> _T | None:
        """Return a file's decoded data; None when there is none or it is of no use (said, and set aside).

        `decode` raises `ValueError`, `KeyError` or `TypeError` for data it cannot take.
        """
        if self.path is None:
            return None
        path = self.path / name
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._trouble(path, f"cannot be read: {error.strerror}")
            return None
        try:
            document = json.loads(raw)
            version = document["version"]
            if version != VERSION:
                self._aside(path, f"v{version}", f"has version {version}, this proxy knows {VERSION}")
                return None
            return decode(document["data"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._aside(path, "corrupt", f"is not what was written ({type(error).__name__}: {error})")
            return None

    def write(self, name: str, data: Any, *, durable: bool = True) -> str:
        """Replace a file at once (mode 0600); return an empty text, or why that failed.

        `durable` also waits until the disk has it, for what must survive a power cut.
        """
        if self.path is None:
            return self._problem
        path = self.path / name
        body = json.dumps({"version": VERSION, "data": data}, indent=1, ensure_ascii=False).encode()
        try:
            with self._writing:
                _replace(path, body, durable)
        except OSError as error:
            self._unwritten[name] = words = self._trouble(path, f"cannot be written: {error.strerror}")
            return words
        for written in (name, PROBE):
            self._troubled.discard(written)
            self._unwritten.pop(written, None)
        return ""

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is a success."""
        if self.path is None:
            return
        self._unwritten.pop(name, None)
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            self._trouble(self.path / name, f"cannot be removed: {error.strerror}")

    def names(self, folder: str) -> tuple[str, ...]:
        """Return the JSON files of a folder within, as names for `read`."""
        if self.path is None:
            return ()
        try:
            found = sorted(p.name for p in (self.path / folder).iterdir() if p.suffix == ".json")
        except OSError:
            return ()
        return tuple(f"{folder}/{name}" for name in found)

    def close(self) -> None:
        """Give the folder up. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _aside(self, path: Path, suffix: str, why: str) -> None:
        aside = path.with_name(f"{path.name}.{suffix}")
        with suppress(OSError):
            path.replace(aside)
        self._trouble(path, f"{why}; it was set aside as {aside.name} and starts empty")

    def _trouble(self, path: Path, what: str) -> str:
        """Say it once per file until it works again."""
        words = f"{path} {what}"
        assert self.path is not None  # noqa: S101 - only called with a folder
        name = str(path.relative_to(self.path))
        if name not in self._troubled:
            self._troubled.add(name)
            _log.warning("state is not kept", path=str(path), problem=what)
        return words


def _replace(path: Path, body: bytes, durable: bool) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(temporary).replace(path)
        if durable:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
