"""Reading request bodies: bounded in size and time, before anything is queued."""

import asyncio
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from proxy.errors import ErrorCode, ProxyError
from proxy.http import facts
from proxy.http.endpoints import Endpoint, Media
from proxy.http.facts import Facts
from proxy.http.uploads import Upload
from proxy.settings import Server

PARSE_IN_THREAD_FROM: Final = 256 * 1024
"""Bytes from which JSON is parsed off the event loop (about 0.2 ms of work)."""
MAX_CONTAINERS: Final = 500_000
"""Arrays and objects in one body (brackets within strings count, too). Millions of them take the parser, which
holds the interpreter's lock, seconds in which no stream moves; no prompt comes near."""


def check_length(request: web.BaseRequest, limit: int, setting: str = " (server.max_body_bytes)") -> None:
    """Raise 413 when the announced length is over the cap: nothing needs to be read for that."""
    length = request.content_length
    if length is not None and length > limit:
        raise _too_large(f"{length} bytes", limit, setting)


async def read(request: web.Request, server: Server, upload: Upload) -> bytes:
    """Return the whole body, accounted in `upload`.

    Raises `ProxyError`: 413 over `max_body_bytes` (chunked bodies too), 408 when it does not arrive
    within `body_timeout_s`, 415 for a compressed body, 429 when all bodies at hand are too much.
    """
    check_length(request, server.max_body_bytes)
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise ProxyError(
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding {encoding!r} is not accepted: send the body uncompressed",
        )
    if not request.body_exists:
        return b""
    try:
        async with asyncio.timeout(server.body_timeout_s):
            return await _collect(request, server.max_body_bytes, upload)
    except TimeoutError:
        raise ProxyError(
            ErrorCode.REQUEST_TIMEOUT,
            f"the body did not arrive within {server.body_timeout_s:g} s (server.body_timeout_s)",
            headers={"Connection": "close"},
        ) from None
    except RequestPayloadError as error:
        raise ProxyError(
            ErrorCode.INVALID_REQUEST,
            f"the body is not well-formed HTTP: {error}",
            headers={"Connection": "close"},
        ) from None


async def read_facts(request: web.Request, endpoint: Endpoint, server: Server, upload: Upload) -> Facts:
    """Read a body and what it says; raises `ProxyError` for all that is wrong with it."""
    content_type = request.headers.get("Content-Type")
    media = facts.media_of(content_type, endpoint)
    data = await read(request, server, upload)
    if media is Media.FORM:
        return facts.form_facts(endpoint, data, content_type or "")
    if len(data) < PARSE_IN_THREAD_FROM:
        return facts.json_facts(endpoint, data)
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise ProxyError(
            ErrorCode.INVALID_REQUEST,
            f"the body has more than {MAX_CONTAINERS} arrays and objects: send fewer per request",
        )
    return await asyncio.to_thread(facts.json_facts, endpoint, data)


async def limit_facts(read: Facts, endpoint: Endpoint, tokens: int, content_type: str | None) -> Facts:
    """Write an operator's limit into a request (`facts.limited`), off the event loop where that is long."""
    if read.body.size < PARSE_IN_THREAD_FROM:
        return facts.limited(read, endpoint, tokens, content_type)
    return await asyncio.to_thread(facts.limited, read, endpoint, tokens, content_type)


async def _collect(request: web.Request, limit: int, upload: Upload) -> bytes:
    first = await request.content.readany()
    upload.add(len(first))
    if request.content.at_eof():
        if len(first) > limit:
            raise _too_large("more", limit, " (server.max_body_bytes)")
        return first
    parts = bytearray(first)
    while len(parts) <= limit:
        data = await request.content.readany()
        if not data and request.content.at_eof():
            return bytes(parts)
        upload.add(len(data))
        parts += data
    raise _too_large("more", limit, " (server.max_body_bytes)")


def _too_large(what: str, limit: int, setting: str) -> ProxyError:
    return ProxyError(
        ErrorCode.REQUEST_TOO_LARGE,
        f"the body is too large: {what}, at most {limit} bytes are accepted{setting}",
        headers={"Connection": "close"},
    )
