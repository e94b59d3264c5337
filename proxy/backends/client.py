"""The one client that talks to llama-servers: aiohttp behind the `Upstream` and `Exchange` seam.

One `EngineClient` per backend generation. Bytes pass as they are: nothing is decompressed, redirected,
re-quoted or cached, no cookie is kept, and there is no timeout but for the TCP connect (budgets are the
caller's). The client's own credentials stop here; the engine gets the key of its generation. (aiohttp
itself repeats a GET whose reused connection died before a byte; nothing else is ever sent twice. It also leaves
bytes that are not UTF-8 out of request header values.)

The pool keeps idle connections for less than the 5 s after which llama-server closes them, and has no limit:
a limit would be a hidden queue.
"""

import asyncio
import io
import weakref
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from proxy.clock import monotonic
from proxy.upstream import Exchange, Head, Sink, UpstreamDied, UpstreamRequest

CONNECT_TIMEOUT_S: Final = 5.0
IDLE_CONNECTION_S: Final = 4.0
_LARGE: Final = 1 << 20
"""From here on aiohttp wants a file object, which it writes in pieces between other work."""
_PROBE_LIMIT: Final = 8 << 20
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
_NOT_ADDED: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_FAILURES: Final = (aiohttp.ClientError, ConnectionError, TimeoutError, OSError)


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

    transport: asyncio.BaseTransport | None = None
    response: aiohttp.ClientResponse | None = None
    reused: bool = False
    connect_s: float = 0.0

    def abort(self) -> None:
        # abort, not close: close would first send what is left of a body that nobody needs any more
        if isinstance(self.transport, asyncio.WriteTransport):
            self.transport.abort()
        if self.response is not None:
            self.response.close()


_lane: ContextVar[_Lane | None] = ContextVar("lane", default=None)


class _Connector(aiohttp.TCPConnector):
    """Tells each exchange which connection it got, and whether that had served before."""

    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
        self._served: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Any:
        began = monotonic()
        connection = await super().connect(req, traces, timeout)
        lane, transport = _lane.get(), connection.transport
        if lane is not None:
            lane.connect_s = monotonic() - began
        if transport is not None:
            if lane is not None:
                lane.transport, lane.reused = transport, transport in self._served
            # probes use connections up as well
            self._served.add(transport)
        return connection


class EngineClient:
    """Connections to one engine. `key` empty: no credentials are sent. Create within the event loop."""

    def __init__(self, base: str, key: str = "") -> None:
        """`base` is scheme and authority, with an optional path prefix, for example `http://127.0.0.1:4711`."""
        self.base = base.rstrip("/")
        self._key = key
        self._lanes: set[_Lane] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.quiet_since = monotonic()
        self._closed = ""
        self._session = aiohttp.ClientSession(
            connector=_Connector(),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=None, sock_read=None, sock_connect=CONNECT_TIMEOUT_S
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            requote_redirect_url=False,
            skip_auto_headers=_NOT_ADDED,
        )

    async def open(self, request: UpstreamRequest) -> Exchange:
        """Send a request and wait for the head of its response.

        Raises `UpstreamDied`, and `ValueError` for a target that is not in origin form (it could name another
        host) or a header value with a line break.
        """
        lane = self._occupy()
        try:
            response = await self._request(request, lane)
        except _FAILURES as error:
            self._leave(lane, torn=True)
            raise self._died(error, lane, before_head=True) from error
        except BaseException:
            self._leave(lane, torn=True)
            raise
        lane.response = response
        if self._closed:
            self._leave(lane, torn=True)
            raise UpstreamDied(self._closed, before_head=True)
        return _Exchange(self, response, lane)

    async def get(self, target: str, timeout_s: float) -> Answer:
        """GET a small answer within `timeout_s`, all included. Raises `ProbeError`."""
        request = UpstreamRequest("GET", target, ())
        try:
            async with asyncio.timeout(timeout_s):
                async with await self._request(request, None) as response:
                    return Answer(response.status, await _read(response, _PROBE_LIMIT))
        except TimeoutError:
            raise ProbeError(f"{target}: no answer within {timeout_s:g} s", timed_out=True) from None
        except (*_FAILURES, ValueError) as error:
            raise ProbeError(f"{target}: {_words(error)}", refused=_refused(error)) from None

    @property
    def exchanges(self) -> int:
        """Requests on the way or being answered, probes left out."""
        return len(self._lanes)

    async def idle(self) -> None:
        """Wait until no exchange is open."""
        await self._idle.wait()

    async def close(self, why: str = "the engine was stopped") -> None:
        """Tear down every connection at once; open exchanges end with `UpstreamDied`. Idempotent."""
        self._closed = self._closed or why
        for lane in self._lanes:
            lane.abort()
        await self._session.close()

    async def _request(self, request: UpstreamRequest, lane: _Lane | None) -> aiohttp.ClientResponse:
        if self._closed:
            raise ConnectionAbortedError(self._closed)
        if not request.target.startswith("/"):
            raise ValueError(f"the target must be in origin-form, found {request.target[:80]!r}")
        body: Any = request.body or None
        if len(request.body) > _LARGE:
            body = io.BytesIO(request.body)
        token = _lane.set(lane)
        try:
            return await self._session.request(
                request.method,
                URL(self.base + request.target, encoded=True),
                headers=self._headers(request.headers),
                data=body,
                allow_redirects=False,
            )
        finally:
            _lane.reset(token)

    def _headers(self, given: Iterable[tuple[str, str]]) -> CIMultiDict[str]:
        headers = CIMultiDict((name, value) for name, value in given if name.lower() not in _DROPPED)
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _died(self, error: BaseException, lane: _Lane, *, before_head: bool) -> UpstreamDied:
        reused = lane.reused and not self._closed
        return UpstreamDied(self._closed or _words(error), before_head=before_head, reused=reused)

    def _occupy(self) -> _Lane:
        lane = _Lane()
        self._lanes.add(lane)
        self._idle.clear()
        return lane

    def _leave(self, lane: _Lane, *, torn: bool) -> None:
        if torn:
            lane.abort()
        self._lanes.discard(lane)
        if not self._lanes:
            self.quiet_since = monotonic()
            self._idle.set()


class _Exchange:
    """A response whose head has arrived."""

    def __init__(self, client: EngineClient, response: aiohttp.ClientResponse, lane: _Lane) -> None:
        self._client = client
        self._response = response
        self._lane = lane
        self._ended = False
        headers = tuple(
            (name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
            for name, value in response.raw_headers
        )
        self._head = Head(
            status=response.status,
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
        # an answer that is all here has given its connection back: it may be another's by now
        self._end(torn=not self._response.content.is_eof())

    async def _some(self) -> bytes:
        try:
            return await self._response.content.readany()
        except _FAILURES as error:
            self._end(torn=True)
            raise self._client._died(error, self._lane, before_head=False) from error  # noqa: SLF001

    def _end(self, *, torn: bool) -> None:
        if self._ended:
            return
        self._ended = True
        self._response.close()
        self._client._leave(self._lane, torn=torn)  # noqa: SLF001 - one unit with the client


class DeadUpstream:
    """Stands for a generation that is gone: opening fails like a connection that died unused."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def open(self, request: UpstreamRequest) -> Exchange:
        _ = request
        raise UpstreamDied(self._why, before_head=True)


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    parts: list[bytes] = []
    held = 0
    while data := await response.content.readany():
        held += len(data)
        if held > limit:
            raise ValueError(f"the answer is larger than {limit} bytes")
        parts.append(data)
    return b"".join(parts)


def _refused(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
