"""Every error a client can get from us: status, type, code and shape in each dialect.

The engine's own errors pass through unchanged; ours carry `"source": "llama-proxy"`.
"""

import json
from enum import StrEnum
from typing import Any, assert_never

from proxy.types import Dialect

SOURCE = "llama-proxy"


class ErrorCode(StrEnum):
    """Closed vocabulary of our error codes; label of `requests_rejected_total`."""

    QUEUE_FULL = "queue_full"
    KEY_QUEUE_FULL = "key_queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    MODEL_LOADING = "model_loading"
    GATE_BLOCKED = "gate_blocked"
    MODEL_DRAINING = "model_draining"
    NO_BACKEND = "no_backend"
    SHUTTING_DOWN = "shutting_down"
    MODEL_UNLOADED = "model_unloaded"
    CANCELLED_BY_OPERATOR = "cancelled_by_operator"
    UPSTREAM_ERROR = "upstream_error"
    LOAD_TIMEOUT = "load_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"
    INTER_TOKEN_TIMEOUT = "inter_token_timeout"
    TOTAL_TIMEOUT = "total_timeout"
    GATE_HOLD_TIMEOUT = "gate_hold_timeout"
    MODEL_LOAD_FAILED = "model_load_failed"
    WAKE_FAILED = "wake_failed"
    IDENTITY_MISMATCH = "identity_mismatch"
    UPSTREAM_WEDGED = "upstream_wedged"
    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    INVALID_API_KEY = "invalid_api_key"
    PERMISSION_DENIED = "permission_denied"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    REQUEST_TOO_LARGE = "request_too_large"
    REQUEST_TIMEOUT = "request_timeout"
    INTERNAL_ERROR = "internal_error"


_RATE = (429, "rate_limit_error")
_UNAVAILABLE = (503, "service_unavailable_error")
_INVALID = "invalid_request_error"

STATUS_AND_TYPE: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.QUEUE_FULL: _RATE,
    ErrorCode.KEY_QUEUE_FULL: _RATE,
    ErrorCode.QUEUE_TIMEOUT: _RATE,
    ErrorCode.MODEL_LOADING: _UNAVAILABLE,
    ErrorCode.GATE_BLOCKED: _UNAVAILABLE,
    ErrorCode.MODEL_DRAINING: _UNAVAILABLE,
    ErrorCode.NO_BACKEND: _UNAVAILABLE,
    ErrorCode.SHUTTING_DOWN: _UNAVAILABLE,
    ErrorCode.MODEL_UNLOADED: _UNAVAILABLE,
    ErrorCode.CANCELLED_BY_OPERATOR: _UNAVAILABLE,
    ErrorCode.UPSTREAM_ERROR: (502, "server_error"),
    ErrorCode.LOAD_TIMEOUT: (504, "server_error"),
    ErrorCode.FIRST_TOKEN_TIMEOUT: (504, "server_error"),
    ErrorCode.INTER_TOKEN_TIMEOUT: (504, "server_error"),
    ErrorCode.TOTAL_TIMEOUT: (504, "server_error"),
    ErrorCode.GATE_HOLD_TIMEOUT: (504, "server_error"),
    ErrorCode.MODEL_LOAD_FAILED: (502, "server_error"),
    ErrorCode.WAKE_FAILED: (502, "server_error"),
    ErrorCode.IDENTITY_MISMATCH: (503, "server_error"),
    ErrorCode.UPSTREAM_WEDGED: (503, "server_error"),
    ErrorCode.INVALID_JSON: (400, _INVALID),
    ErrorCode.INVALID_REQUEST: (400, _INVALID),
    ErrorCode.INVALID_API_KEY: (401, "authentication_error"),
    ErrorCode.PERMISSION_DENIED: (403, "permission_error"),
    ErrorCode.MODEL_NOT_FOUND: (404, _INVALID),
    ErrorCode.NOT_FOUND: (404, _INVALID),
    ErrorCode.METHOD_NOT_ALLOWED: (405, _INVALID),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: (415, _INVALID),
    ErrorCode.REQUEST_TOO_LARGE: (413, _INVALID),
    ErrorCode.REQUEST_TIMEOUT: (408, _INVALID),
    ErrorCode.INTERNAL_ERROR: (500, "server_error"),
}

_ANTHROPIC_TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


NOT_AGAIN: frozenset[ErrorCode] = frozenset(
    {
        ErrorCode.CANCELLED_BY_OPERATOR,
        ErrorCode.MODEL_UNLOADED,
        ErrorCode.FIRST_TOKEN_TIMEOUT,
        ErrorCode.TOTAL_TIMEOUT,
    }
)
"""What the same request must not meet by itself again: somebody ended it, or it would take as long once more."""


class ProxyError(Exception):
    """A failure with a place in the error table.

    `retry_after_s` becomes `Retry-After` and `retry-after-ms` (seconds, may be fractional).
    `headers` are extra response headers, for example `Allow`.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    def copy(self) -> "ProxyError":
        """Return an error to raise in its place: one that is raised in many tasks keeps all their frames alive."""
        return ProxyError(
            self.code,
            self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            headers=dict(self.headers),
        )

    @property
    def status(self) -> int:
        """HTTP status of the error table."""
        return STATUS_AND_TYPE[self.code][0]

    @property
    def type(self) -> str:
        """OpenAI error type of the error table."""
        return STATUS_AND_TYPE[self.code][1]


def error_body(error: ProxyError, dialect: Dialect, request_id: str = "") -> dict[str, Any]:
    """Return the JSON object of an error response in the client's dialect."""
    match dialect:
        case Dialect.OPENAI | Dialect.RESPONSES:
            return {
                "error": {
                    "message": error.message,
                    "type": error.type,
                    "code": error.code.value,
                    "param": error.param,
                    "source": SOURCE,
                }
            }
        case Dialect.ANTHROPIC:
            return {
                "type": "error",
                "error": {
                    "type": _ANTHROPIC_TYPES.get(error.status, "api_error"),
                    "message": error.message,
                    "code": error.code.value,
                    "source": SOURCE,
                },
                "request_id": request_id or None,
            }
        case _:
            assert_never(dialect)


def error_event(error: ProxyError, dialect: Dialect, request_id: str = "") -> bytes:
    """Return one whole SSE event that tells a client of a started stream that it failed.

    The openai SDK raises on `data: {"error": …}`; Anthropic and Responses clients dispatch on the
    event name.
    """
    body = error_body(error, dialect, request_id)
    match dialect:
        case Dialect.OPENAI:
            head = b""
        case Dialect.ANTHROPIC:
            head = b"event: error\n"
        case Dialect.RESPONSES:
            head = b"event: error\n"
            inner = body["error"]
            body = {
                "type": "error",
                "code": inner["code"],
                "message": inner["message"],
                "param": inner["param"],
                "source": SOURCE,
                "error": inner,
            }
        case _:
            assert_never(dialect)
    return head + b"data: " + json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
