"""Following an engine's log: each viewer has a bounded buffer, and one that is too slow is dropped.

Nobody who watches can ever hold the engine up, or make the proxy grow.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Self

VIEWER_BYTES: Final = 256 * 1024
MAX_VIEWERS: Final = 64
MAX_LINE: Final = 16 * 1024
TOO_SLOW: Final = "too slow: lines were lost; ask again"
TOO_MANY: Final = "too many follow this log: ask again when others have left"
STOPPING: Final = "the proxy is shutting down"
REMOVED: Final = "the model was taken out of the configuration"


class LogFeed:
    """Hands whole lines of one model's engines, one generation after the other, to whoever follows."""

    def __init__(self) -> None:
        self._followers: dict[LogFollower, None] = {}

    def follow(self, first: Sequence[str] = (), limit_bytes: int = VIEWER_BYTES) -> "LogFollower":
        """Return a follower that begins with the last of these lines; the oldest one goes when there are too many."""
        while len(self._followers) >= MAX_VIEWERS:
            next(iter(self._followers)).drop(TOO_MANY)
        follower = LogFollower(lambda one: self._followers.pop(one, None), limit_bytes)
        self._followers[follower] = None
        follower.push(_last(first, limit_bytes))
        return follower

    def push(self, lines: Sequence[str]) -> None:
        """Hand lines out."""
        for follower in tuple(self._followers):
            follower.push(lines)

    def close(self, why: str = STOPPING) -> None:
        """End everybody's following: no more lines will come."""
        for follower in tuple(self._followers):
            follower.close(why)


class LogFollower:
    """One viewer: `async for lines in follower` gives batches of lines until it ends. Close it when done."""

    def __init__(self, gone: Callable[["LogFollower"], None], limit_bytes: int) -> None:
        self.ended = ""
        """Why no more lines come; empty while some may."""
        self._gone = gone
        self._limit = limit_bytes
        self._lines: deque[str] = deque()
        self._held = 0
        self._closed = False
        self._news = asyncio.Event()

    def push(self, lines: Sequence[str]) -> None:
        """Take lines; beyond the limit the viewer is dropped."""
        if self._closed:
            return
        for line in lines:
            self._lines.append(line[:MAX_LINE])
            self._held += _size(line)
        if self._held > self._limit:
            self.drop(TOO_SLOW)
        elif lines:
            self._news.set()

    def drop(self, why: str) -> None:
        """End it: what it did not fetch is lost."""
        self._lines.clear()
        self.close(why)

    def close(self, why: str = "") -> None:
        """End it; lines that are held may still be fetched. The first reason stays."""
        self._closed = True
        self.ended = self.ended or why
        self._gone(self)
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[str]:
        """Return the lines that came since the last call, at least one."""
        while not self._lines:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        lines = list(self._lines)
        self._lines.clear()
        self._held = 0
        return lines


def _size(line: str) -> int:
    return min(len(line), MAX_LINE) + 1


def _last(lines: Sequence[str], limit: int) -> Sequence[str]:
    """Return as many of the last lines as a viewer may hold."""
    held, first = 0, len(lines)
    while first and (held := held + _size(lines[first - 1])) <= limit:
        first -= 1
    return lines[first:]
