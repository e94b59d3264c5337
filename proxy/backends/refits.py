"""Changes the models of a running fleet: takes new ones in, gives others another configuration, lets some go."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, Protocol

from proxy import logs
from proxy.backends.bringup import Recipe
from proxy.backends.desk import Desk
from proxy.backends.gatekeeper import Gatekeeper
from proxy.backends.gates import GateMode
from proxy.backends.jobs import Job
from proxy.backends.logfeed import REMOVED
from proxy.backends.runner import ModelRunner
from proxy.backends.slotcache import SlotCache
from proxy.backends.views import Then
from proxy.metrics import Metrics
from proxy.settings import Model
from proxy.types import NOBODY, Audit, Cause, ModelState

LOOK_S: Final = 60.0
SETTLE_S: Final = 10.0
"""How long requests of a removed model may take to write their last words."""
_NOTHING_TO_DRAIN: Final = (ModelState.UNLOADED, ModelState.FAILED, ModelState.STOPPING)
_log = logs.get("backends")


class Unload(Protocol):
    """Begins an unload that lets running requests finish."""

    def __call__(
        self, model: str, *, then: Then, reason: str, mode: GateMode, audit: Audit, cause: Cause
    ) -> Job: ...


class Refits:
    """The only writer of the fleet's models, runners and idle times once it runs."""

    def __init__(
        self,
        models: dict[str, Model],
        runners: dict[str, ModelRunner],
        ttl_s: dict[str, float],
        *,
        gates: Gatekeeper,
        desk: Desk,
        make: Callable[[str, Model], ModelRunner],
        recipe: Callable[[str, Model], Recipe],
        load: Callable[[str], None],
        unload: Unload,
        settled: Callable[[str, float], Awaitable[bool]],
        metrics: Metrics,
    ) -> None:
        self._models, self._runners, self._ttl_s = models, runners, ttl_s
        self._gates = gates
        self._desk = desk
        self._make = make
        self._recipe = recipe
        self._load = load
        self._unload = unload
        self._settled = settled
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()
        self._down: set[str] = set()
        """Models that somebody else wants to be unloaded, as far as is known since their last change."""

    @property
    def busy(self) -> bool:
        """Whether a model still drains for a change."""
        return bool(self._tasks)

    async def close(self) -> None:
        """Give up what has not come to its end: everything is being stopped."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def add(self, name: str, model: Model) -> None:
        """Take in a model that the catalog knows already."""
        self._models[name] = model
        self._gates.add(name)
        self._runners[name] = self._make(name, model)
        self._set_ttl(name, model.ttl_s)
        _log.info("model added", model=name)
        if model.preload:
            self._load(name)

    def change(self, name: str, model: Model, *, restart: bool, audit: Audit = NOBODY) -> Job | None:
        """Take a model's other configuration. `restart`: one that is loaded drains (the job) and is loaded again."""
        runner = self._runners[name]
        self._models[name] = model
        self._set_ttl(name, model.ttl_s)
        recipe = self._recipe(name, model)
        stale = runner.refit(recipe, shaped=restart)
        _log.info("model changed", model=name, restart=restart)
        if not restart or runner.life.operational in _NOTHING_TO_DRAIN:
            if stale is not None:
                self._task(_drop(stale, recipe), name)
            return None
        reason = "its configuration changed"
        job = self._unload(name, then=Then.OPEN, reason=reason, mode="hold", audit=audit, cause=Cause.RELOAD)
        self.wish(name, loaded=job.cause is Cause.RELOAD)
        self._task(self._load_again(name, job, stale, recipe), name)
        return job

    def wish(self, name: str, *, loaded: bool) -> None:
        """Note what others want of a model: one that they wanted down is not loaded again for its change."""
        (self._down.discard if loaded else self._down.add)(name)

    def retire(self, name: str, gone: Callable[[str], None], audit: Audit = NOBODY) -> Job:
        """Let a model go for good: it drains (the job), refuses newcomers meanwhile, and is forgotten.

        `gone` is told when no request may come any more; its metrics end after that.
        """
        reason, runner = "it was removed from the configuration", self._runners[name]
        nothing_kept = replace(self._recipe(name, self._models[name]), slots=None)
        stale = runner.refit(nothing_kept, shaped=False)
        job = self._unload(
            name, then=Then.BLOCK, reason=reason, mode="reject", audit=audit, cause=Cause.RELOAD
        )
        self._task(self._forget(name, job, gone, stale), name)
        return job

    async def _load_again(self, name: str, job: Job, stale: SlotCache | None, recipe: Recipe) -> None:
        await self._ended(job)
        # not before: an unload that was under way may have been saving
        await _drop(stale, recipe)
        if name not in self._down:
            self._load(name)

    async def _forget(
        self, name: str, job: Job, gone: Callable[[str], None], stale: SlotCache | None
    ) -> None:
        await self._ended(job)
        runner = self._runners[name]
        await runner.ask_stop(Cause.RELOAD, 0)
        await runner.close(REMOVED)
        gone(name)
        del self._runners[name]
        del self._models[name]
        self._down.discard(name)
        self._set_ttl(name, None)
        self._gates.forget(name)
        await self._gates.save()
        if stale is not None:
            await stale.abandon()
        if not await self._settled(name, SETTLE_S):
            _log.warning("requests of a removed model have not ended", model=name, waited_s=SETTLE_S)
        # not before: who ends is counted
        self._metrics.forget_model(name)
        _log.info("model removed", model=name)

    async def _ended(self, job: Job) -> None:
        """Wait until a job is over; it has a deadline of its own."""
        while (now := self._desk.get(job.id)) is not None and not now.ended:
            await self._desk.wait(job.id, LOOK_S)

    def _set_ttl(self, name: str, ttl_s: float | None) -> None:
        self._ttl_s.pop(name, None)
        if ttl_s is not None:
            self._ttl_s[name] = ttl_s

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"refit:{name}")
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a change of models failed", task=task.get_name(), exc_info=error)


async def _drop(stale: SlotCache | None, recipe: Recipe) -> None:
    """Remove saved slots that are of no use to the next start."""
    if stale is not None:
        await (stale.abandon() if recipe.slots is None else stale.discard())
