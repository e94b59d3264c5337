"""The one client that talks to llama-servers, behind the `Upstream` and `Exchange` seam.

One `EngineClient` per backend generation. Bytes pass as they are: nothing is decompressed, redirected,
re-quoted or cached, no cookie is kept, and there is no timeout but for the connect (budgets are the
caller's). The client's own credentials stop here; the engine gets the key of its generation. A probe whose
reused connection died before a byte came is asked once more; nothing else is ever sent twice.

The pool keeps idle connections for less than the 5 s after which llama-server closes them, and has no limit:
a limit would be a hidden queue.
"""

import asyncio
import errno
import os
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from proxy.backends.wire import Fields, Wire
from proxy.clock import monotonic
from proxy.upstream import Exchange, Head, Sink, UpstreamDied, UpstreamRequest

CONNECT_TIMEOUT_S: Final = 5.0
IDLE_CONNECTION_S: Final = 4.0
_PROBE_LIMIT: Final = 8 << 20
_UNSAFE: Final = frozenset(" \t\r\n\0\x0b\x0c")
_SIZED: Final = frozenset(("POST", "PUT", "PATCH"))
"""Methods whose request says its length even when it is 0."""
_DROPPED: Final = frozenset(
    (
        *(
            "authorization",
            "x-api-key",
            "api-key",
            "host",
            "content-length",
            "connection",
            "keep-alive",
            "expect",
        ),
        *(
            "transfer-encoding",
            "te",
            "trailer",
            "upgrade",
            "proxy-authorization",
            "proxy-connection",
            "cookie",
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A small answer read whole by a probe."""

    status: int
    body: bytes


class ProbeError(Exception):
    """A probe got no usable answer.

    `timed_out` tells silence from refusal; `refused` that nobody listens at the engine's port.
    """

    def __init__(self, message: str, *, timed_out: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.refused = refused


@dataclass(slots=True, eq=False)
class _Lane:
    """The connection of one exchange: what has to be torn down when it is given up."""

    wire: Wire | None = None
    reused: bool = False
    connect_s: float = 0.0

    @property
    def stale(self) -> bool:
        """Whether a kept connection turned out to have been closed: it never gave a byte."""
        return self.reused and self.wire is not None and not self.wire.heard


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was sent, and the head of its response."""

    wire: Wire
    status: int
    fields: Fields


class _Pool:
    """Connections to one address: made, kept for a while, and all torn down at the end."""

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

    async def take(self, lane: _Lane) -> Wire:
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


class EngineClient:
    """Connections to one engine. `key` empty: no credentials are sent. Create within the event loop."""

    def __init__(self, base: str, key: str = "") -> None:
        """`base` is scheme and authority, with an optional path prefix, for example `http://127.0.0.1:4711`."""
        self.base = base.rstrip("/")
        self._credentials = _credentials(self.base, key)
        self._pool = _Pool(self.base)
        self._lanes: set[_Lane] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.quiet_since = monotonic()

    async def open(self, request: UpstreamRequest) -> Exchange:
        """Send a request and wait for the head of its response.

        Raises `UpstreamDied`, and `ValueError` for a target that is not in origin form (it could name another
        host) or a header with a control character that would split it.
        """
        lane = _Lane()
        self._lanes.add(lane)
        self._idle.clear()
        try:
            asked = await self._ask(request, lane)
        except OSError as error:
            self._leave(lane, torn=True)
            raise self._died(error, lane, before_head=True) from error
        except BaseException:
            self._leave(lane, torn=True)
            raise
        return _Exchange(self, lane, asked)

    async def get(self, target: str, timeout_s: float) -> Answer:
        """GET a small answer within `timeout_s`, all included. Raises `ProbeError`."""
        request = UpstreamRequest("GET", target, ())
        try:
            async with asyncio.timeout(timeout_s):
                return await self._probed(request)
        except TimeoutError:
            raise ProbeError(f"{target}: no answer within {timeout_s:g} s", timed_out=True) from None
        except (OSError, ValueError) as error:
            refused = isinstance(error, ConnectionRefusedError)
            raise ProbeError(f"{target}: {_words(error)}", refused=refused) from None

    @property
    def exchanges(self) -> int:
        """Requests on the way or being answered, probes left out."""
        return len(self._lanes)

    async def idle(self) -> None:
        """Wait until no exchange is open."""
        await self._idle.wait()

    async def close(self, why: str = "the engine was stopped") -> None:
        """Tear down every connection at once; open exchanges end with `UpstreamDied`. Idempotent."""
        self._pool.close(why)

    async def _probed(self, request: UpstreamRequest) -> Answer:
        lane = _Lane()
        try:
            asked = await self._ask(request, lane)
        except OSError:
            if not lane.stale:
                raise
            asked = await self._ask(request, _Lane())
        try:
            return Answer(asked.status, await _read(asked.wire, _PROBE_LIMIT))
        finally:
            self._pool.give(asked.wire)

    async def _ask(self, request: UpstreamRequest, lane: _Lane) -> _Asked:
        if self._pool.closed:
            raise ConnectionAbortedError(self._pool.closed)
        head = self._head(request)
        wire = await self._pool.take(lane)
        try:
            return _Asked(wire, *await wire.ask(head, request.body, head_only=request.method == "HEAD"))
        except BaseException:
            wire.abort("it was given up")
            raise

    def _head(self, request: UpstreamRequest) -> bytes:
        """Return the request's head as it goes out. Raises `ValueError`."""
        target = request.target
        if not target.startswith("/") or not _UNSAFE.isdisjoint(target):
            raise ValueError(f"the target must be in origin-form, found {target[:80]!r}")
        lines = [f"{request.method} {self._pool.prefix}{target} HTTP/1.1", f"Host: {self._pool.host}"]
        lines += self._fields(request.headers)
        if request.body or request.method in _SIZED:
            lines.append(f"Content-Length: {len(request.body)}")
        head = "\r\n".join(lines)
        ends = len(lines) - 1
        if head.count("\r") != ends or head.count("\n") != ends or "\0" in head:
            raise ValueError("a header holds a line break or a NUL")
        return head.encode("utf-8", "surrogateescape") + b"\r\n\r\n"

    def _fields(self, given: Iterable[tuple[str, str]]) -> list[str]:
        fields = [f"{name}: {value}" for name, value in given if name.lower() not in _DROPPED]
        return fields + self._credentials

    def _died(self, error: BaseException, lane: _Lane, *, before_head: bool) -> UpstreamDied:
        closed = self._pool.closed
        return UpstreamDied(
            closed or _words(error), before_head=before_head, reused=lane.stale and not closed
        )

    def _leave(self, lane: _Lane, *, torn: bool) -> None:
        if lane.wire is not None:
            if torn:
                lane.wire.abort("it was given up")
            else:
                self._pool.give(lane.wire)
        self._lanes.discard(lane)
        if not self._lanes:
            self.quiet_since = monotonic()
            self._idle.set()


class _Exchange:
    """A response whose head has arrived."""

    def __init__(self, client: EngineClient, lane: _Lane, asked: _Asked) -> None:
        self._client = client
        self._lane = lane
        self._wire = asked.wire
        self._ended = False
        headers = tuple(
            (name.decode("latin-1"), value.decode("utf-8", "surrogateescape")) for name, value in asked.fields
        )
        self._head = Head(
            status=asked.status,
            headers=headers,
            reused_connection=lane.reused,
            connect_s=lane.connect_s,
            lowered={name.lower(): value for name, value in headers},
        )

    @property
    def head(self) -> Head:
        return self._head

    async def attach(self, sink: Sink) -> None:
        """Pump the body into `sink`; its errors pass through, ours are `UpstreamDied`."""
        while data := await self._some():
            await sink.write(data)
        self._end(torn=False)

    async def read(self, limit: int) -> bytes:
        """Return the whole body."""
        parts: list[bytes] = []
        held = 0
        while data := await self._some():
            held += len(data)
            if held > limit:
                self.close()
                raise UpstreamDied(f"the response is larger than {limit} bytes", before_head=False)
            parts.append(data)
        self._end(torn=False)
        return b"".join(parts)

    def close(self) -> None:
        # an answer that is all here lets its connection serve again
        self._end(torn=not self._wire.whole)

    async def _some(self) -> bytes:
        if self._ended:
            return b""
        try:
            return await self._wire.some()
        except OSError as error:
            self._end(torn=True)
            raise self._client._died(error, self._lane, before_head=False) from error  # noqa: SLF001

    def _end(self, *, torn: bool) -> None:
        if self._ended:
            return
        self._ended = True
        self._client._leave(self._lane, torn=torn)  # noqa: SLF001 - one unit with the client


class DeadUpstream:
    """Stands for a generation that is gone: opening fails like a connection that died unused."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def open(self, request: UpstreamRequest) -> Exchange:
        _ = request
        raise UpstreamDied(self._why, before_head=True)


async def _read(wire: Wire, limit: int) -> bytes:
    parts: list[bytes] = []
    held = 0
    while data := await wire.some():
        held += len(data)
        if held > limit:
            raise ValueError(f"the answer is larger than {limit} bytes")
        parts.append(data)
    return b"".join(parts)


def _credentials(base: str, key: str) -> list[str]:
    """Return the header line that opens the engine: its key, else the name and password of its URL."""
    parts = urlsplit(base)
    if key:
        return [f"Authorization: Bearer {key}"]
    if parts.username is None:
        return []
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return [f"Authorization: Basic {b64encode(pair.encode()).decode()}"]


def _unreached(host: str, error: OSError) -> OSError:
    """Return a failure to connect with the address and the system's words for it, its kind kept."""
    known = error.errno is not None and error.errno in errno.errorcode and not isinstance(error, ssl.SSLError)
    why = os.strerror(error.errno or 0) if known else str(error)
    kind = ConnectionRefusedError if isinstance(error, ConnectionRefusedError) else OSError
    return kind(f"no connection to {host}: {why}")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
