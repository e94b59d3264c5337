"""Where an engine's output goes: a pipe that is always drained, or a file that outlives the proxy.

Neither ever holds the engine up, and both are bounded.
"""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Final

from proxy.backends.logtail import DEFAULT_BYTES, LogTail

LOG_LIMIT_BYTES: Final = 64 * 1024 * 1024
FOLLOW_S: Final = 0.25
_READ_BYTES: Final = 256 * 1024


class LogFile:
    """An optional copy of the output in a file of bounded size (one older file is kept).

    A full disk or a vanished folder ends the copy, never the engine.
    """

    def __init__(self, path: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
        self._path = path
        self._limit = limit_bytes
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size

    def write(self, data: bytes) -> None:
        """Append; rolls over beyond the limit."""
        try:
            if self._size + len(data) > self._limit:
                self._file.close()
                self._path.replace(self._path.with_suffix(self._path.suffix + ".1"))
                self._file = self._path.open("wb", buffering=0)
                self._size = 0
            self._size += self._file.write(data) or 0
        except (OSError, ValueError):
            self.close()

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        with contextlib.suppress(OSError):
            self._file.close()


class PipeDrain:
    """Takes output as it comes and never pauses: a full pipe would stop the engine.

    It reads by itself: a read transport of uvloop closes its descriptor twice, and the second time it may be one that a
    thread has just opened. `ended` is set when nothing more comes.
    """

    def __init__(self, descriptor: int, tail: LogTail, sink: LogFile | None) -> None:
        """Own the reading end of a pipe from now on."""
        self._tail = tail
        self._sink = sink
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._loop.add_reader(descriptor, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._tail.add(data)
        if self._sink is not None:
            self._sink.write(data)

    def close(self) -> None:
        """Read no more. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            self.ended.set()


def open_for_engine(path: Path) -> int:
    """Return a descriptor to which an engine appends its output: others may truncate the file meanwhile."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class FileFollower:
    """Reads into a tail what an engine appends to its file, and cuts the file when it grows too large."""

    def __init__(self, path: Path, tail: LogTail, *, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
        """Begin `DEFAULT_BYTES` before the present end: what an earlier proxy let it write counts, too."""
        self._path = path
        self._tail = tail
        self._limit = limit_bytes
        self._at = 0
        with contextlib.suppress(OSError):
            self._at = max(0, path.stat().st_size - DEFAULT_BYTES)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin following."""
        self._task = asyncio.create_task(self._run(), name=f"follow:{self._path.name}")

    def read(self) -> None:
        """Take in what is there now. A file that cannot be read gives nothing."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._at:
                self._at = 0
            file.seek(max(self._at, size - DEFAULT_BYTES))
            data = file.read(DEFAULT_BYTES)
            self._at = file.tell()
            if data:
                self._tail.add(data)
            if size > self._limit:
                os.truncate(self._path, 0)
                self._at = 0

    async def stop(self) -> None:
        """Read the last of it, then follow no more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
            self.read()

    async def _run(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(FOLLOW_S)
