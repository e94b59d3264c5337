"""Around every request: its id, the checks before any handler, errors in its dialect, its books."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from aiohttp import web
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.typedefs import Middleware

from proxy import logs
from proxy.admission import outcome_of
from proxy.errors import SOURCE, ErrorCode, ProxyError
from proxy.headers import request_id
from proxy.http.accounts import CLIENT_GONE, Accounts
from proxy.http.auth import Gatekeeper, area_of
from proxy.http.call import CALL, Call
from proxy.http.endpoints import dialect_of
from proxy.http.hardening import check_raw
from proxy.http.ports import HttpContext
from proxy.http.render import error_response, from_http_exception, internal_error
from proxy.types import Outcome

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_METHODS: Final = "GET, HEAD, POST, DELETE, OPTIONS"
_REQUEST_FIELDS: Final = (
    "authorization, content-type, x-api-key, x-request-id, x-priority, x-keepalive, anthropic-version, "
    "anthropic-beta"
)
_EXPOSED: Final = (
    "x-request-id, x-queue-wait-ms, x-backend, x-cohort-id, x-should-retry, retry-after, retry-after-ms"
)
_FIELD: Final = re.compile(r"[a-z0-9_-]{1,64}")
_STATUS_CLIENT_GONE: Final = 499


class Entry:
    """The one middleware. One per application."""

    def __init__(self, ctx: HttpContext, accounts: Accounts) -> None:
        self._clock = ctx.clock
        self._keeper = Gatekeeper(ctx.settings)
        self._accounts = accounts
        self._origins = ctx.settings.server.cors_origins
        self._header_limit = ctx.settings.server.max_header_bytes
        self._log = logs.get("http")

    @property
    def keeper(self) -> Gatekeeper:
        """The checks of callers, for handlers that need more than their path's area asks."""
        return self._keeper

    def middleware(self) -> Middleware:
        """Return the aiohttp middleware."""

        @web.middleware
        async def entry(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._handle(request, handler)

        return entry

    async def decorate(self, request: web.Request, response: web.StreamResponse) -> None:
        """Put our fields on a response that is about to start (signal `on_response_prepare`)."""
        call = request.get(CALL)
        if call is None:
            return
        headers = response.headers
        headers["x-request-id"] = call.id.shown
        if headers.get("Server") == SERVER_SOFTWARE:
            headers["Server"] = SOURCE
        if call.granted:
            headers["x-queue-wait-ms"] = str(round(call.queue_wait_s * 1000))
            headers["x-backend"] = call.backend
            if call.cohort is not None:
                headers["x-cohort-id"] = str(call.cohort)
        headers.update(call.headers)

    async def _handle(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        call = Call(
            id=request_id(request.headers.get("x-request-id")),
            method=request.method,
            path=request.path[:200],
            dialect=dialect_of(request.path, request.raw_path),
            arrived=self._clock(),
        )
        request[CALL] = call
        try:
            response = await self._answer(request, call, handler)
            call.status = call.status or response.status
            call.outcome = call.outcome or Outcome.COMPLETED
        except asyncio.CancelledError:
            call.status = call.status or _STATUS_CLIENT_GONE
            call.outcome, call.code = Outcome.CANCELLED, call.code or CLIENT_GONE
            raise
        finally:
            self._accounts.finish(call, self._clock())
        return response

    async def _answer(self, request: web.Request, call: Call, handler: Handler) -> web.StreamResponse:
        try:
            version = (request.version.major, request.version.minor)
            check_raw(request.method, request.raw_path, version, request.raw_headers, self._header_limit)
            call.headers = self._cors(request)
            if request.method == "OPTIONS":
                return self._preflight(request, "Access-Control-Allow-Origin" in call.headers)
            call.caller = self._keeper.check(request, area_of(request.path, request.raw_path))
            return await handler(request)
        except ProxyError as error:
            refusal = error
        except web.HTTPException as error:
            refusal = from_http_exception(error, call.path)
        except Exception:
            self._log.exception("handler failed", id=call.id.shown, path=call.path)
            if call.status:
                # the response has begun: a second status line would be read as its body
                if request.transport is not None:
                    request.transport.abort()
                return web.Response(status=500)
            refusal = internal_error()
        if call.outcome is None:
            outcome = outcome_of(refusal.code)
            refused = outcome is Outcome.FAILED and refusal.status < 500
            call.outcome, call.code = Outcome.REJECTED if refused else outcome, refusal.code.value
        call.status = refusal.status
        return error_response(refusal, call.dialect, call.id.shown)

    def _cors(self, request: web.Request) -> dict[str, str]:
        origin = request.headers.get("Origin")
        if origin is None or not self._origins:
            return {}
        if "*" in self._origins:
            allowed, vary = "*", {}
        elif origin in self._origins:
            allowed, vary = origin, {"Vary": "Origin"}
        else:
            return {"Vary": "Origin"}
        return {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": _EXPOSED, **vary}

    def _preflight(self, request: web.Request, invited: bool) -> web.Response:
        failed = request.match_info.http_exception
        if isinstance(failed, web.HTTPNotFound) and request.raw_path != "*":
            raise ProxyError(ErrorCode.NOT_FOUND, f"there is no path {request.path!r}")
        allowed = (
            ", ".join(sorted({*failed.allowed_methods, "OPTIONS"}))
            if isinstance(failed, web.HTTPMethodNotAllowed)
            else _METHODS
        )
        headers: Mapping[str, str] = {
            "Allow": allowed,
            "Access-Control-Allow-Methods": allowed,
            "Access-Control-Allow-Headers": _fields(request) if invited else _REQUEST_FIELDS,
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)


def _fields(request: web.Request) -> str:
    """Return the request fields that a page of an allowed origin may send: those it asks for.

    SDKs send a dozen of their own (`x-stainless-…`), other ones in each version.
    """
    asked = request.headers.get("Access-Control-Request-Headers", "").lower().split(",")
    names = [name for name in map(str.strip, asked) if _FIELD.fullmatch(name)]
    return ", ".join(names) or _REQUEST_FIELDS
