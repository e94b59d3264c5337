"""Opening an exchange with an engine: retried where that is safe, taken back when its grant is recalled."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from proxy.upstream import Exchange, Upstream, UpstreamDied, UpstreamRequest

STALE_TRIES: Final = 3
"""How many kept connections in a row may turn out to be closed."""
CLOSE_WAIT_S: Final = 5.0
"""How long an abandoned opening may take to let go of its socket."""


async def head_or_recall(
    upstream: Upstream,
    request: UpstreamRequest,
    recalled: asyncio.Future[None],
    every_s: float | None,
    still_waiting: Callable[[], Awaitable[None]],
) -> Exchange | None:
    """Send a request and wait for the head of its response; None when the grant was recalled before it came.

    After None the socket is closed: the engine lets the request go. A head that arrives together with the
    recall wins. `still_waiting` is awaited every `every_s` seconds (None: never). Raises `UpstreamDied`.
    """
    opening = asyncio.ensure_future(_open(upstream, request))
    try:
        while not opening.done():
            done, _ = await asyncio.wait(
                (opening, recalled), timeout=every_s, return_when=asyncio.FIRST_COMPLETED
            )
            if recalled in done and not opening.done():
                return await _withdrawn(opening)
            if not done:
                await still_waiting()
        return opening.result()
    except BaseException:
        await abandon(opening)
        raise


async def abandon(opening: asyncio.Future[Exchange]) -> None:
    """Cancel an opening and close what it may still have opened."""
    exchange = await _withdrawn(opening)
    if exchange is not None:
        exchange.close()


async def _withdrawn(opening: asyncio.Future[Exchange]) -> Exchange | None:
    """Cancel an opening; return the exchange when its head had come all the same."""
    opening.cancel()
    try:
        await asyncio.wait({opening}, timeout=CLOSE_WAIT_S)
    except BaseException:
        opening.add_done_callback(_let_go)
        raise
    if not opening.done():
        opening.add_done_callback(_let_go)
    if not opening.done() or opening.cancelled() or opening.exception() is not None:
        return None
    return opening.result()


def _let_go(opening: asyncio.Future[Exchange]) -> None:
    """Close what nobody waits for any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


async def _open(upstream: Upstream, request: UpstreamRequest) -> Exchange:
    """Open an exchange; again when a reused connection died before it gave a single byte.

    The engine closes idle connections after 5 s; losing that race is nobody's fault, and the next kept
    connection may have lost it too.
    """
    for _ in range(STALE_TRIES):
        try:
            return await upstream.open(request)
        except UpstreamDied as died:
            if not (died.before_head and died.reused):
                raise
    return await upstream.open(request)
