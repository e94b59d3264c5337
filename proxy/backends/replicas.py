"""The engines behind one name, each with its connections and its mirror: they come, go, and are lost one by one.

The name is looked up again and again. An address that appears joins once it serves; one that disappears gets no new
requests, finishes what it has, and is let go of. One that stops answering is lost with its requests, and joins
again when it serves again. A name that cannot be looked up changes nothing: who is gone is seen by their silence.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Final

from proxy import logs
from proxy.backends.backoff import Backoff
from proxy.backends.bringup import Recipe, Running
from proxy.backends.client import EngineClient
from proxy.backends.live import Live
from proxy.backends.names import LookupFailedError
from proxy.backends.process import StopReport
from proxy.backends.reach import NotServingError, join
from proxy.backends.sentinel import Lost
from proxy.backends.voice import Voice
from proxy.clock import Clock
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.types import BackendKey, Cause, Snapshot

LOOK_S: Final = 5.0
"""Between two looks at the name."""
REST_S: Final = 15.0
"""How long one that left has had nothing to do before it is let go of: it may be back at the next looks."""

_log = logs.get("backends")


class Replicas:
    """What is there while a named model is ready (see `Serving`). `lost` is told once, when the last engine went."""

    def __init__(
        self,
        key: BackendKey,
        running: Running,
        recipe: Recipe,
        *,
        metrics: Metrics,
        clock: Clock,
        voice: Voice,
        lost: Lost,
        numbers: Iterator[int],
    ) -> None:
        """`running` is the engine that was reached first; `numbers` are the generations of those that join."""
        self.key: Final = key
        self._first = running
        self.recipe, self._name = recipe, recipe.model.dns or ""
        self._metrics, self._clock, self._voice = metrics, clock, voice
        self._lost = lost
        self._over = False
        """Whether nobody joins any more and no loss is told: it is being stopped, or the last engine went."""
        self._numbers = numbers
        self._there: dict[str, Live] = {}
        self._leaving: dict[str, float] = {}
        """Addresses that are no longer behind the name, and since when."""
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._clearing: dict[str, asyncio.Task[None]] = {}
        self._keeping_up: asyncio.Task[None] | None = None
        self._joined_at: dict[str, float] = {}
        self._strikes: dict[str, int] = {}
        """Losses in a row by address."""
        self._not_before: dict[str, float] = {}
        self._refused: dict[str, str] = {}
        """What is wrong with an address that serves, as it was last said."""
        self._quiet_since = clock()
        self._unknown = ""

    # -- as `Serving` -----------------------------------------------------------------------------------

    kept: Final = False

    def refit(self, recipe: Recipe) -> None:
        self.recipe = recipe
        for live in self._there.values():
            live.refit(recipe)

    @property
    def running(self) -> Running:
        return next((live.running for live in self._there.values()), self._first)

    @property
    def exchanges(self) -> int:
        return sum(live.exchanges for live in self._there.values())

    @property
    def quiet_since(self) -> float:
        return max((self._quiet_since, *(live.quiet_since for live in self._there.values())))

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        return tuple(snapshot for live in self._there.values() for snapshot in live.snapshots)

    def begin(self) -> None:
        self._enter(self._first)
        self._keeping_up = asyncio.create_task(self._keep_up(), name=f"names:{self.key.model}")

    def client(self, key: BackendKey) -> EngineClient | None:
        live = self._there.get(key.backend)
        return live.client(key) if live is not None else None

    def poke(self, key: BackendKey | None = None) -> None:
        for live in self._there.values():
            live.poke(key)

    async def watch_exit(self) -> None:
        """There is no process of ours."""

    def excused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def dismiss(self) -> None:
        self._over = True
        for live in self._there.values():
            live.dismiss()

    def farewell(self, error: ProxyError) -> None:
        for live in self._there.values():
            live.farewell(error)

    def renounce(self) -> None:
        """There is no process of ours."""

    async def let_go(self, error: ProxyError) -> None:
        await self._stand_still()
        try:
            await asyncio.gather(*(live.let_go(error) for live in self._there.values()))
        finally:
            await self._forget()

    async def clear(self, error: ProxyError) -> StopReport | None:
        await self._stand_still()
        try:
            await asyncio.gather(*(live.clear(error) for live in self._there.values()))
        finally:
            await self._forget()
        return None

    async def detach(self) -> None:
        """There is no process of ours."""

    # -- coming and going -------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                _log.exception("a name was not followed", model=self.key.model, name=self._name)
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        """Compare who is there with who should be."""
        try:
            wanted = await self.recipe.lookup(self._name)
        except LookupFailedError as error:
            self._note_unknown(str(error))
        else:
            self._note_unknown("")
            self._follow(wanted)
        if not self._over:
            self._let_leavers_go()

    def _follow(self, wanted: tuple[str, ...]) -> None:
        if self._over:
            return
        now = self._clock()
        for address in wanted:
            if address in self._leaving:
                self._drain(address, draining=False)
            elif now < self._not_before.get(address, now):
                continue
            elif not any(address in these for these in (self._there, self._joining, self._clearing)):
                self._joining[address] = joining = asyncio.create_task(
                    self._join(address), name=f"join:{address}"
                )
                joining.add_done_callback(partial(self._tried, address))
        for address in [a for a in self._there if a not in wanted and a not in self._leaving]:
            self._drain(address, draining=True)
        for known in (self._strikes, self._not_before, self._refused):
            for address in [a for a in known if a not in wanted and a not in self._there]:
                del known[address]

    async def _join(self, address: str) -> None:
        try:
            running = await join(self.recipe, address)
        except NotServingError as error:
            _log.debug("replica not ready", model=self.key.model, address=address, why=str(error))
            return
        except ProxyError as error:
            if self._refused.get(address) != error.message:
                self._refused[address] = error.message
                _log.warning("replica refused", model=self.key.model, address=address, error=error.message)
            return
        if self._over:
            await running.client.close()
        else:
            self._enter(running)

    def _tried(self, address: str, task: asyncio.Task[None]) -> None:
        self._joining.pop(address, None)
        _told(task, "a replica could not join", self.key.model, address)

    def _enter(self, running: Running) -> None:
        key = BackendKey(self.key.model, running.address, next(self._numbers))
        live = Live(
            key,
            running,
            self.recipe,
            metrics=self._metrics,
            clock=self._clock,
            voice=self._voice,
            lost=self._one_lost,
        )
        self._there[running.address] = live
        self._joined_at[running.address] = self._clock()
        self._refused.pop(running.address, None)
        _log.info("replica joined", model=key.model, address=key.backend, generation=key.generation)
        live.begin()

    def _drain(self, address: str, *, draining: bool) -> None:
        live = self._there[address]
        if draining:
            self._leaving[address] = self._clock()
        else:
            del self._leaving[address]
        _log.info(
            "replica leaves" if draining else "replica stays",
            model=self.key.model,
            address=address,
            name=self._name,
        )
        self._voice.draining(live.key, draining=draining)

    def _let_leavers_go(self) -> None:
        now = self._clock()
        for address, since in list(self._leaving.items()):
            live = self._there[address]
            # an answer that is all here may still be on its way to its client
            at_work = live.exchanges or self.recipe.granted(live.key)
            if not at_work and now - max(since, live.quiet_since) >= REST_S:
                gone = ProxyError(ErrorCode.UPSTREAM_ERROR, f"{address} is no longer behind {self._name}")
                self._leave(live, Cause.CRASH, gone)

    def _one_lost(self, key: BackendKey, cause: Cause, error: ProxyError) -> None:
        live = self._there.get(key.backend)
        if live is None or live.key != key:
            return
        backoff, now = self._backoff, self._clock()
        strikes = backoff.strikes(self._strikes.get(key.backend, 0), now - self._joined_at[key.backend])
        self._strikes[key.backend] = strikes
        self._not_before[key.backend] = now + backoff.wait_s(strikes)
        _log.warning("replica lost", model=key.model, address=key.backend, error=error.message)
        self._leave(live, cause, error)

    @property
    def _backoff(self) -> Backoff:
        restart = self.recipe.model.restart
        return Backoff(restart.first_s, restart.max_s, restart.stable_s)

    def _leave(self, live: Live, cause: Cause, error: ProxyError) -> None:
        """Take an engine out: its requests end with `error`. With the last one the model goes."""
        if self._over:
            return
        if len(self._there) == 1:
            # its farewell is the model's: said once it is no longer ready, so that who waits asks for a load
            self._over = True
            live.dismiss()
            self._lost(self.key, cause, error)
            return
        address = live.key.backend
        self._quiet_since = max(self._quiet_since, self._clock() if live.exchanges else live.quiet_since)
        del self._there[address]
        self._leaving.pop(address, None)
        self._joined_at.pop(address, None)
        live.dismiss()
        live.farewell(error)
        self._clearing[address] = clearing = asyncio.create_task(
            self._clear(live, error), name=f"clear:{address}"
        )
        clearing.add_done_callback(partial(self._cleared, address))

    async def _clear(self, live: Live, error: ProxyError) -> None:
        await live.clear(error)
        self._metrics.forget_backend(live.key.model, live.key.backend)

    def _cleared(self, address: str, task: asyncio.Task[None]) -> None:
        self._clearing.pop(address, None)
        _told(task, "a replica was not cleared away", self.key.model, address)

    def _note_unknown(self, why: str) -> None:
        if why and not self._unknown:
            _log.warning("name not known at present", model=self.key.model, name=self._name, error=why)
        self._unknown = why

    async def _stand_still(self) -> None:
        tasks = [*self._joining.values(), *([self._keeping_up] if self._keeping_up is not None else [])]
        self._keeping_up = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _forget(self) -> None:
        for live in self._there.values():
            self._metrics.forget_backend(live.key.model, live.key.backend)
        self._there.clear()
        self._leaving.clear()
        if self._clearing:
            await asyncio.wait(tuple(self._clearing.values()))


def _told(task: asyncio.Task[None], what: str, model: str, address: str) -> None:
    """Log what a task of ours failed with, which should not be."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error(what, model=model, address=address, exc_info=error)
