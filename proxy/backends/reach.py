"""Reaches engines that someone else runs: one at a URL, or those behind a name.

Cleans up after itself: when it raises or is cancelled, no connection is left.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from proxy.backends import probes
from proxy.backends.bringup import FIRST_PROBE_S, SLOWEST_PROBE_S, Progress, Recipe, Running, ask_props
from proxy.backends.client import EngineClient
from proxy.backends.names import LookupFailedError
from proxy.backends.views import Stage
from proxy.errors import ErrorCode, ProxyError

REACH_S: Final = 10.0
"""How long there may be silence before waiting is given up (an engine that says it loads is waited for)."""


class NotServingError(Exception):
    """Nothing serves at an address; `loading` says that something will."""

    def __init__(self, address: str, *, loading: bool) -> None:
        super().__init__(f"{address} {'is loading' if loading else 'does not answer'}")
        self.loading = loading


async def reach(recipe: Recipe, progress: Progress) -> Running:
    """Return an engine at the model's URL, or the first behind its name that serves. Raises `ProxyError`."""
    progress.started(None)
    model, wait = recipe.model, _Patience()
    while True:
        try:
            running = await (_named(recipe, model.dns) if model.dns else join(recipe, model.url or ""))
        except NotServingError as seen:
            wait.note(loading=seen.loading)
            if wait.over:
                place, what = (model.dns, "dns") if model.dns else (model.url, "the url")
                raise ProxyError(
                    ErrorCode.MODEL_LOAD_FAILED,
                    f"model {recipe.name!r}: nothing answered at {place} for {REACH_S:g} s ({seen}); "
                    f"start that server or correct {what}",
                ) from None
            await wait.next()
        else:
            progress.stage = Stage.PROBING
            return running


async def join(recipe: Recipe, url: str) -> Running:
    """Return the engine at a URL, or at `host:port`. Raises `NotServingError`, and `ProxyError` for one that is none."""
    secret = recipe.model.upstream_key
    address = "" if "://" in url else url
    client = EngineClient(
        f"http://{address}" if address else url, secret.get_secret_value() if secret else ""
    )
    try:
        await _serving(client, address or url)
        return Running(client, await ask_props(recipe, client), address=address)
    except BaseException:
        await client.close()
        raise


async def _serving(client: EngineClient, address: str) -> None:
    seen = await probes.health(client)
    if seen is not probes.Health.OK:
        raise NotServingError(address, loading=seen is probes.Health.LOADING)


async def _named(recipe: Recipe, name: str) -> Running:
    """Return whichever engine behind a name serves first. Raises as `join` does."""
    try:
        addresses = await recipe.lookup(name)
    except LookupFailedError as error:
        raise _NothingBehindError(str(error)) from None
    tries = [asyncio.create_task(join(recipe, address), name=f"join:{address}") for address in addresses]
    found: Running | None = None
    failures: list[NotServingError] = []
    try:
        for trying in asyncio.as_completed(tries):
            try:
                found = await trying
            except NotServingError as error:
                failures.append(error)
            else:
                return found
    finally:
        await _undo(tries, keep=lambda running: running is found)
    loading = [failure for failure in failures if failure.loading]
    raise (loading or failures or [_NothingBehindError(f"{name} has no address")])[0]


class _NothingBehindError(NotServingError):
    """There is no address to ask."""

    def __init__(self, words: str) -> None:
        super().__init__(words, loading=False)
        self.args = (words,)


async def _undo(tries: list[asyncio.Task[Running]], keep: Callable[[Running], bool]) -> None:
    for trying in tries:
        trying.cancel()
    if tries:
        await asyncio.wait(tries)
    for trying in tries:
        if not trying.cancelled() and trying.exception() is None and not keep(trying.result()):
            await trying.result().client.close()


class _Patience:
    """Waits between tries, longer each time, and knows when silence has lasted too long."""

    def __init__(self) -> None:
        self._silent_since = time.monotonic()
        self._delay = FIRST_PROBE_S

    def note(self, *, loading: bool) -> None:
        if loading:
            self._silent_since = time.monotonic()

    @property
    def over(self) -> bool:
        return time.monotonic() - self._silent_since > REACH_S

    async def next(self) -> None:
        await asyncio.sleep(self._delay)
        self._delay = min(self._delay * 1.5, SLOWEST_PROBE_S)
