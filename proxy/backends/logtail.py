"""The end of an engine's output: bounded, and what of it explains a failure. Pure."""

import re
from collections import deque
from typing import Final, Protocol

DEFAULT_BYTES: Final = 256 * 1024
_CHUNK: Final = 64 * 1024
_PREFIX: Final = re.compile(r"^\d+\.\d{2}\.\d{3}\.\d{3} ")
_LEVEL: Final = re.compile(r"^(?:\d+\.\d{2}\.\d{3}\.\d{3} )?([A-Z]) ")
_TROUBLE: Final = re.compile(
    r"error|fail|fatal|invalid|unable|cannot|can't|couldn't|could not|not found|no such|denied|out of memory|"
    r"terminate called|assert|abort|exception|unknown argument|usage:",
    re.IGNORECASE,
)
_NOISE: Final = re.compile(r"exiting due to|cleaning up before exit")


class Lines(Protocol):
    """Takes whole lines as they come."""

    def push(self, lines: list[str]) -> None: ...


class LogTail:
    """The last bytes of an output stream. Adding is O(1) per read, whatever the flood."""

    def __init__(self, limit: int = DEFAULT_BYTES, secret: str = "", feed: Lines | None = None) -> None:
        """Keep at least `limit` bytes (up to one read more); `secret` is never shown; whole lines go to `feed`."""
        self._feed = feed
        self._rest = b""
        self._limit = limit
        self._secret = secret
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take the bytes of one read."""
        if not data:
            return
        self.total += len(data)
        if self._feed is not None:
            self._tell(self._feed, data)
        for start in range(max(0, len(data) - self._limit), len(data), _CHUNK):
            chunk = bytes(data[start : start + _CHUNK])
            self._chunks.append(chunk)
            self._held += len(chunk)
        while self._held - len(self._chunks[0]) >= self._limit:
            self._held -= len(self._chunks.popleft())

    @property
    def unfinished(self) -> bool:
        """Whether the last of `lines` has no end yet, so that the feed will say it again."""
        return bool(self._rest)

    def _tell(self, feed: Lines, data: bytes) -> None:
        whole, _, rest = (self._rest + data).rpartition(b"\n")
        # a flood without line ends is cut into lines of its own
        self._rest = rest if len(rest) <= _CHUNK else b""
        if len(rest) > _CHUNK:
            whole = whole + b"\n" + rest if whole else rest
        if whole:
            feed.push([line.removesuffix("\r") for line in self._text(whole).split("\n")])

    def _text(self, raw: bytes) -> str:
        text = raw.decode("utf-8", "replace")
        if self._secret:
            text = text.replace(self._secret, "***")
        return text.replace("\r\n", "\n")

    def lines(self, count: int = 100) -> list[str]:
        """Return the last lines, oldest first; a line cut by the limit is left out."""
        found = self._text(b"".join(self._chunks)).split("\n")
        if self.total > self._held:
            found = found[1:]
        if found and not found[-1]:
            found.pop()
        return found[-count:] if count > 0 else []

    def words(self, count: int = 6) -> str:
        """Return the engine's own words for what went wrong, without time stamps and repeats.

        Lines of level E (llama.cpp's own log form) or that speak of trouble; the first of them name
        the cause, so they win over later ones. Without any: the last lines.
        """
        lines = self.lines(400)
        found = list(dict.fromkeys(_PREFIX.sub("", line).strip() for line in lines if _trouble(line)))
        if not found:
            found = [line.strip() for line in lines if line.strip()][-count:]
        return "; ".join(line[:300] for line in found[:count])


def _trouble(line: str) -> bool:
    if _NOISE.search(line):
        return False
    level = _LEVEL.match(line)
    return level.group(1) == "E" if level else bool(_TROUBLE.search(line))
