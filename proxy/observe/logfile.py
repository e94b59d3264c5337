"""Follows an engine's log file: new lines with the time they were read, through rotation and truncation.

Reading is bounded per turn and per line, so that a flood neither fills the memory nor holds the samples up. What does not
fit is left out and said.
"""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from proxy.clock import Clock
from proxy.observe.records import LogLine, LogNote, Record

_TURN: Final = 256 * 1024
_CHARACTERS: Final = 4096
"""Of a line; the rest is cut."""


class LogFollower:
    """One file, from its end on. `emit` gets `LogLine` and `LogNote` records."""

    def __init__(self, log: int, path: Path, clock: Clock, emit: Callable[[Record], None]) -> None:
        self._log = log
        self._path = path
        self._clock = clock
        self._emit = emit
        self._fd = -1
        self._inode = 0
        self._position = 0
        self._rest = b""
        self._trouble = ""

    async def run(self, interval_s: float) -> None:
        """Follow until cancelled, then take in what came last."""
        try:
            self.read(first=True)
            while True:
                await asyncio.sleep(interval_s)
                self.read()
        except asyncio.CancelledError:
            self.read()
            raise
        finally:
            self.close()

    def read(self, *, first: bool = False) -> None:
        """Take in what is new; `first`: skip what is there already."""
        try:
            self._open(first=first)
            size = os.fstat(self._fd).st_size
            if size < self._position:
                self._note("the file was truncated")
                self._position, self._rest = 0, b""
            if size - self._position > 2 * _TURN:
                skipped = size - self._position - _TURN
                self._note(f"{skipped} bytes left out: the log grows faster than it is read")
                self._position, self._rest = self._position + skipped, b""
            data = os.pread(self._fd, 2 * _TURN, self._position)
        except OSError as error:
            self.close()
            if self._trouble != (words := error.strerror or str(error)):
                self._trouble = words
                self._note(words)
            return
        self._trouble = ""
        self._position += len(data)
        self._lines(data)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, *, first: bool) -> None:
        found = self._path.stat()
        if not stat.S_ISREG(found.st_mode):
            # reading a pipe could wait for ever
            raise OSError(None, "is no regular file")
        if self._fd >= 0 and found.st_ino == self._inode:
            return
        if self._fd >= 0:
            self._lines(os.pread(self._fd, 2 * _TURN, self._position))
            self._note("the file was replaced")
            self.close()
        self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        now = os.fstat(self._fd)
        self._inode, self._rest = now.st_ino, b""
        self._position = now.st_size if first else 0

    def _lines(self, data: bytes) -> None:
        now = self._clock()
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._emit(LogLine(self._log, now, line.decode("utf-8", "replace").rstrip("\r")[:_CHARACTERS]))
        if len(self._rest) > _TURN:
            self._emit(LogLine(self._log, now, self._rest.decode("utf-8", "replace")[:_CHARACTERS]))
            self._rest = b""

    def _note(self, words: str) -> None:
        self._emit(LogNote(self._log, self._clock(), words))
