"""Checks on the raw form of a request, for what the HTTP parser lets through. Pure."""

from collections.abc import Iterable
from typing import Final

from proxy.errors import ErrorCode, ProxyError

MAX_FIELDS: Final = 100
_SINGLE: Final = frozenset(
    {b"host", b"content-length", b"content-type", b"authorization", b"x-api-key", b"transfer-encoding"}
)


def check_raw(
    method: str, target: str, version: tuple[int, int], headers: Iterable[tuple[bytes, bytes]], limit: int
) -> None:
    """Raise 400 for a request that two servers could read differently.

    `limit` bounds the sum of all header bytes. Targets must be in origin form: a target with its own
    authority would pass by the Host rule.
    """
    if version < (1, 0):
        raise _refused("HTTP/1.0 or HTTP/1.1 is needed")
    if not target.startswith("/") and not (method == "OPTIONS" and target == "*"):
        raise _refused("the request target must be a path (origin form)")
    if "#" in target:
        raise _refused("the request target must not have a fragment")
    size = 0
    seen: dict[bytes, bytes] = {}
    for raw, value in headers:
        name = raw.lower()
        size += len(raw) + len(value) + 4
        if name in _SINGLE:
            if name in seen:
                raise _refused(f"the header {name.decode('latin-1')} stands twice")
            seen[name] = value
        if b"\r" in value or b"\n" in value or b"\0" in value:
            raise _refused(f"the header {name.decode('latin-1')} has a line break in it")
    if size > limit:
        raise _refused(f"the headers are too large: {size} bytes, at most {limit} (server.max_header_bytes)")
    if b"transfer-encoding" in seen:
        if b"content-length" in seen:
            raise _refused("Transfer-Encoding and Content-Length exclude each other")
        if seen[b"transfer-encoding"].strip().lower() != b"chunked" or version < (1, 1):
            raise _refused("Transfer-Encoding must be chunked, over HTTP/1.1")
    length = seen.get(b"content-length")
    if length is not None and not length.strip().isdigit():
        raise _refused("Content-Length must be a number")
    if version >= (1, 1) and b"host" not in seen:
        raise _refused("the header Host is missing")


def _refused(message: str) -> ProxyError:
    # the connection's framing cannot be trusted any more
    return ProxyError(ErrorCode.INVALID_REQUEST, message, headers={"Connection": "close"})
