"""What operators send: small JSON bodies, checked whole, with errors that name the field."""

import asyncio
from typing import Annotated, Any, Final, Literal, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.errors import ErrorCode, ProxyError
from proxy.http.body import check_length
from proxy.http.call import CALL
from proxy.settings import Server
from proxy.types import Audit

MAX_BYTES: Final = 64 * 1024
MAX_WAIT_S: Final = 3600.0
MAX_LINES: Final = 100_000
Reason = Annotated[str, Field(max_length=500)]
Mode = Literal["hold", "reject"]
_Order = TypeVar("_Order", bound=BaseModel)


class Order(BaseModel):
    """Base of all bodies: no field that nobody knows, no guessing of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LoadOrder(Order):
    """`POST /api/models/{id}/load`: nothing to say."""


class UnloadOrder(Order):
    """`POST /api/models/{id}/unload`. `deadline_s` and `mode` None: as the model is configured."""

    deadline_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] | None = None
    force: bool = False
    then: Literal["open", "block"] = "open"
    mode: Mode | None = None
    reason: Reason = ""
    dry_run: bool = False


class GateOrder(Order):
    """`POST /api/gate` and `/api/models/{id}/gate`."""

    state: Literal["blocked", "open"]
    mode: Mode = "hold"
    reason: Reason = ""
    dry_run: bool = False


class LeaseOrder(Order):
    """`POST /api/leases`."""

    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    reason: Reason = ""


class ReloadOrder(Order):
    """`POST /api/reload`."""

    dry_run: bool = False


class RouterOrder(BaseModel):
    """`POST /models/load` and `/models/unload`, as llama.cpp's router takes them: more fields do no harm."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: Annotated[str, Field(min_length=1)]


async def read(request: web.Request, kind: type[_Order], server: Server) -> _Order:
    """Return the body as an order; no body is an empty one. Raises `ProxyError` naming the field."""
    check_length(request, MAX_BYTES, " here")
    if request.headers.get("Content-Encoding", "identity").strip().lower() not in {"", "identity"}:
        raise ProxyError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "send the body uncompressed")
    data = bytearray()
    try:
        async with asyncio.timeout(server.body_timeout_s):
            while chunk := await request.content.readany():
                data += chunk
                if len(data) > MAX_BYTES:
                    text = f"the body is too large: at most {MAX_BYTES} bytes are accepted here"
                    raise ProxyError(ErrorCode.REQUEST_TOO_LARGE, text, headers={"Connection": "close"})
    except TimeoutError:
        text = f"the body did not arrive within {server.body_timeout_s:g} s (server.body_timeout_s)"
        raise ProxyError(ErrorCode.REQUEST_TIMEOUT, text, headers={"Connection": "close"}) from None
    except RequestPayloadError as error:
        text = f"the body is not well-formed HTTP: {error}"
        raise ProxyError(ErrorCode.INVALID_REQUEST, text, headers={"Connection": "close"}) from None
    try:
        return kind.model_validate_json(bytes(data) or b"{}")
    except ValidationError as error:
        raise _refused(error.errors(include_url=False, include_input=False)[0], kind) from None


def audit_of(request: web.Request, server: Server) -> Audit:
    """Return who asks: the admin key's name (empty where none is needed) and the address."""
    caller = request[CALL].caller
    return Audit(caller.key if caller is not None and server.admin_keys else "", request.remote or "")


def seconds_of(request: web.Request, name: str, limit: float = MAX_WAIT_S) -> float:
    """Return a query parameter in seconds, 0 where it is missing; at most `limit`."""
    text = request.query.get(name)
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= limit:
        raise _query(name, f"expected 0 to {limit:g} seconds", text)
    return seconds


def count_of(request: web.Request, name: str, default: int, limit: int = MAX_LINES) -> int:
    """Return a query parameter that counts, at most `limit`."""
    text = request.query.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > len(str(limit)) or int(text) > limit:
        raise _query(name, f"expected a number from 0 to {limit}", text)
    return int(text)


def flag_of(request: web.Request, name: str) -> bool:
    """Return whether a query parameter is on."""
    text = request.query.get(name, "0").lower()
    if text not in {"0", "1", "true", "false", ""}:
        raise _query(name, "expected 1 or 0", text)
    return text in {"1", "true", ""}


def _query(name: str, expected: str, text: str) -> ProxyError:
    return ProxyError(ErrorCode.INVALID_REQUEST, f"?{name}=: {expected}, found {text[:50]!r}", param=name)


def _refused(first: Any, kind: type[BaseModel]) -> ProxyError:
    where = ".".join(str(part) for part in first["loc"])
    known = ", ".join(kind.model_fields) or "none"
    match first["type"]:
        case "json_invalid":
            return ProxyError(ErrorCode.INVALID_JSON, f"the body is not valid JSON: {first['msg']}")
        case "extra_forbidden":
            text = f"{where}: there is no such field here; known are: {known}"
        case "missing":
            text = f"{where}: is missing; known fields are: {known}"
        case _ if not where:
            return ProxyError(ErrorCode.INVALID_REQUEST, f"the body must be a JSON object ({first['msg']})")
        case _:
            text = f"{where}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return ProxyError(ErrorCode.INVALID_REQUEST, text, param=where)
