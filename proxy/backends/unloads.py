"""Unload and force-unload: how a model's requests and its process end, in which order.

An unload lets running requests finish until a deadline and names those that were cut at it. `force` is bounded by
the model's grace + 2 s whatever the engine does:

1. in one synchronous step: the model drains (no grant, no load) and its generation is bumped, so that everything
   which names the old one is stale; 2. waiting requests end; 3. running ones are told why, and only then their
sockets are closed; 4. TERM, TERM, KILL; 5. the process and its children are verified to be gone; 6. the books are
looked at again, and the answer is given.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final

from proxy import logs
from proxy.backends.desk import Desk
from proxy.backends.gatekeeper import Gatekeeper, blocked, opened
from proxy.backends.gates import Gate, GateMode
from proxy.backends.jobs import Job, JobKind, JobState, Progress
from proxy.backends.ports import Requests
from proxy.backends.process import StopReport
from proxy.backends.runner import ModelRunner
from proxy.backends.views import Then, UnloadReport
from proxy.clock import Clock
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.settings import Model
from proxy.types import AdminState, Audit, Cause, ModelState

LOOK_S: Final = 0.05
FORCE_MARGIN_S: Final = 1.9
"""What a force-unload may take beyond its grace before it answers with what is left."""
FORCE_S: Final = 2.0
"""What it may take beyond its grace altogether: what is left is for writing down a gate that it changed."""
CLOSE_S: Final = 1.0
"""What a force-unload may take to answer after the fleet has stopped everything."""
SETTLE_S: Final = 0.1
"""The least time given to requests that were told to end before the books are looked at."""

_log = logs.get("backends")


@dataclass(slots=True)
class _Wish:
    """What those who asked for one unload want of it: the soonest deadline, and the newest gate to leave behind.

    `began` is when the first of them asked, `forces` how often the model had been forced before it.
    """

    began: float
    until: float
    after: Gate | None
    forces: int


@dataclass(slots=True)
class _Cut:
    """One force-unload: the gate that it found, and whether somebody wants the model to stay down.

    `stuck` are the requests that its order to end left in the books: whoever has their name later is another one.
    """

    found: Gate
    stuck: frozenset[str] = frozenset()
    block: bool = False


class Unloads:
    """Ends models. One per fleet; jobs are single-flight per model and kind."""

    def __init__(
        self,
        *,
        runner: Callable[[str], ModelRunner],
        model: Callable[[str], Model],
        gates: Gatekeeper,
        requests: Requests,
        desk: Desk,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._model = model
        self._gates = gates
        self._requests = requests
        self._desk = desk
        self._metrics = metrics
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._wishes: dict[str, _Wish] = {}
        self._cuts: dict[str, _Cut] = {}
        self._forces: Counter[str] = Counter()

    async def close(self) -> None:
        """End the jobs under way: the models are stopped by somebody else. A force-unload may still answer."""
        tasks = dict(self._tasks)
        for job_id, task in tasks.items():
            job = self._desk.get(job_id)
            if job is None or job.kind is not JobKind.FORCE:
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks.values(), timeout=CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    # -- drain and unload -------------------------------------------------------------------------------

    def begin(
        self,
        model: str,
        *,
        deadline_s: float | None,
        cause: Cause,
        audit: Audit,
        then: Then,
        reason: str,
        mode: GateMode,
    ) -> Job:
        """Start an unload as a job, or join the one under way.

        `deadline_s` None is the model's `stop.drain_s`; an operator who joins without one has no wish of his own.
        Whoever joins can make it end sooner and leave the gate blocked, not the opposite.
        """
        now, drain_s = self._clock(), self._model(model).stop.drain_s
        job, new = self._desk.open(JobKind.UNLOAD, model, cause, audit)
        after = blocked(reason or "unloaded", mode, audit) if then is Then.BLOCK else None
        if new:
            until = now + (drain_s if deadline_s is None else deadline_s)
            self._wishes[job.id] = wish = _Wish(now, until, after, self._forces[model])
            draining = contextlib.ExitStack()
            gate = Gate(AdminState.DRAINING, reason or "unloading", mode, audit)
            try:
                # at once: a request that slipped in between would be cut at the deadline of an idle model's unload
                draining.enter_context(self._gates.draining(model, gate))
            except Exception as error:
                self._unbegun(job, error)
                raise
            self._task(job, self._unload_job(job, wish, draining, reason))
            return job
        wish = self._wishes[job.id]
        if deadline_s is None and cause is not Cause.OPERATOR:
            # another model's load or a reload hangs on it: one operator's patience is not theirs
            deadline_s = drain_s
        if deadline_s is not None:
            wish.until = min(wish.until, now + deadline_s)
        wish.after = after or wish.after
        return job

    async def _unload_job(self, job: Job, wish: _Wish, draining: contextlib.ExitStack, reason: str) -> None:
        model = job.model
        try:
            with draining:
                cut = await self._drained(model, lambda: wish.until, job)
                if not cut:
                    self._desk.advance(job.id, Progress("saving", requests_left=0))
                    await self._saved(model)
                self._desk.advance(job.id, Progress("stopping", requests_left=0))
                report = await self._stopped(model, job.cause, reason)
                self._took(report, wish.began)
                if wish.after is not None:
                    self._gates.set(model, wish.after)
            problem = await self._left_blocked(model, wish)
        except asyncio.CancelledError:
            self._desk.close(job.id, JobState.CANCELLED, error="the proxy is shutting down")
            raise
        except Exception as error:
            _log.exception("job failed", job=job.id, model=model)
            self._desk.close(job.id, JobState.FAILED, error=f"{error}", code=ErrorCode.INTERNAL_ERROR.value)
            return
        result = _result(report, problem)
        if report.left:
            words = f"processes {', '.join(map(str, report.left))} outlived a KILL"
            self._desk.close(job.id, JobState.FAILED, error=words, cut=cut, result=result)
        elif self._forces[model] != wish.forces:
            # it may be over by now
            words = "a force-unload took its place"
            self._desk.close(job.id, JobState.CANCELLED, error=words, cut=cut, result=result)
        else:
            self._desk.close(job.id, JobState.DONE, cut=cut, result=result)

    async def _saved(self, model: str) -> None:
        try:
            await self._runner(model).save_slots()
        except Exception:
            # it is a cache: without it a prompt is read again, and the model goes all the same
            _log.exception("slots were not saved", model=model)

    async def _left_blocked(self, model: str, wish: _Wish) -> str:
        """Make the gate that is to be left last; also one that is wished for meanwhile."""
        problem = ""
        while (after := wish.after) is not None:
            wish.after = None
            if self._gates.gate(model) is not after:
                self._gates.set(model, after)
            problem = await self._gates.save()
        return problem

    async def unload(self, model: str, *, deadline_s: float, force: bool, cause: Cause) -> UnloadReport:
        """Stop a model without a job; see `Fleet.unload`."""
        runner, began = self._runner(model), self._clock()
        before = runner.life.operational
        if force:
            cut = runner.exchanges
            report = await self._stopped(model, cause, "")
        else:
            with self._gates.draining(model, Gate(AdminState.DRAINING, "unloading")):
                until = began + deadline_s
                await self._drained(model, lambda: until, None)
                cut = runner.exchanges
                report = await self._stopped(model, cause, "")
        report = UnloadReport(
            model, before, force, cut=cut, code=report.code, signals=report.signals, left=report.left
        )
        return replace(report, seconds=self._took(report, began))

    def _took(self, report: UnloadReport, began: float) -> float:
        """Count how long an unload took, if there was something to unload, and return it."""
        seconds = self._clock() - began
        if report.before not in (ModelState.UNLOADED, ModelState.FAILED):
            self._metrics.unload_seconds.labels(report.model, str(report.forced).lower()).observe(seconds)
        return seconds

    async def _drained(self, model: str, until: Callable[[], float], job: Job | None) -> tuple[str, ...]:
        """Wait until nothing runs; at the deadline, which may be brought forward, return who still does."""
        while True:
            running = self._requests.live(model).running
            left = max(len(running), self._runner(model).exchanges)
            if job is not None:
                self._desk.advance(job.id, Progress("draining", requests_left=left))
            if left == 0:
                return ()
            rest = until() - self._clock()
            if rest <= 0:
                return running
            await asyncio.sleep(min(LOOK_S, rest))

    async def _stopped(self, model: str, cause: Cause, reason: str) -> UnloadReport:
        """Stop the process now and wait until it is gone."""
        runner = self._runner(model)
        before = runner.life.operational
        grace_s = self._model(model).stop.grace_s
        report = await runner.ask_stop(cause, grace_s, _unloaded(model, cause, reason))
        return UnloadReport(
            model, before, forced=False, code=report.code, signals=report.signals, left=report.left
        )

    # -- force ------------------------------------------------------------------------------------------

    async def force(
        self, model: str, *, then: Then, reason: str, mode: GateMode, audit: Audit
    ) -> UnloadReport:
        """End everything of a model now; answers within its grace + 2 s. Twice at once is one, `block` wins."""
        until = self._clock() + self._model(model).stop.grace_s + FORCE_S
        job, new = self._desk.open(JobKind.FORCE, model, Cause.FORCE, audit)
        if new:
            self._cuts[job.id] = _Cut(self._gates.gate(model))
            try:
                # up to its first await this is one step, in which the generation is bumped: not a task yet
                work = self._cut(job, reason)
            except Exception as error:
                self._unbegun(job, error)
                raise
            self._task(job, work)
        if then is Then.BLOCK:
            # after the cut: a gate that rejects would refuse those who are to be told of the unload
            self._cuts[job.id].block = True
            self._gates.set(model, blocked(reason, mode, audit))
            self._gates.save_soon()
        task: asyncio.Task[UnloadReport] = self._tasks[job.id]
        found = self._cuts[job.id].found
        await asyncio.wait({task})
        if task.cancelled():
            raise ProxyError(ErrorCode.SHUTTING_DOWN, "the proxy is shutting down")
        if self._gates.gate(model) is found:
            # nothing to write: a disk that hangs is no reason to wait
            return task.result()
        return replace(task.result(), problem=await self._gates.save(max(0.0, until - self._clock())))

    def _cut(self, job: Job, reason: str) -> Coroutine[Any, Any, UnloadReport]:
        """Steps 1 and 2, and the first half of 3; the rest is returned."""
        model, began = job.model, self._clock()
        self._forces[model] += 1
        runner, live = self._runner(model), self._requests.live(model)
        status, exchanges = runner.status(), runner.exchanges
        error = _unloaded(model, Cause.FORCE, reason)
        gate = Gate(AdminState.DRAINING, reason or "unloading", "hold", job.audit)
        with contextlib.ExitStack() as undone:
            undone.enter_context(self._gates.draining(model, gate))
            grace_s = self._model(model).stop.grace_s
            stopping = asyncio.ensure_future(runner.ask_stop(Cause.FORCE, grace_s, error))
            self._requests.end(model, error)
            left = self._requests.live(model)
            self._cuts[job.id].stuck = frozenset((*left.waiting, *left.running))
            draining = undone.pop_all()
        self._metrics.forced_cancels.labels(model).inc(len(live.waiting) + len(live.running))
        report = UnloadReport(
            model,
            status.state,
            forced=True,
            cut=exchanges,
            queued=len(live.waiting),
            running=max(exchanges, len(live.running)),
            names=live.running + live.waiting,
            job=job.id,
        )
        return self._rest(job, report, status.pid, stopping, draining, began)

    async def _rest(
        self,
        job: Job,
        report: UnloadReport,
        pid: int | None,
        stopping: asyncio.Future[StopReport],
        draining: contextlib.ExitStack,
        began: float,
    ) -> UnloadReport:
        """From the closing of sockets on."""
        model, until = job.model, began + self._model(job.model).stop.grace_s + FORCE_MARGIN_S
        with draining:
            self._desk.advance(job.id, Progress("stopping"))
            await asyncio.wait({stopping}, timeout=until - self._clock())
            done = (
                stopping.result() if stopping.done() else StopReport(None, (), () if pid is None else (pid,))
            )
            await self._requests.settled(model, max(SETTLE_S, until - self._clock()))
            live = self._requests.live(model)
            cut, gate = self._cuts[job.id], self._gates.gate(model)
            unsettled = cut.stuck.intersection((*live.running, *live.waiting))
            if not cut.block and gate is cut.found and not gate.open:
                # a gate that was set since then is a later wish than ours
                self._gates.set(model, opened(job.audit))
                self._gates.save_soon()
        report = replace(
            report,
            code=done.code,
            signals=done.signals,
            left=done.left,
            seconds=self._took(report, began),
            unsettled=tuple(sorted(unsettled)),
        )
        self._end_force(job, report)
        return report

    def _end_force(self, job: Job, report: UnloadReport) -> None:
        words = ""
        if report.left:
            words = f"processes {', '.join(map(str, report.left))} outlived a KILL"
        elif report.unsettled:
            words = f"{len(report.unsettled)} requests did not end"
        state = JobState.FAILED if words else JobState.DONE
        result = _result(report, "") | {"queued": report.queued, "running": report.running}
        self._desk.close(job.id, state, error=words, cut=report.names, result=result)

    # -- tasks ------------------------------------------------------------------------------------------

    def _unbegun(self, job: Job, error: Exception) -> None:
        """End a job that failed before it had a task: the next one may begin."""
        self._wishes.pop(job.id, None)
        self._cuts.pop(job.id, None)
        words, code = f"{type(error).__name__}: {error}", ErrorCode.INTERNAL_ERROR.value
        self._desk.close(job.id, JobState.FAILED, error=words, code=code)

    def _task(self, job: Job, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work, name=f"{job.kind.value}:{job.model}")
        self._tasks[job.id] = task

        def ended(done: asyncio.Task[Any]) -> None:
            self._tasks.pop(job.id, None)
            self._wishes.pop(job.id, None)
            self._cuts.pop(job.id, None)
            error = None if done.cancelled() else done.exception()
            if error is not None:
                _log.error("a job failed", job=job.id, exc_info=error)
            words = str(error or "the proxy is shutting down")
            state = JobState.FAILED if error else JobState.CANCELLED
            self._desk.close(job.id, state, error=words)

        task.add_done_callback(ended)


def _unloaded(model: str, cause: Cause, reason: str) -> ProxyError:
    """Return the error of those who had a request there."""
    by = "by an operator" if cause in (Cause.FORCE, Cause.OPERATOR) else f"({cause.value})"
    text = f"model {model!r} was unloaded {by}" + (f": {reason}" if reason else "")
    return ProxyError(ErrorCode.MODEL_UNLOADED, text)


def _result(report: UnloadReport, problem: str) -> dict[str, Any]:
    result = {"exit_code": report.code, "signals": list(report.signals), "left": list(report.left)}
    return result | ({"warning": problem} if problem else {})
