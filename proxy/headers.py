"""Which header fields cross the proxy, and request ids. Pure.

Field names are compared in lower case. Lists of pairs keep order and duplicates.
"""

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

Pairs = Sequence[tuple[str, str]]

HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110 7.6.1 and what practice added to it."""

_NOT_TO_ENGINE: Final = HOP_BY_HOP | {
    # the client's credentials are for us alone; the transport adds the engine's own key
    "authorization",
    "x-api-key",
    "cookie",
    # written anew by the transport for the bytes it sends
    "host",
    "content-length",
    "expect",
    # bodies pass unchanged both ways, so nobody may be invited to compress
    "accept-encoding",
    # CORS is answered here; an engine that saw an Origin would answer it a second time
    "origin",
    "referer",
    # ours, set below or consumed here
    "x-request-id",
    "x-phase-gather-ms",
    "x-keepalive",
    "x-priority",
    # the engine's resumable streams: with it, generation goes on after the client has left
    "x-conversation-id",
}

_NOT_TO_CLIENT: Final = HOP_BY_HOP | {
    "set-cookie",
    "content-length",
    "x-request-id",
    "x-queue-wait-ms",
    "x-backend",
    "x-cohort-id",
}

_ECHOED: Final = re.compile(r"[A-Za-z0-9._:/=+@~-]{1,128}")
_TAGGABLE: Final = re.compile(r"[A-Za-z0-9._-]{1,48}")


@dataclass(frozen=True, slots=True)
class RequestId:
    """`shown` goes back to the client; `tag` names the ticket and fits the engine's rule for tags.

    `given`: the client chose it, and may come back with it.
    """

    shown: str
    tag: str
    given: bool = False


def connection_named(headers: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Return the lower-case names that `Connection` fields declare to be hop-by-hop."""
    names: set[str] = set()
    for name, value in headers:
        if name.lower() == "connection":
            names.update(token.strip().lower() for token in value.split(","))
    names.discard("")
    return frozenset(names)


def to_engine(headers: Pairs, *, tag: str, gather_ms: int | None) -> list[tuple[str, str]]:
    """Return the fields a request carries to the engine.

    Ours are appended after the stripping, so a client cannot name them away with `Connection`.
    `Host` and `Content-Length` are left to the transport.
    """
    dropped = _NOT_TO_ENGINE | connection_named(headers)
    kept = [
        (name, value)
        for name, value in headers
        if (low := name.lower()) not in dropped and not low.startswith(("sec-", "access-control-"))
    ]
    kept.append(("x-request-id", tag))
    if gather_ms is not None:
        kept.append(("x-phase-gather-ms", str(gather_ms)))
    return kept


def to_client(headers: Pairs) -> list[tuple[str, str]]:
    """Return the fields of an engine's response that a client gets.

    `Content-Length` is the caller's to keep or drop: it knows whether the body passes unchanged.
    """
    dropped = _NOT_TO_CLIENT | connection_named(headers)
    return [
        (name, value)
        for name, value in headers
        if (low := name.lower()) not in dropped and not low.startswith("access-control-")
    ]


def mint() -> str:
    """Return a new request id: 80 random bits."""
    return "req-" + secrets.token_hex(10)


def request_id(given: str | None) -> RequestId:
    """Return the id to echo and the tag to trace with.

    A client's id is echoed when it is 1 to 128 plain characters and used as the tag when it is also
    1 to 48 of `[A-Za-z0-9._-]` (the engine takes 64 with the generation's suffix); else one is minted.
    """
    if given is None or _ECHOED.fullmatch(given) is None:
        own = mint()
        return RequestId(own, own)
    return RequestId(given, given if _TAGGABLE.fullmatch(given) else mint(), given=True)


def retry_headers(retry_after_s: float | None) -> dict[str, str]:
    """Return `Retry-After` (whole seconds, rounded up) and `retry-after-ms` (the exact wait)."""
    if retry_after_s is None:
        return {}
    ms = max(1, round(retry_after_s * 1000))
    return {"Retry-After": str(-(-ms // 1000)), "retry-after-ms": str(ms)}
