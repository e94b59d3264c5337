"""`GET /api/models/{id}/logs`: an engine's output, as text or server-sent events; readers that lag are dropped."""

import asyncio
from collections.abc import Sequence
from typing import Final

import orjson
from aiohttp import web

from proxy.http.naming import model_of
from proxy.http.orders import count_of, flag_of
from proxy.http.ports import Control, HttpContext, LogLines
from proxy.sse import comment

WRITE_S: Final = 30.0
"""How long one write to a reader may take; who reads nothing for this long is cut."""
IDLE_COMMENT_S: Final = 15.0
DEFAULT_LINES: Final = 100


class EngineLog:
    """The handler. Bound to one application's context."""

    def __init__(self, ctx: HttpContext, control: Control) -> None:
        self._ctx, self._control = ctx, control

    async def log(self, request: web.Request) -> web.StreamResponse:
        """Serve the last `?lines=`; with `?follow=1` also what comes, over the model's generations."""
        model = model_of(request.match_info["id"], self._ctx.catalog)
        lines = count_of(request, "lines", DEFAULT_LINES)
        if not flag_of(request, "follow"):
            text = "".join(f"{line}\n" for line in self._control.log_tail(model, lines))
            return web.Response(text=text, content_type="text/plain", charset="utf-8")
        events = "text/event-stream" in request.headers.get("Accept", "")
        follower = self._control.follow_log(model, lines)
        try:
            response = web.StreamResponse()
            kind = "text/event-stream" if events else "text/plain; charset=utf-8"
            response.headers["Content-Type"] = kind
            response.headers["Cache-Control"] = "no-cache"
            response.headers["X-Accel-Buffering"] = "no"
            await response.prepare(request)
            await self._feed(request, response, follower, events=events)
        finally:
            follower.close()
        return response

    async def _feed(
        self, request: web.Request, response: web.StreamResponse, follower: LogLines, *, events: bool
    ) -> None:
        batches = follower.__aiter__()
        waiting: asyncio.Future[list[str]] | None = None
        try:
            while True:
                waiting = waiting or asyncio.ensure_future(anext(batches))
                done, _ = await asyncio.wait({waiting}, timeout=IDLE_COMMENT_S)
                if not done:
                    if events:
                        await self._write(response, comment("nothing new"))
                    continue
                try:
                    batch = waiting.result()
                except StopAsyncIteration:
                    break
                waiting = None
                await self._write(response, _shown(batch, events=events))
            await self._write(response, _end(follower.ended, events=events))
            await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            # the reader left
            pass
        finally:
            if waiting is not None:
                waiting.cancel()

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(WRITE_S):
            await response.write(data)


def _shown(lines: Sequence[str], *, events: bool) -> bytes:
    if events:
        return b"".join(b"data: %b\n\n" % orjson.dumps({"line": line}) for line in lines)
    return "".join(f"{line}\n" for line in lines).encode()


def _end(why: str, *, events: bool) -> bytes:
    if events:
        return b"event: end\ndata: %b\n\n" % orjson.dumps({"reason": why})
    return f"--- {why}\n".encode()
