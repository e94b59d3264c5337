"""The response to one client: begun at most once, ended properly or visibly torn, never half-formed."""

import asyncio
import fcntl
import struct
import termios
from typing import Final

from aiohttp import web

from proxy.errors import ProxyError, error_event
from proxy.headers import to_client
from proxy.http.call import Call
from proxy.sse import comment
from proxy.upstream import Head

LAST_WORD_S: Final = 1.0
"""How long a client that does not read may hold up the end of a failed stream."""


class Reply:
    """Writes to one client. `ConnectionError` from any write means that the client is gone."""

    __slots__ = ("_call", "_ending", "_request", "last_write", "response", "sse")

    def __init__(self, request: web.Request, call: Call) -> None:
        self._request = request
        self._call = call
        self.response: web.StreamResponse | None = None
        self.sse = False
        self.last_write = 0.0
        self._ending = False

    @property
    def started(self) -> bool:
        """Whether the status line is out; from then on errors are in-band."""
        return self.response is not None

    async def begin_sse(self, head: Head | None = None) -> None:
        """Start an event stream, before the engine answered (`head` None) or as it did."""
        if self.response is not None:
            return
        response = web.StreamResponse(status=head.status if head else 200)
        if head is not None:
            _copy(head, response)
        response.headers["Content-Type"] = (
            head.get("content-type", "text/event-stream") if head else "text/event-stream"
        )
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"
        self.sse = True
        await self._begin(response)

    async def begin_plain(self, head: Head) -> None:
        """Start an answer that passes as the engine gave it, length included."""
        response = web.StreamResponse(status=head.status)
        _copy(head, response)
        length = head.get("content-length")
        if length.isdecimal():
            response.content_length = int(length)
        await self._begin(response)

    async def write(self, data: bytes) -> None:
        """Send bytes; waiting here is the backpressure."""
        if self.response is None:
            raise RuntimeError("write before begin")
        await self.response.write(data)

    async def finish(self) -> None:
        """End the body properly."""
        if self.response is not None:
            self._ending = True
            await self.response.write_eof()

    async def keepalive(self, text: str) -> None:
        """Send a comment, starting the stream when it has not begun; nothing once its end is on the way."""
        if self._ending:
            return
        await self.begin_sse()
        await self.write(comment(text))

    async def fail(self, error: ProxyError, *, on_boundary: bool = True) -> None:
        """End a started response with an error: one event on an event boundary, else a torn connection.

        Never a `[DONE]`, never a body that looks whole.
        """
        await self.last_event(error_event(error, self._call.dialect, self._call.id.shown), on_boundary)

    async def last_event(self, event: bytes, on_boundary: bool = True) -> None:
        """Send one last event and end the stream, or tear the connection where that cannot be done."""
        if not self.sse or not on_boundary or self._ending:
            # behind an end that still waits for the client, it would be read as the next answer
            self.abort()
            return
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await self.write(event)
                await self.finish()
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Tear the connection down: a cut body must not look complete."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def progress(self) -> tuple[int, int]:
        """Bytes written so far, and how many of them the client's machine has not taken yet."""
        transport = self._request.transport
        sock = None if transport is None else transport.get_extra_info("socket")
        if sock is None:
            return 0, 0
        try:
            # our own buffer is not all: the kernel holds megabytes before it says that it is full
            kernel = int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0])
        except OSError:
            kernel = 0
        return self._request.writer.output_size, self.pending_bytes() + kernel

    def pending_bytes(self) -> int:
        """Bytes written but not yet taken by the client's socket."""
        transport = self._request.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    async def _begin(self, response: web.StreamResponse) -> None:
        self._call.status = response.status
        await response.prepare(self._request)
        # only now: a failure to prepare still leaves the status line to an error
        self.response = response
        if self.sse:
            # the status line must not wait for the first event
            await response.write(b"")


def _copy(head: Head, response: web.StreamResponse) -> None:
    for name, value in to_client(head.headers):
        response.headers.add(name, value)
