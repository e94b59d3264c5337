"""One model at work: performs what the lifecycle decides, and feeds it what happens.

The lifecycle (`lifecycle.step`) is the only writer of state; this shell owns the tasks: one load attempt, one
watcher of the ready process, one mirror, one stop. All are named and awaited by `close`.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Coroutine
from dataclasses import replace
from typing import Any, Final, TypeVar, assert_never

from proxy import logs
from proxy.backends import words
from proxy.backends.attempt import attempt
from proxy.backends.backoff import Backoff
from proxy.backends.bringup import Progress, Recipe, Running
from proxy.backends.client import DeadUpstream, EngineClient
from proxy.backends.lifecycle import (
    AdminSet,
    BecameReady,
    Effect,
    EngineLost,
    Event,
    Exited,
    Life,
    LoadAsked,
    LoadFailed,
    LoadRefused,
    Moved,
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
from proxy.backends.live import Live, end
from proxy.backends.logfeed import LogFollower
from proxy.backends.process import EngineProcess, StopReport, process_status
from proxy.backends.runrecord import RunRecord
from proxy.backends.views import FleetObserver, Kind, ModelStatus, Stage
from proxy.backends.voice import Voice
from proxy.clock import Clock
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.types import AdminState, BackendKey, Cause, EngineInfo, ModelState, Snapshot
from proxy.upstream import Upstream

_WAITS: Final = (Stage.WAKING, Stage.MEMORY)
_log = logs.get("backends")
_T = TypeVar("_T")


class ModelRunner:
    """Owner of one model's life. All methods belong to the event loop's thread."""

    def __init__(self, recipe: Recipe, *, metrics: Metrics, clock: Clock, observer: FleetObserver) -> None:
        self.name: Final = recipe.name
        self._recipe = recipe
        self._metrics = metrics
        for failures in (
            *(metrics.crashes, metrics.wedges, metrics.restarts, metrics.identity_mismatch),
            metrics.forced_cancels,
        ):
            failures.labels(recipe.name)  # from 0: a series that appears with its first event hides it
        self._clock = clock
        self._voice = Voice(recipe.name, metrics=metrics, observer=observer)
        self._life = Life()
        self._since = clock()
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._last_process: EngineProcess | None = None
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
        self._failure: ProxyError | None = None
        self._farewell: ProxyError | None = None
        self._left: RunRecord | None = None

    @property
    def kind(self) -> Kind:
        """How its backend comes to be."""
        return Kind.REMOTE if self._recipe.model.url is not None else Kind.PROCESS

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
        return _report(None if stopper is None or stopper.done() else stopper)

    async def save_slots(self) -> int:
        """Save what the ready backend's slots hold, where the model wants that and nothing runs; return the tokens."""
        live, cache = self._live, self._recipe.slots
        if live is None or cache is None or self.key != live.key or self.exchanges:
            return 0
        with live.sentinel.excused():
            return await cache.save(live.running.client, live.running.info)

    def refit(self, recipe: Recipe) -> None:
        """Take another configuration, for starts from now on; who follows the log goes on following it."""
        self._recipe = replace(recipe, feed=self._recipe.feed)
        self._grace_s = recipe.model.stop.grace_s

    def set_admin(self, admin: AdminState, reason: str) -> None:
        """Change the administrative axis."""
        self._post(AdminSet(admin, reason))

    async def close(self) -> None:
        """Await every task this model still owns (after `ask_stop`)."""
        for task in self._watchers:
            # a process that outlives its KILL is not waited for
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._recipe.feed.close()

    # -- read side --------------------------------------------------------------------------------------

    @property
    def key(self) -> BackendKey | None:
        """The ready generation's key, None when there is none."""
        return self._live.key if self._live and self._life.operational is ModelState.READY else None

    def upstream(self, key: BackendKey) -> Upstream:
        """Return the way to this generation; a dead end when it is not the present one."""
        if self._live is not None and self.key == key:
            return self._live.running.client
        return DeadUpstream(f"backend generation {key.generation} of model {self.name!r} is gone")

    def poke(self, key: BackendKey) -> None:
        """Poll `/slots` now; a stale key changes nothing."""
        if self._live is not None and self._live.key == key:
            self._live.mirror.poke()

    def poke_now(self) -> None:
        """Poll the ready backend's slots now, if there is one."""
        if self._live is not None:
            self._live.mirror.poke()

    def fresh_snapshot(self, age_s: float) -> Snapshot | None:
        """Return the newest snapshot unless it is older than this."""
        snapshot = self.snapshot()
        return snapshot if snapshot is not None and self._clock() - snapshot.asked_at <= age_s else None

    @property
    def token(self) -> str:
        """The token of the ready backend's run, empty without one."""
        run = self._live.running.run if self._live else None
        return run.token if run else ""

    def snapshot(self) -> Snapshot | None:
        """Return the newest snapshot of the ready generation."""
        return self._live.mirror.latest if self._live and self.key else None

    def log_tail(self, lines: int) -> list[str]:
        """Return the last lines of the present or last process."""
        process = self._newest_process
        return process.tail.lines(lines) if process else []

    def follow_log(self, lines: int) -> LogFollower:
        """Follow the output of this and later processes, beginning with the last lines."""
        process = self._newest_process
        first = process.tail.lines(lines) if process else []
        if process is not None and process.tail.unfinished:
            first = first[:-1]
        return self._recipe.feed.follow(first)

    @property
    def _newest_process(self) -> EngineProcess | None:
        return (self._progress.process if self._progress else None) or self._last_process

    @property
    def life(self) -> Life:
        """The model's place on both axes."""
        return self._life

    @property
    def fingerprint(self) -> str:
        """Tells whether the configuration that shapes the process is still the same."""
        return self._recipe.fingerprint

    @property
    def failure(self) -> ProxyError | None:
        """Why the last attempt or the last ready backend failed; None once one is ready again."""
        return self._failure

    @property
    def occupancy(self) -> tuple[ModelState, int | None, float, float | None]:
        """State, process id, time of the last state change, and since when it is idle (None: busy or not ready)."""
        status = self.status()
        return status.state, status.pid, status.since, self.idle_since

    @property
    def idle_since(self) -> float | None:
        """When the ready backend's last exchange ended (or it became ready); None while it is busy or not ready."""
        client = self._client
        if client is None or self.key is None or client.exchanges:
            return None
        return max(self._since, client.quiet_since)

    def status(self) -> ModelStatus:
        """Return the whole state at this instant."""
        running = self._live.running if self._live else None
        progress = self._progress
        process = running.process if running else progress.process if progress else None
        return ModelStatus(
            model=self.name,
            kind=self.kind,
            state=self._life.operational,
            admin=self._life.admin,
            reason=self._life.reason,
            cause=self._life.cause,
            generation=self._life.generation,
            since=self._since,
            stage=progress.stage if progress else None,
            waits_for=progress.waits_for if progress and progress.stage in _WAITS else "",
            pid=process.pid if process and process.code is None else None,
            port=running.port if running else progress.port if progress else None,
            info=running.info if running else None,
            identity=running.identity if running else "",
            exchanges=self.exchanges,
            last_error=self._failure.message if self._failure else "",
            strikes=self._life.strikes,
            retry_at=self._life.retry_at,
            restart=self._life.restart,
        )

    @property
    def _client(self) -> EngineClient | None:
        return self._live.running.client if self._live else None

    @property
    def exchanges(self) -> int:
        """Requests that are with the engine."""
        return self._client.exchanges if self._client else 0

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
                    self._learn(self._live.running)
                    self._live.sentinel.dismiss()
                    if effect.cause is not Cause.SHUTDOWN:
                        self._live.renounce()
                    self._voice.down(self._live.key, error)
                self._fail_job(error)
                self._stopper = self._task(self._stop(effect, error, self._stopper), "stop")
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
        began = self._clock()
        error: ProxyError | None = None
        running: Running | None = None
        try:
            if self._stopper is not None and not self._stopper.done():
                # what was lost is still being cleared away, and holds its memory
                await asyncio.wait((self._stopper,))
            running = await attempt(self._recipe, progress, self._left)
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
            self._arrived(generation, running)
        elif error is not None:
            self._failure = error
            if error.code is ErrorCode.IDENTITY_MISMATCH:
                self._metrics.identity_mismatch.labels(self.name).inc()
            self._post(LoadFailed(generation))
            self._fail_job(error)
        return None

    def _arrived(self, generation: int, running: Running) -> None:
        key = BackendKey(self.name, self.kind.value, generation)
        self._live = live = Live(
            key,
            running,
            self._recipe,
            metrics=self._metrics,
            clock=self._clock,
            on_snapshot=self._voice.snapshot,
            lost=self._told_lost,
        )
        self._failure = None
        self._post(BecameReady(generation))
        self._voice.ready(key, running.info)
        live.mirror.start()
        if running.process is not None:
            watcher = self._task(live.sentinel.watch_exit(), "watch")
            self._watchers.add(watcher)
            watcher.add_done_callback(self._watchers.discard)
        if self._job is not None and not self._job.done():
            self._job.set_result(running.info)

    def _learn(self, running: Running) -> None:
        if self._recipe.room is not None and running.process is not None:
            self._recipe.room.learn(self.name, running.process.pid)

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
        self._voice.down(live.key, error)
        self._stopper = self._task(live.clear(error), "clear")

    async def _stop(
        self, effect: StopEngine, error: ProxyError, before: "asyncio.Task[StopReport | None] | None"
    ) -> StopReport | None:
        """Close sockets first: llama-server does not end while a client stays connected to it.

        `before` clears away an earlier generation; its process counts as this model's, too.
        """
        live, trying, progress = self._live, self._attempt, self._progress
        report: StopReport | None = None
        try:
            if live is not None and effect.was_ready:
                report = await self._put_down(live, error, effect.cause)
            elif trying is not None:
                report = await self._give_up(trying, progress, error)
                if effect.cause is not Cause.SHUTDOWN:
                    report = await self._not_left(report)
        except Exception:
            # whatever it was: a model that stays in `stopping` could never be loaded or unloaded again
            process = live.running.process if live is not None else progress.process if progress else None
            report = StopReport(None, (), (process.pid,) if process and process.code is None else ())
            _log.exception("a stop failed", model=self.name, left=report.left)
        self._live = None
        if before is not None and not before.done():
            await asyncio.wait((before,))
        if report is not None and report.left:
            left = {pid: process_status(pid) for pid in report.left}
            _log.error("processes survived a kill", model=self.name, left=left)
        self._post(Stopped(effect.generation))
        if self._life.operational is ModelState.UNLOADED and self._job is not None and not self._job.done():
            self._fail_job(error)
        return report

    async def _put_down(self, live: Live, error: ProxyError, cause: Cause) -> StopReport | None:
        """End a backend that served, or let go of one that is kept."""
        try:
            await live.let_go(error)
        except Exception:
            # it is the process that matters
            _log.exception("connections were not closed", model=self.name)
        if cause is Cause.SHUTDOWN and live.kept:
            await live.detach()
            return None
        return await end(self._recipe, live.running, self._grace_s)

    async def _give_up(
        self, trying: "asyncio.Task[Running | None]", progress: Progress | None, error: ProxyError
    ) -> StopReport | None:
        """End an attempt to load, and whatever it had started."""
        trying.cancel()
        await asyncio.wait((trying,))
        late = None if trying.cancelled() or trying.exception() else trying.result()
        if late is not None:
            await late.client.close(error.message)
            return await end(self._recipe, late, 0)
        if progress is not None and progress.process is not None:
            return await progress.process.kill()
        return None

    async def _not_left(self, report: StopReport | None) -> StopReport | None:
        """End what an earlier proxy had left running and this one had not taken over yet."""
        record, self._left = self._left, None
        if record is None or record not in self._recipe.runs.known(self.name):
            return report
        return StopReport(None, (), await self._recipe.runs.reap(record, [record.pid]))

    def _fail_job(self, error: ProxyError) -> None:
        """Tell everyone who waits for a load, if there is one."""
        job = self._job
        if job is None or job.done():
            return
        job.set_exception(error)
        self._voice.load_failed(error)

    def _task(self, work: Coroutine[Any, Any, _T], what: str) -> asyncio.Task[_T]:
        task = asyncio.create_task(work, name=f"{what}:{self.name}:{self._life.generation}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task failed", task=task.get_name(), exc_info=error)


async def _report(stopper: "asyncio.Task[StopReport | None] | None") -> StopReport:
    """Wait for the end of a stop, whoever else waits for it as well."""
    report = None if stopper is None else await asyncio.shield(stopper)
    return report or StopReport(None, ())
