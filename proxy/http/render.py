"""Errors and small answers as responses: always JSON, in the client's dialect, never a traceback."""

from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from proxy.errors import NOT_AGAIN, SOURCE, ErrorCode, ProxyError, error_body, error_event
from proxy.headers import retry_headers
from proxy.sse import data_event
from proxy.types import Dialect


def json_response(value: Mapping[str, Any], status: int = 200) -> web.Response:
    """Return a JSON response."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error_response(error: ProxyError, dialect: Dialect, request_id: str) -> web.Response:
    """Return the whole response for an error before anything was sent."""
    response = web.Response(
        body=orjson.dumps(error_body(error, dialect, request_id)),
        status=error.status,
        content_type="application/json",
    )
    response.headers.update(retry_headers(error.retry_after_s))
    if error.code in NOT_AGAIN:
        # the SDKs of OpenAI and Anthropic send what failed with a 5xx again, twice, unless told so
        response.headers["x-should-retry"] = "false"
    response.headers.update(error.headers)
    if error.headers.get("Connection") == "close":
        response.force_close()
    return response


def engine_error_event(status: int, body: bytes, dialect: Dialect, request_id: str) -> bytes:
    """Return an engine's own error answer as an in-stream event, for a stream that already began.

    The engine's words, type and code are kept; only the frame changes.
    """
    inner = _error_object(body)
    if inner is None:
        text = body[:500].decode("utf-8", "replace").strip() or "no text"
        told = ProxyError(ErrorCode.UPSTREAM_ERROR, f"the engine answered with status {status}: {text}")
        return error_event(told, dialect, request_id)
    match dialect:
        case Dialect.OPENAI:
            return data_event(orjson.dumps({"error": inner}))
        case Dialect.ANTHROPIC:
            framed = {"type": "error", "error": inner, "request_id": request_id or None}
            return data_event(orjson.dumps(framed), "error")
        case Dialect.RESPONSES:
            flat = {
                "type": "error",
                "code": inner.get("code"),
                "message": inner.get("message"),
                "param": inner.get("param"),
                "error": inner,
            }
            return data_event(orjson.dumps(flat), "error")


def from_http_exception(error: web.HTTPException, path: str) -> ProxyError:
    """Translate aiohttp's own refusals into our table."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return ProxyError(
                ErrorCode.METHOD_NOT_ALLOWED,
                f"{error.method} is not allowed for {path}: use {allowed}",
                headers={"Allow": allowed},
            )
        case web.HTTPNotFound():
            return ProxyError(ErrorCode.NOT_FOUND, f"there is no path {path!r}")
        case web.HTTPRequestEntityTooLarge():
            return ProxyError(ErrorCode.REQUEST_TOO_LARGE, "the body is too large")
        case web.HTTPExpectationFailed():
            return ProxyError(ErrorCode.INVALID_REQUEST, "only Expect: 100-continue is understood")
        case _ if 400 <= error.status < 500:
            return ProxyError(ErrorCode.INVALID_REQUEST, error.reason)
        case _:
            return internal_error()


def internal_error() -> ProxyError:
    """Return what a client learns of a bug of ours: that there is one, and where to look."""
    return ProxyError(
        ErrorCode.INTERNAL_ERROR, f"an internal error of {SOURCE}; its log has this request's id"
    )


def _error_object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    inner = value.get("error") if isinstance(value, dict) else None
    if isinstance(inner, str):
        return {"message": inner}
    return inner if isinstance(inner, dict) else None
