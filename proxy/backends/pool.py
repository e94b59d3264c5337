"""The connections to one engine: made when none is free, kept for a while, and all torn down at the end.

Idle ones are kept for less than the 5 s after which llama-server closes them. There is no limit: it would be a
hidden queue.
"""

import asyncio
import errno
import os
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from proxy.backends.wire import Wire
from proxy.clock import monotonic

CONNECT_TIMEOUT_S: Final = 5.0
IDLE_CONNECTION_S: Final = 4.0


@dataclass(slots=True, eq=False)
class Lane:
    """The connection of one exchange: what has to be torn down when it is given up."""

    wire: Wire | None = None
    reused: bool = False
    connect_s: float = 0.0

    @property
    def stale(self) -> bool:
        """Whether a kept connection turned out to have been closed: it never gave a byte."""
        return self.reused and self.wire is not None and not self.wire.heard


class Pool:
    """Connections to one address. Create within the event loop."""

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        tls = parts.scheme == "https"
        self.host = parts.netloc.rpartition("@")[2]
        self.prefix = parts.path.rstrip("/")
        self._address = (parts.hostname or "", parts.port or (443 if tls else 80))
        self._tls = ssl.create_default_context() if tls else None
        self._loop = asyncio.get_running_loop()
        self._wires: set[Wire] = set()
        self._kept: deque[tuple[float, Wire]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.closed = ""

    async def take(self, lane: Lane) -> Wire:
        """Put a connection into `lane`: the one used last, else a new one. Raises `OSError`, `TimeoutError`."""
        began = monotonic()
        wire = self._kept_one(began)
        if wire is None:
            wire = await self._connect()
        lane.wire, lane.reused, lane.connect_s = wire, wire.served > 0, monotonic() - began
        if self.closed:
            wire.abort(self.closed)
            raise ConnectionAbortedError(self.closed)
        return wire

    def give(self, wire: Wire) -> None:
        """Take a connection back whose exchange has ended; it is torn down unless it can serve again."""
        if not wire.rest() or self.closed:
            wire.abort("it was given up")
            return
        self._kept.append((monotonic(), wire))
        if self._timer is None:
            self._timer = self._loop.call_later(IDLE_CONNECTION_S, self._expire)

    def close(self, why: str) -> None:
        """Tear all connections down; whoever uses one is told `why`."""
        self.closed = self.closed or why
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._kept.clear()
        for wire in tuple(self._wires):
            wire.abort(self.closed)

    def _kept_one(self, now: float) -> Wire | None:
        while self._kept:
            since, wire = self._kept.pop()
            if wire.usable and now - since < IDLE_CONNECTION_S:
                return wire
            wire.abort("it rested too long")
        return None

    async def _connect(self) -> Wire:
        host, port = self._address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, wire = await self._loop.create_connection(self._new, host, port, ssl=self._tls)
        except TimeoutError:
            raise TimeoutError(f"no connection to {self.host} within {CONNECT_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise _unreached(self.host, error) from None
        return wire

    def _new(self) -> Wire:
        wire = Wire(self._wires.discard)
        self._wires.add(wire)
        return wire

    def _expire(self) -> None:
        self._timer = None
        now = monotonic()
        while self._kept:
            since, wire = self._kept[0]
            left = since + IDLE_CONNECTION_S - now
            if wire.usable and left > 0:
                self._timer = self._loop.call_later(left, self._expire)
                return
            self._kept.popleft()
            wire.abort("it rested too long")


def _unreached(host: str, error: OSError) -> OSError:
    """Return a failure to connect with the address and the system's words for it, its kind kept."""
    known = error.errno is not None and error.errno in errno.errorcode and not isinstance(error, ssl.SSLError)
    why = os.strerror(error.errno or 0) if known else str(error)
    kind = ConnectionRefusedError if isinstance(error, ConnectionRefusedError) else OSError
    return kind(f"no connection to {host}: {why}")
