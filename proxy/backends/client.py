"""The one client that talks to llama-servers, behind the `Upstream` and `Exchange` seam.

One `EngineClient` per backend generation. Bytes pass as they are: nothing is decompressed, redirected,
re-quoted or cached, no cookie is kept, and there is no timeout but for the connect (budgets are the
caller's). The client's own credentials stop here; the engine gets the key of its generation. What the proxy asks for
itself and whose reused connection died before a byte came is asked once more; nothing else is ever sent twice.
"""

import asyncio
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from proxy.backends.pool import Lane, Pool
from proxy.backends.wire import Fields, Wire
from proxy.clock import monotonic
from proxy.upstream import Exchange, Head, Sink, UpstreamDied, UpstreamRequest

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

    `timed_out` tells silence from refusal; `refused` that nobody listens at the engine's port; `answered` that
    somebody lives there, but not what was asked for.
    """

    def __init__(
        self, message: str, *, timed_out: bool = False, refused: bool = False, answered: bool = False
    ) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.refused = refused
        self.answered = answered


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that was sent, and the head of its response."""

    wire: Wire
    status: int
    fields: Fields


class EngineClient:
    """Connections to one engine. `key` empty: no credentials are sent. Create within the event loop."""

    def __init__(self, base: str, key: str = "") -> None:
        """`base` is scheme and authority, with an optional path prefix, for example `http://127.0.0.1:4711`."""
        self.base = base.rstrip("/")
        self._credentials = _credentials(self.base, key)
        self._pool = Pool(self.base)
        self._lanes: set[Lane] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.quiet_since = monotonic()

    async def open(self, request: UpstreamRequest) -> Exchange:
        """Send a request and wait for the head of its response.

        Raises `UpstreamDied`, and `ValueError` for a target that is not in origin form (it could name another
        host) or a header with a control character that would split it.
        """
        lane = Lane()
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
        return await self.ask(UpstreamRequest("GET", target, ()), timeout_s)

    async def ask(self, request: UpstreamRequest, timeout_s: float) -> Answer:
        """Send a request of the proxy's own and return its small answer; it is no exchange. Raises `ProbeError`.

        Only for what may be done twice: on a reused connection that dies it is sent once more.
        """
        target = request.target
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
        """Requests on the way or being answered, the proxy's own left out."""
        return len(self._lanes)

    async def idle(self) -> None:
        """Wait until no exchange is open."""
        await self._idle.wait()

    async def close(self, why: str = "the engine was stopped") -> None:
        """Tear down every connection at once; open exchanges end with `UpstreamDied`. Idempotent."""
        self._pool.close(why)

    async def _probed(self, request: UpstreamRequest) -> Answer:
        lane = Lane()
        try:
            asked = await self._ask(request, lane)
        except OSError:
            if not lane.stale:
                raise
            asked = await self._ask(request, Lane())
        try:
            return Answer(asked.status, await _read(asked.wire, _PROBE_LIMIT))
        finally:
            self._pool.give(asked.wire)

    async def _ask(self, request: UpstreamRequest, lane: Lane) -> _Asked:
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

    def _died(self, error: BaseException, lane: Lane, *, before_head: bool) -> UpstreamDied:
        closed = self._pool.closed
        return UpstreamDied(
            closed or _words(error), before_head=before_head, reused=lane.stale and not closed
        )

    def _leave(self, lane: Lane, *, torn: bool) -> None:
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

    def __init__(self, client: EngineClient, lane: Lane, asked: _Asked) -> None:
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


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
