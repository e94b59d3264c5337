"""The listening side's options, and a runner whose own refusals are JSON like all others.

aiohttp answers what it cannot parse before any middleware, as plain text and with a traceback in the
log; both are replaced here.
"""

from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler, RequestPayloadError, _ErrInfo

from proxy import logs
from proxy.errors import SOURCE, ErrorCode, ProxyError
from proxy.headers import mint, request_id
from proxy.http.endpoints import dialect_of
from proxy.http.hardening import MAX_FIELDS
from proxy.http.render import error_response, from_http_exception, internal_error
from proxy.settings import Settings
from proxy.types import Dialect


def runner_options(settings: Settings) -> dict[str, Any]:
    """Return the keyword arguments for `AppRunner`.

    `handler_cancellation` is what tells a handler that its client left; `auto_decompress` off keeps
    bodies as they were sent.
    """
    return {
        "access_log": None,
        "auto_decompress": False,
        "handler_cancellation": True,
        "keepalive_timeout": 75.0,
        "lingering_time": 5.0,
        "max_field_size": settings.server.max_header_bytes,
        "max_headers": MAX_FIELDS,
        "max_line_size": settings.server.max_header_bytes,
        "shutdown_timeout": 1.0,
    }


class JsonRequestHandler(RequestHandler):
    """One connection; answers unparsable requests in JSON."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Take bytes off the connection.

        A body that turns out malformed behind its first segment is told to its reader, who would wait for its rest:
        the parser only queues a refusal behind the request.
        """
        super().data_received(data)
        reading = self._current_request
        if reading is None or not self._messages or not isinstance(self._messages[-1][0], _ErrInfo):
            return
        if not reading.content.is_eof() and reading.content.exception() is None:
            text = self._messages[-1][0].message.strip().partition("\n")[0].rstrip(":")[:200]
            reading.content.set_exception(RequestPayloadError(text))
            # nothing of it is waited for when the answer is out
            reading.content.feed_eof()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response for a failure outside all handlers; the connection is closed after it."""
        ours = mint()
        log = logs.get("http")
        if status < 500:
            # the parser quotes the offending bytes below its first line; they may hold a key
            text = (message or "bad request").strip().partition("\n")[0].rstrip(":")[:200]
            log.info("request refused by the parser", id=ours, remote=request.remote, error=text)
            error = ProxyError(ErrorCode.INVALID_REQUEST, f"the request is not valid HTTP: {text}")
        else:
            log.error("connection failed", id=ours, remote=request.remote, exc_info=exc)
            error = internal_error()
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun; no second one can follow")
        response = error_response(error, Dialect.OPENAI, ours)
        response.headers["x-request-id"] = ours
        response.headers["Server"] = SOURCE
        response.force_close()
        return response


class _JsonServer(web.Server):
    def __call__(self) -> RequestHandler:
        return JsonRequestHandler(self, loop=self._loop, **self._kwargs)


class ProxyRunner(web.AppRunner):
    """`AppRunner` with the options above and JSON for everything."""

    __slots__ = ()

    def __init__(self, app: web.Application, settings: Settings, **kwargs: Any) -> None:
        super().__init__(app, **{**runner_options(settings), **kwargs})

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await plain.request_handler(request)
            except web.HTTPException as error:
                # refused before the middleware: an Expect that a path without a body does not know
                given = request_id(request.headers.get("x-request-id"))
                told = from_http_exception(error, request.path[:200])
                response = error_response(told, dialect_of(request.path, request.raw_path), given.shown)
                response.headers["x-request-id"] = given.shown
                response.headers["Server"] = SOURCE
                response.force_close()
                return response

        return _JsonServer(handle, request_factory=plain.request_factory, **self._kwargs)
