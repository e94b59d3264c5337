"""The one client that talks to llama-servers: aiohttp behind the `Upstream` and `Exchange` seam.

One `EngineClient` per backend generation. Bytes pass as they are: nothing is decompressed, redirected,
re-quoted or cached, no cookie is kept, and there is no timeout but for the TCP connect (budgets are the
caller's). The client's own credentials stop here; the engine gets the key of its generation. (aiohttp
itself repeats a GET whose reused connection died before a byte; nothing else is ever sent twice.)

The pool keeps idle connections for less than the 5 s after which llama-server closes them, and has no limit:
a limit would be a hidden queue.
"""

import asyncio
import io
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
from multidict import CIMultiDict
from yarl import URL

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
    """A probe got no usable answer; `timed_out` tells silence from refusal."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class EngineClient:
    """Connections to one engine. `key` empty: no credentials are sent. Create within the event loop."""

    def __init__(self, base: str, key: str = "") -> None:
        """`base` is scheme and authority, with an optional path prefix, for example `http://127.0.0.1:4711`."""
        self.base = base.rstrip("/")
        self._key = key
        self._open: set[_Exchange] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiting = 0
        self._closed = ""
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_reused)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            timeout=aiohttp.ClientTimeout(
                total=None, connect=None, sock_read=None, sock_connect=CONNECT_TIMEOUT_S
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            requote_redirect_url=False,
            skip_auto_headers=_NOT_ADDED,
            trace_configs=[trace],
        )

    async def open(self, request: UpstreamRequest) -> Exchange:
        """Send a request and wait for the head of its response. Raises `UpstreamDied`."""
        context = SimpleNamespace(reused=False)
        self._count(1)
        try:
            response = await self._request(request, context)
        except _FAILURES as error:
            raise self._died(error, before_head=True, reused=context.reused) from error
        finally:
            self._count(-1)
        exchange = _Exchange(self, response, reused=context.reused)
        if self._closed:
            exchange.close()
            raise UpstreamDied(self._closed, before_head=True)
        self._open.add(exchange)
        self._idle.clear()
        return exchange

    async def get(self, target: str, timeout_s: float) -> Answer:
        """GET a small answer within `timeout_s`, all included. Raises `ProbeError`."""
        request = UpstreamRequest("GET", target, ())
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._request(request, SimpleNamespace(reused=False))
                async with response:
                    body = await _read(response, _PROBE_LIMIT)
                    return Answer(response.status, body)
        except TimeoutError:
            raise ProbeError(f"{target}: no answer within {timeout_s:g} s", timed_out=True) from None
        except (*_FAILURES, ValueError) as error:
            raise ProbeError(f"{target}: {_words(error)}") from None

    @property
    def exchanges(self) -> int:
        """Requests on the way or being answered, probes left out."""
        return len(self._open) + self._waiting

    async def idle(self) -> None:
        """Wait until no exchange is open."""
        await self._idle.wait()

    async def close(self, why: str = "the engine was stopped") -> None:
        """Tear down every connection at once; open exchanges end with `UpstreamDied`. Idempotent."""
        self._closed = self._closed or why
        for exchange in list(self._open):
            exchange.close()
        await self._session.close()

    async def _request(self, request: UpstreamRequest, context: SimpleNamespace) -> aiohttp.ClientResponse:
        if self._closed:
            raise ConnectionAbortedError(self._closed)
        body: Any = request.body or None
        if len(request.body) > _LARGE:
            body = io.BytesIO(request.body)
        return await self._session.request(
            request.method,
            URL(self.base + request.target, encoded=True),
            headers=self._headers(request.headers),
            data=body,
            allow_redirects=False,
            trace_request_ctx=context,
        )

    def _headers(self, given: Iterable[tuple[str, str]]) -> CIMultiDict[str]:
        headers = CIMultiDict((name, value) for name, value in given if name.lower() not in _DROPPED)
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _died(self, error: BaseException, *, before_head: bool, reused: bool) -> UpstreamDied:
        message = self._closed or _words(error)
        return UpstreamDied(message, before_head=before_head, reused=reused and not self._closed)

    def _count(self, change: int) -> None:
        self._waiting += change
        self._settle()

    def _forget(self, exchange: "_Exchange") -> None:
        self._open.discard(exchange)
        self._settle()

    def _settle(self) -> None:
        if self.exchanges:
            self._idle.clear()
        else:
            self._idle.set()


class _Exchange:
    """A response whose head has arrived."""

    def __init__(self, client: EngineClient, response: aiohttp.ClientResponse, *, reused: bool) -> None:
        self._client = client
        self._response = response
        self._reused = reused
        self._complete = False
        headers = tuple(
            (name.decode("latin-1"), value.decode("utf-8", "surrogateescape"))
            for name, value in response.raw_headers
        )
        self._head = Head(
            status=response.status,
            headers=headers,
            reused_connection=reused,
            lowered={name.lower(): value for name, value in headers},
        )

    @property
    def head(self) -> Head:
        return self._head

    async def attach(self, sink: Sink) -> None:
        """Pump the body into `sink`; its errors pass through, ours are `UpstreamDied`."""
        while data := await self._some():
            await sink.write(data)
        self._end()

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
        self._end()
        return b"".join(parts)

    def close(self) -> None:
        if not self._complete:
            connection = self._response.connection
            if connection is not None and connection.transport is not None:
                # abort, not close: close would first flush what an engine at work does not read
                connection.transport.abort()
        self._response.close()
        self._client._forget(self)  # noqa: SLF001 - one unit with the client

    async def _some(self) -> bytes:
        try:
            return await self._response.content.readany()
        except _FAILURES as error:
            self.close()
            raise self._client._died(error, before_head=False, reused=self._reused) from error  # noqa: SLF001

    def _end(self) -> None:
        self._complete = True
        self._response.release()
        self._client._forget(self)  # noqa: SLF001


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


async def _reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    _ = session, params
    context.trace_request_ctx.reused = True


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
