"""One model at work: performs what the lifecycle decides, and feeds it what happens.

The lifecycle (`lifecycle.step`) is the only writer of state; this shell owns the tasks: one load attempt, one
watcher of the ready process, one mirror, one stop. All are named and awaited by `close`.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar, assert_never

from proxy import logs
from proxy.backends import ending, words
from proxy.backends.attempt import attempt
from proxy.backends.backoff import Backoff
from proxy.backends.bringup import Progress, Recipe, Running
from proxy.backends.ending import Remains
from proxy.backends.lifecycle import (
    AdminSet,
    BecameReady,
    Effect,
    EngineLost,
    Event,
    Exited,
    LoadAsked,
    LoadFailed,
    LoadRefused,
    Moved,
    Reshaped,
    RetryDue,
    RetryPlanned,
    Started,
    StartEngine,
    StopAsked,
    StopEngine,
    Stopped,
    TooSoon,
    step,
)
from proxy.backends.live import Live
from proxy.backends.logfeed import STOPPING
from proxy.backends.process import StopReport, process_status
from proxy.backends.replicas import Replicas
from proxy.backends.runrecord import RunRecord
from proxy.backends.serving import Serving
from proxy.backends.sight import Sight, kind_of
from proxy.backends.slotcache import SlotCache
from proxy.backends.views import FleetObserver
from proxy.backends.voice import Voice
from proxy.clock import Clock
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.types import AdminState, BackendKey, Cause, EngineInfo, ModelState

_log = logs.get("backends")
_T = TypeVar("_T")


class ModelRunner(Sight):
    """Owner of one model's life. All methods belong to the event loop's thread."""

    def __init__(self, recipe: Recipe, *, metrics: Metrics, clock: Clock, observer: FleetObserver) -> None:
        super().__init__(recipe, clock)
        self._metrics = metrics
        for failures in (
            *(metrics.crashes, metrics.wedges, metrics.restarts, metrics.identity_mismatch),
            metrics.forced_cancels,
        ):
            failures.labels(recipe.name)  # from 0: a series that appears with its first event hides it
        self._voice = Voice(recipe.name, metrics=metrics, observer=observer)
        self._job: asyncio.Future[EngineInfo] | None = None
        self._attempt: asyncio.Task[Running | None] | None = None
        self._stopper: asyncio.Task[StopReport | None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watchers: set[asyncio.Task[None]] = set()
        self._grace_s = recipe.model.stop.grace_s
        self._events: deque[Event] = deque()
        self._stepping = False
        self._changed = asyncio.Event()
        self._loss: ProxyError | None = None
        self._farewell: ProxyError | None = None
        self._left: RunRecord | None = None
        self._shape = 0
        """How often what shapes the process was changed."""
        self._numbers = count(1)
        """Generations of engines behind a name: each that joins gets the next."""

    @property
    def _backoff(self) -> Backoff:
        restart = self._recipe.model.restart
        return Backoff(restart.first_s, restart.max_s, restart.stable_s)

    # -- asked from outside -----------------------------------------------------------------------------

    def ask(self, cause: Cause) -> "asyncio.Future[EngineInfo]":
        """Make sure a load is under way; the future is everyone's (await it shielded)."""
        if self._job is None or self._job.done():
            self._job = asyncio.get_running_loop().create_future()
            # a load that nobody awaits may fail: the observer is told anyway
            self._job.add_done_callback(lambda job: job.cancelled() or job.exception())
        job = self._job
        self._post(LoadAsked(cause))
        if self._live is not None and self._life.operational is ModelState.READY and not job.done():
            job.set_result(self._live.running.info)
        return job

    def adopt(self, record: RunRecord) -> "asyncio.Future[EngineInfo]":
        """Take over the process that an earlier proxy left running; one that is no good is replaced."""
        self._left = record
        return self.ask(Cause.OPERATOR)

    def ask_stop(
        self, cause: Cause, grace_s: float, error: ProxyError | None = None
    ) -> Awaitable[StopReport]:
        """Stop whatever runs: the generation is bumped before this returns. Await the result for the end of it.

        `error` is for everybody who has a request there or waits for the load. A stop under way is joined, and
        hurried to `grace_s`.
        """
        self._grace_s, self._farewell = grace_s, error
        self._post(StopAsked(cause))
        self._farewell = None
        if self._life.operational is ModelState.UNLOADED:
            # a restart was planned, and with it goes what waited for it
            self._fail_job(error or words.gone(self.name, cause))
        if self._live is not None and self._live.running.process is not None:
            self._live.running.process.hurry(grace_s)
        stopper = self._stopper
        return ending.reported(None if stopper is None or stopper.done() else stopper)

    @property
    def clearing(self) -> bool:
        """Whether what was there is still being ended: its processes are nobody's stray."""
        return self._stopper is not None and not self._stopper.done()

    async def save_slots(self) -> int:
        """Save what the ready backend's slots hold, where the model wants that and nothing runs; return the tokens."""
        live = self._live
        cache = live.recipe.slots if live is not None else None
        if live is None or cache is None or self.key != live.key or self.exchanges:
            return 0
        if self._recipe.slots is None or self._recipe.fingerprint != live.recipe.fingerprint:
            # the next start could not use them
            return 0
        with live.excused():
            run = live.running.run
            return await cache.save(live.running.client, live.running.info, run.files if run else "")

    def refit(self, recipe: Recipe, *, shaped: bool) -> SlotCache | None:
        """Take another configuration; who follows the log goes on following it.

        `shaped`: it differs in what shapes the process or the way to it. It is one for starts from now on then, and
        what serves keeps the one that it was started from. Returns what was kept for the next start and is of no use
        to it now.
        """
        before, self._recipe = self._recipe, replace(recipe, feed=self._recipe.feed)
        self._grace_s = recipe.model.stop.grace_s
        if shaped:
            self._shape += 1
            self._post(Reshaped())
        elif self._live is not None and self._live.recipe is before:
            self._live.refit(self._recipe)
        useful = recipe.slots is not None and recipe.fingerprint == before.fingerprint
        return None if useful else before.slots

    def set_admin(self, admin: AdminState, reason: str) -> None:
        """Change the administrative axis."""
        self._post(AdminSet(admin, reason))

    async def close(self, why: str = STOPPING) -> None:
        """Await every task this model still owns (after `ask_stop`); who follows its log is told why it ends."""
        while self._tasks:
            for task in self._watchers:
                # a process that outlives its KILL is not waited for
                task.cancel()
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._recipe.feed.close(why)

    # -- the machine ------------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        """Take an event; one that comes while effects are performed waits for its turn."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._events:
                self._life, effects = step(self._life, self._events.popleft(), self._clock(), self._backoff)
                for effect in effects:
                    self._perform(effect)
        finally:
            self._stepping = False
            self._changed.set()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Moved():
                self._since = self._clock()
                self._voice.moved(effect, self._life.generation)
            case StartEngine():
                if effect.cause in (Cause.CRASH, Cause.WEDGE):
                    self._metrics.restarts.labels(self.name).inc()
                self._progress = Progress(
                    on_started=lambda: self._post(Started(effect.generation)),
                    asked=effect.cause not in (Cause.CRASH, Cause.WEDGE),
                )
                self._attempt = self._task(self._load(effect.generation, self._progress), "load")
            case StopEngine():
                error = self._farewell or words.gone(self.name, effect.cause)
                if self._live is not None and effect.was_ready:
                    self._learn(self._live)
                    self._live.dismiss()
                    if effect.cause is not Cause.SHUTDOWN:
                        self._live.renounce()
                    self._live.farewell(error)
                self._fail_job(error)
                before = self._stopper
                if before is not None and before.done():
                    before = None
                self._stopper = self._task(self._stop(effect, error, before), "stop")
            case EngineLost():
                self._lost()
            case LoadRefused():
                self._fail_job(words.refused(self.name, effect))
            case RetryPlanned():
                self._task(self._retry(effect), "retry")
            case TooSoon():
                left_s = max(0.0, effect.retry_at - self._clock())
                self._fail_job(words.too_soon(self.name, self._failure, self._life.strikes, left_s))
            case _:
                assert_never(effect)

    async def _retry(self, planned: RetryPlanned) -> None:
        """Wait for the time of a restart, and for the lost process to be gone; given up when the plan is."""
        stopper = self._stopper
        if stopper is not None:
            await asyncio.wait((stopper,))
        while self._life.restart and self._life.generation == planned.generation:
            left = planned.at - self._clock()
            if left <= 0:
                self._post(RetryDue(planned.generation))
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    async def _load(self, generation: int, progress: Progress) -> Running | None:
        """Get a backend ready. Returns it when it came too late: a stop is waiting to clear it away."""
        began, recipe, shape = self._clock(), self._recipe, self._shape
        error: ProxyError | None = None
        running: Running | None = None
        try:
            if self._stopper is not None and not self._stopper.done():
                # what was lost is still being cleared away, and holds its memory
                await asyncio.wait((self._stopper,))
            running = await attempt(recipe, progress, self._left)
            self._left = None
        except ProxyError as failed:
            error, self._left = failed, None
        finally:
            self._last_process = progress.process or self._last_process
            self._progress = None
        if generation != self._life.generation:
            return running
        outcome = "failed" if error else "ready"
        self._metrics.load_seconds.labels(self.name, outcome).observe(self._clock() - began)
        if running is not None:
            # what shapes nothing may have changed meanwhile, and holds
            self._arrived(generation, running, self._recipe if shape == self._shape else recipe)
        elif error is not None:
            self._failure = error
            if error.code is ErrorCode.IDENTITY_MISMATCH:
                self._metrics.identity_mismatch.labels(self.name).inc()
            self._post(LoadFailed(generation))
            self._fail_job(error)
        return None

    def _arrived(self, generation: int, running: Running, recipe: Recipe) -> None:
        key = BackendKey(self.name, kind_of(recipe.model).value, generation)
        live: Serving
        if recipe.model.dns is None:
            live = Live(
                key,
                running,
                recipe,
                metrics=self._metrics,
                clock=self._clock,
                voice=self._voice,
                lost=self._told_lost,
            )
        else:
            live = Replicas(
                key,
                running,
                recipe,
                metrics=self._metrics,
                clock=self._clock,
                voice=self._voice,
                lost=self._told_lost,
                numbers=self._numbers,
            )
        self._live = live
        self._failure = None
        self._post(BecameReady(generation))
        live.begin()
        if running.process is not None:
            self._watch(live.watch_exit(), "watch")
        if self._job is not None and not self._job.done():
            self._job.set_result(running.info)

    def _learn(self, live: Serving) -> None:
        room, process = live.recipe.room, live.running.process
        if room is not None and process is not None:
            room.learn(live.recipe.model, process.pid)

    def _told_lost(self, key: BackendKey, cause: Cause, error: ProxyError) -> None:
        if self.key == key:
            self._loss = error
            self._post(Exited(key.generation, cause))

    def _lost(self) -> None:
        """The ready backend ended by itself: tell at once, then clear away."""
        live, self._live = self._live, None
        if live is None:
            return
        error, self._loss = self._loss or ProxyError(ErrorCode.UPSTREAM_ERROR, "the engine ended"), None
        self._failure = error
        live.renounce()
        live.farewell(error)
        self._stopper = self._task(self._clear(live, error), "clear")

    async def _clear(self, live: Serving, error: ProxyError) -> StopReport | None:
        report = await live.clear(error)
        self._name_left(report)
        self._outlast(() if report is None else report.left)
        return report

    def _outlast(self, left: tuple[int, ...]) -> None:
        """Nothing runs any more but what outlived its KILL: see to it that its record goes with it.

        A load that was given up while it ended by itself leaves its record to this, too.
        """
        records = self._recipe.runs.known(self.name)
        if records:
            self._watch(self._recipe.runs.outlast(records, left), "leftovers")

    async def _stop(
        self, effect: StopEngine, error: ProxyError, before: "asyncio.Task[StopReport | None] | None"
    ) -> StopReport | None:
        """End what is there. `before` still clears an earlier generation away; its process counts as this model's, too."""
        left, self._left = (None, self._left) if effect.cause is Cause.SHUTDOWN else (self._left, None)
        there = Remains(self._live if effect.was_ready else None, self._attempt, self._progress, left)
        report = await ending.end_all(
            self._recipe, there, error, grace_s=lambda: self._grace_s, shutdown=effect.cause is Cause.SHUTDOWN
        )
        self._live = None
        self._name_left(report)
        if before is not None:
            await asyncio.wait((before,))
            report = ending.both(report, before)
        if effect.cause is not Cause.SHUTDOWN:
            self._outlast(() if report is None else report.left)
        self._post(Stopped(effect.generation))
        if self._life.operational is ModelState.UNLOADED and self._job is not None and not self._job.done():
            self._fail_job(error)
        return report

    def _name_left(self, report: StopReport | None) -> None:
        if report is not None and report.left:
            pids = {pid: process_status(pid) for pid in report.left}
            _log.error("processes survived a kill", model=self.name, left=pids)

    def _fail_job(self, error: ProxyError) -> None:
        """Tell everyone who waits for a load, if there is one."""
        job = self._job
        if job is None or job.done():
            return
        job.set_exception(error)
        self._voice.load_failed(error)

    def _watch(self, work: Coroutine[Any, Any, None], what: str) -> None:
        watcher = self._task(work, what)
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    def _task(self, work: Coroutine[Any, Any, _T], what: str) -> asyncio.Task[_T]:
        task = asyncio.create_task(work, name=f"{what}:{self.name}:{self._life.generation}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task failed", task=task.get_name(), exc_info=error)
