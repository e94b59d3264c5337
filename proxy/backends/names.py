"""Looks up the addresses behind a name."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

LOOKUP_TIMEOUT_S: Final = 5.0

Lookup = Callable[[str], Awaitable[tuple[str, ...]]]
"""From `name:port` to the `address:port` of each, sorted. Raises `LookupFailedError`."""


class LookupFailedError(Exception):
    """Nothing is known of a name at present; that does not mean that nobody is there."""


class Resolver:
    """Asks the system's resolver. IPv4 only where there is any: of two addresses of one machine one is enough.

    A question has a thread of its own, and there is one per name at a time: the system's may take half a minute to
    give up, and what waits for it must hold up nothing else.
    """

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[tuple[str, ...]]] = {}

    async def __call__(self, name: str) -> tuple[str, ...]:
        """Return the addresses behind `name:port`."""
        answer = self._asked.get(name)
        if answer is None:
            answer = self._asked[name] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(lambda done: done.cancelled() or done.exception())
            threading.Thread(
                target=self._ask, args=(name, answer), name=f"lookup {name}", daemon=True
            ).start()
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                return await asyncio.shield(answer)
        except TimeoutError:
            host = urlsplit(f"//{name}").hostname
            raise LookupFailedError(f"no answer about {host} within {LOOKUP_TIMEOUT_S:g} s") from None

    def _ask(self, name: str, answer: asyncio.Future[tuple[str, ...]]) -> None:
        found: tuple[str, ...] | LookupFailedError
        try:
            found = _addresses(name)
        except (OSError, UnicodeError) as error:
            words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            found = LookupFailedError(f"{urlsplit(f'//{name}').hostname}: {words}")
        # whoever asked may be gone, with the loop
        with contextlib.suppress(RuntimeError):
            answer.get_loop().call_soon_threadsafe(self._answered, name, answer, found)

    def _answered(
        self, name: str, answer: asyncio.Future[tuple[str, ...]], found: tuple[str, ...] | LookupFailedError
    ) -> None:
        self._asked.pop(name, None)
        if isinstance(found, LookupFailedError):
            answer.set_exception(found)
        else:
            answer.set_result(found)


def _addresses(name: str) -> tuple[str, ...]:
    parts = urlsplit(f"//{name}")
    found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    plain = {str(where[0]) for family, *_, where in found if family == socket.AF_INET}
    wide = {f"[{where[0]!s}]" for family, *_, where in found if family == socket.AF_INET6}
    return tuple(sorted(f"{address}:{parts.port}" for address in plain or wide))
