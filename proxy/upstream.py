"""The seam between forwarding and the transport that talks to a llama-server.

`open(request)` returns the response head; the body then either goes to a sink (`attach`) or is read
whole (`read`). Exactly one of them is used, then `close()`; closing early tears the upstream socket
down, which is how an engine learns that a client is gone. Implementations must not retry, decompress,
follow redirects, or alter header and body bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One request as it goes to the engine. `target` is the raw origin-form path with its query."""

    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Head:
    """Status line and headers of an upstream response, in order, as received.

    `connect_s` is the time it took to get a connection for the request.
    """

    status: int
    headers: Sequence[tuple[str, str]]
    reused_connection: bool = False
    connect_s: float = 0.0
    lowered: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str, default: str = "") -> str:
        """Return the last value of a header by its lower-case name."""
        return self.lowered.get(name, default)


class UpstreamDied(Exception):  # noqa: N818 - names what happened
    """The upstream connection could not be made or ended before the response did.

    `before_head` tells whether any response byte had arrived; `reused` whether the connection had
    served another request before (only then one silent retry is safe).
    """

    def __init__(self, message: str, *, before_head: bool, reused: bool = False) -> None:
        super().__init__(message)
        self.before_head = before_head
        self.reused = reused


class Sink(Protocol):
    """Receives body bytes in order; awaiting `write` is the backpressure."""

    async def write(self, data: bytes) -> None:
        """Take the bytes of one read."""


class Exchange(Protocol):
    """One request/response pair in flight."""

    @property
    def head(self) -> Head: ...

    async def attach(self, sink: Sink) -> None:
        """Pump the body into `sink` until its end; `UpstreamDied` when it is cut."""

    async def read(self, limit: int) -> bytes:
        """Return the whole body, at most `limit` bytes (`UpstreamDied` beyond or when cut)."""

    def close(self) -> None:
        """Release the connection: reusable after a complete body, torn down otherwise. Idempotent."""


class Upstream(Protocol):
    """A place requests can be sent to: one backend generation."""

    async def open(self, request: UpstreamRequest) -> Exchange:
        """Send the request and wait for the response head (no timeout here: budgets are the caller's)."""
