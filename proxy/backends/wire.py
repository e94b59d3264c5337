"""One connection to a llama-server: HTTP/1.1 over an asyncio transport, parsed by httptools.

A `Wire` carries one exchange after the other and knows nothing of pools, credentials or retries. Its bytes pass
as they are. It reads no further than `HELD` bytes ahead of its reader and writes no further than the
transport's own limit ahead of the peer, so that neither side's slowness costs memory.
"""

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools

HELD: Final = 64 * 1024
"""Bytes of a body that may wait for their reader before the peer is held back."""
HEAD_LIMIT: Final = 64 * 1024
"""Bytes of a response before its status line and headers are complete."""
PIECE: Final = 256 * 1024
"""Bytes of a request body written between two looks at the peer."""
_NO_BODY: Final = frozenset((204, 304))

Fields = list[tuple[bytes, bytes]]


class Wire(asyncio.Protocol):
    """One connection. Used by one task at a time; failures are `ConnectionError`."""

    __slots__ = (
        *("_body", "_busy", "_failure", "_fields", "_head_only", "_heard", "_held", "_interim", "_keep"),
        *("_loop", "_lost", "_on_lost", "_parser", "_reading", "_status", "_transport", "_until_eof"),
        *("_waiter", "_whole", "_writing", "served"),
    )

    def __init__(self, on_lost: Callable[["Wire"], None]) -> None:
        """`on_lost` is called once, when the connection is gone."""
        self.served = 0
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._failure = ""
        self._lost = False
        self._busy = False
        self._reading = self._writing = True
        self._head_only = False
        self._fields: Fields = []
        self._body: list[bytes] = []
        self._status = self._heard = self._held = 0
        self._interim = self._whole = self._keep = self._until_eof = False

    # --- for its user -------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether a request may be sent: connected, and nothing known against it."""
        return self._transport is not None and not self._lost and not self._transport.is_closing()

    @property
    def heard(self) -> bool:
        """Whether any byte of the present response has arrived."""
        return self._heard > 0

    @property
    def whole(self) -> bool:
        """Whether the present response has arrived to its end."""
        return self._whole

    async def ask(self, head: bytes, body: bytes, *, head_only: bool) -> tuple[int, Fields]:
        """Send a request; return status and header fields of its response.

        `head_only`: the response to this method has no body, whatever its headers say.
        """
        self._begin(head_only=head_only)
        self._busy = True
        sent_whole = await self._send(head, body)
        while not self._status:
            if self._failure:
                raise ConnectionAbortedError(self._failure)
            await self._wait()
        # a peer that answers before it has read all is left with a request of unknown length
        self._keep = self._keep and sent_whole
        return self._status, self._fields

    async def some(self) -> bytes:
        """Return what has arrived of the body, waiting for it; empty at its end."""
        while not self._body:
            if self._whole:
                return b""
            if self._failure:
                raise ConnectionAbortedError(self._failure)
            await self._wait()
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._let_go()
        return data

    def rest(self) -> bool:
        """End the exchange; return whether the connection may carry another."""
        self._let_go()
        self._busy = False
        self.served += 1
        return self._whole and self._keep and self.usable

    def abort(self, why: str) -> None:
        """Tear the connection down at once, what is not sent yet included. Idempotent."""
        self._failure = self._failure or why
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    # --- the transport's calls ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self._busy or self._whole:
            # nobody asked: what comes next on this connection could not be trusted
            self.abort("it sent more than its answer")
            return
        if not self._status:
            self._heard += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.abort("it wants to speak another protocol")
        except httptools.HttpParserError as error:
            self.abort(f"it did not answer in HTTP: {error}")
        if not self._status and self._heard > HEAD_LIMIT:
            self.abort(f"the head of its answer is larger than {HEAD_LIMIT} bytes")
        elif self._held > HELD and self._reading and self.usable and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._status and self._until_eof and exc is None and not self._failure:
            self._whole = True
        if not self._whole and not self._failure:
            self._failure = str(exc) if exc is not None and str(exc) else "it closed the connection"
        self._wake()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._writing = False

    def resume_writing(self) -> None:
        self._writing = True
        self._wake()

    # --- the parser's calls -------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header field."""
        if not self._status:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Take the status; interim answers (`100 Continue`, `103 Early Hints`) are passed over."""
        if self._status:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim = True
            self._fields = []
            return
        names = {name.lower() for name, _ in self._fields}
        chunked = b"transfer-encoding" in names
        sized = b"content-length" in names or chunked
        # llama-server closes the connection behind every chunked answer, whatever its Keep-Alive says
        self._keep = self._parser.should_keep_alive() and not self._head_only and not chunked
        self._until_eof = not sized and status not in _NO_BODY
        self._whole = self._head_only
        self._status = status

    def on_body(self, data: bytes) -> None:
        """Take bytes of the body."""
        if not self._whole:
            self._body.append(data)
            self._held += len(data)

    def on_message_complete(self) -> None:
        """Take the end of the response."""
        if self._interim:
            self._interim = False
        else:
            self._whole = True

    def on_message_begin(self) -> None:
        """A second response to one request spoils the connection."""
        if self._whole:
            self._keep = False

    # ------------------------------------------------------------------------------------------------

    def _begin(self, *, head_only: bool) -> None:
        self._head_only = head_only
        self._fields = []
        self._body = []
        self._status = self._heard = self._held = 0
        self._interim = self._whole = self._keep = self._until_eof = False

    async def _send(self, head: bytes, body: bytes) -> bool:
        """Write a request; return False when the answer (or the end) came before all of it was taken."""
        if self._transport is None or self._failure:
            raise ConnectionAbortedError(self._failure or "it is not connected")
        if len(body) <= PIECE:
            self._transport.write(head + body)
            return True
        self._transport.write(head)
        view = memoryview(body)
        for at in range(0, len(body), PIECE):
            self._transport.write(view[at : at + PIECE])
            while not self._writing:
                if self._status or self._failure:
                    return False
                await self._wait()
        return True

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _let_go(self) -> None:
        self._body = []
        self._held = 0
        if not self._reading:
            self._reading = True
            if self.usable and self._transport is not None:
                self._transport.resume_reading()
