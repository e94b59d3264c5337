"""Looks up the addresses behind a name."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

LOOKUP_TIMEOUT_S: Final = 5.0

Lookup = Callable[[str], Awaitable[tuple[str, ...]]]
"""From `name:port` to the `address:port` of each, sorted, or `LookupFailedError`."""


class LookupFailedError(Exception):
    """Nothing is known of a name at present; that does not mean that nobody is there."""


async def look_up(name: str) -> tuple[str, ...]:
    """Ask the system's resolver. IPv4 only where there is any: of two addresses of one machine one is enough."""
    parts = urlsplit(f"//{name}")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise LookupFailedError(f"no answer about {parts.hostname} within {LOOKUP_TIMEOUT_S:g} s") from None
    except (OSError, UnicodeError) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LookupFailedError(f"{parts.hostname}: {words}") from None
    plain = {str(where[0]) for family, *_, where in found if family == socket.AF_INET}
    wide = {f"[{where[0]!s}]" for family, *_, where in found if family == socket.AF_INET6}
    return tuple(sorted(f"{address}:{parts.port}" for address in plain or wide))
