"""Reaches engines that someone else runs: one at a URL, or those behind a name.

Cleans up after itself: when it raises or is cancelled, no connection is left.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final, NoReturn

from proxy.backends import probes
from proxy.backends.bringup import (
    FIRST_PROBE_S,
    SLOWEST_PROBE_S,
    Progress,
    Recipe,
    Running,
    ask_props,
    failed,
)
from proxy.backends.client import EngineClient, ProbeError
from proxy.backends.names import LookupFailedError
from proxy.backends.views import Stage
from proxy.errors import ErrorCode, ProxyError

REACH_S: Final = 10.0
"""How long there may be silence before waiting is given up (an engine that says it loads is waited for)."""


class NotServingError(Exception):
    """Nothing serves there; `loading` says that something will."""

    def __init__(self, words: str, *, loading: bool = False) -> None:
        super().__init__(words)
        self.loading = loading


async def reach(recipe: Recipe, progress: Progress) -> Running:
    """Return the engine at the model's URL, or the first behind its name that serves. Raises `ProxyError`."""
    progress.started(None)
    if recipe.model.dns is not None:
        return await _behind(recipe, recipe.model.dns, progress)
    url = recipe.model.url or ""
    client, patience = _client(recipe, url), _Patience()
    try:
        while (seen := await probes.health(client)) is not probes.Health.OK:
            if patience.over(loading=seen is probes.Health.LOADING):
                _give_up(recipe, f"nothing answered at {_shown(url)} for {REACH_S:g} s", "the url")
            await patience.wait()
        progress.stage = Stage.PROBING
        return Running(client, await ask_props(recipe, client))
    except BaseException:
        await client.close()
        raise


async def join(recipe: Recipe, address: str) -> Running:
    """Return the engine at an address behind a name, if it serves and shows its slots.

    Raises `NotServingError`, and `ProxyError` for one that is no good.
    """
    client = _client(recipe, f"http://{address}")
    try:
        seen = await probes.health(client)
        if seen is not probes.Health.OK:
            _not_serving(address, loading=seen is probes.Health.LOADING)
        info = await ask_props(recipe, client)
        await probes.slots(client, None)
        return Running(client, info, address=address)
    except ProbeError as error:
        await client.close()
        raise failed(recipe, f"{address} serves but {error}") from None
    except BaseException:
        await client.close()
        raise


async def _behind(recipe: Recipe, name: str, progress: Progress) -> Running:
    patience = _Patience()
    while True:
        try:
            running = await _first(recipe, name)
        except NotServingError as error:
            if patience.over(loading=error.loading):
                _give_up(recipe, f"nothing serves behind {name} for {REACH_S:g} s: {error}", "dns")
            await patience.wait()
        else:
            progress.stage = Stage.PROBING
            return running


async def _first(recipe: Recipe, name: str) -> Running:
    """Return whichever engine behind a name serves first. Raises `NotServingError`, for the one that is nearest to it.

    `ProxyError`: somebody serves there, but none that is any good.
    """
    try:
        addresses = await recipe.lookup(name)
    except LookupFailedError as error:
        raise NotServingError(str(error)) from None
    tries = [asyncio.create_task(join(recipe, address), name=f"join:{address}") for address in addresses]
    found: Running | None = None
    absent: list[NotServingError] = []
    wrong: list[ProxyError] = []
    try:
        for trying in asyncio.as_completed(tries):
            try:
                found = await trying
            except NotServingError as error:
                absent.append(error)
            except ProxyError as error:
                wrong.append(error)
            else:
                break
    finally:
        await _undo(tries, keep=lambda running: running is found)
    if found is not None:
        return found
    absent.sort(key=lambda error: not error.loading)
    if absent and (absent[0].loading or not wrong):
        raise absent[0]
    raise wrong[0] if wrong else NotServingError(f"{name} has no address")


async def _undo(tries: list[asyncio.Task[Running]], keep: Callable[[Running], bool]) -> None:
    """End tries and close what they reached; all of it when this is cancelled meanwhile."""
    kept = False
    try:
        for trying in tries:
            trying.cancel()
        if tries:
            await asyncio.wait(tries)
        kept = True
    finally:
        for trying in tries:
            if trying.done() and not trying.cancelled() and trying.exception() is None:
                running = trying.result()
                if not (kept and keep(running)):
                    await running.client.close()


def _client(recipe: Recipe, url: str) -> EngineClient:
    secret = recipe.model.upstream_key
    return EngineClient(url, secret.get_secret_value() if secret else "")


def _not_serving(address: str, *, loading: bool) -> NoReturn:
    raise NotServingError(f"{address} {'is loading' if loading else 'does not answer'}", loading=loading)


def _give_up(recipe: Recipe, what: str, where: str) -> NoReturn:
    text = f"model {recipe.name!r}: {what}; start that server or correct {where}"
    raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, text)


def _shown(url: str) -> str:
    """Return a URL without the name and password in it: errors are shown to clients."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


class _Patience:
    """Waits between tries, longer each time, and knows when silence has lasted too long."""

    def __init__(self) -> None:
        self._silent_since = time.monotonic()
        self._delay = FIRST_PROBE_S

    def over(self, *, loading: bool) -> bool:
        """Take what was seen; return whether that was enough."""
        if loading:
            self._silent_since = time.monotonic()
        return time.monotonic() - self._silent_since > REACH_S

    async def wait(self) -> None:
        await asyncio.sleep(self._delay)
        self._delay = min(self._delay * 1.5, SLOWEST_PROBE_S)
