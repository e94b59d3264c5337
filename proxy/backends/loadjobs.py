"""Makes a job of every load, whoever caused it, and tells how far it is."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from proxy.backends import modelfile
from proxy.backends.desk import Desk
from proxy.backends.jobs import Job, JobKind, JobState, Progress
from proxy.backends.runner import ModelRunner
from proxy.errors import ProxyError
from proxy.settings import Model
from proxy.types import NOBODY, Audit, BackendKey, Cause, EngineInfo, ModelState, Snapshot

LOOK_S: Final = 0.25
GONE_S: Final = 60.0
"""Between two looks at an unload, which has a deadline of its own."""
_LOADING: Final = (ModelState.STARTING, ModelState.LOADING)


class LoadJobs:
    """Follows the runners as their observer, after the composition's own."""

    def __init__(
        self, desk: Desk, runner: Callable[[str], ModelRunner], model: Callable[[str], Model]
    ) -> None:
        self._desk = desk
        self._runner = runner
        self._model = model
        self._meters: set[asyncio.Task[None]] = set()
        self._later: dict[str, asyncio.Task[None]] = {}
        """Loads by job that follow an unload."""

    def begin(self, model: str, cause: Cause, audit: Audit) -> Job:
        """Ask for a load and return its job; one that is ready, or refused at once, has ended already.

        While the model drains for an unload, a load follows that: what is ready now is about to go.
        """
        job = self._open(model, cause, audit)
        leaving = self._desk.running(model, JobKind.UNLOAD)
        if leaving is None or self._runner(model).life.operational is not ModelState.READY:
            self._ask(model, cause)
        elif job.id not in self._later:
            self._later[job.id] = task = asyncio.create_task(
                self._follow(job, leaving, cause), name=f"load-later:{model}"
            )
            task.add_done_callback(lambda _: self._later.pop(job.id, None))
        return self._desk.get(job.id) or job

    def _ask(self, model: str, cause: Cause) -> None:
        asked = self._runner(model).ask(cause)
        if asked.done() and not asked.cancelled():
            error = asked.exception()
            if isinstance(error, ProxyError):
                self._failed(model, error)
            elif error is None:
                self._done(model, asked.result())

    async def _follow(self, job: Job, leaving: Job, cause: Cause) -> None:
        """Load once the model is unloaded; what took the unload's place takes the load's, too."""
        try:
            while not leaving.ended:
                leaving = await self._desk.wait(leaving.id, GONE_S) or leaving
        except asyncio.CancelledError:
            self._close(job.model, JobState.CANCELLED, error="the proxy is shutting down")
            raise
        if leaving.state is not JobState.DONE:
            self._close(job.model, leaving.state, error=f"it was to follow an unload: {leaving.error}")
            return
        try:
            self._ask(job.model, cause)
        except ProxyError as gone:
            # a reload let the model go meanwhile
            self._failed(job.model, gone)

    async def close(self) -> None:
        """End the meters, and what would load later. Loads under way may still end as jobs."""
        tasks = {*self._meters, *self._later.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- the observer -----------------------------------------------------------------------------------

    def on_state(self, model: str, before: ModelState, after: ModelState, cause: Cause) -> None:
        if after is ModelState.STARTING:
            self._open(model, cause, NOBODY)
        elif after is ModelState.FAILED and before in _LOADING:
            failure = self._runner(model).failure
            if failure is not None:
                self._failed(model, failure)
        elif after is ModelState.STOPPING and before in _LOADING:
            self._close(model, JobState.CANCELLED, error=f"the model was stopped ({cause.value})")

    def on_ready(self, key: BackendKey, info: EngineInfo) -> None:
        self._done(key.model, info)

    def on_down(self, key: BackendKey, error: ProxyError) -> None:
        """Nothing of a load."""

    def on_draining(self, key: BackendKey, draining: bool) -> None:
        """Nothing of a load."""

    def on_load_failed(self, model: str, error: ProxyError) -> None:
        self._failed(model, error)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Nothing of a load."""

    # -- the job ----------------------------------------------------------------------------------------

    def _open(self, model: str, cause: Cause, audit: Audit) -> Job:
        job, new = self._desk.open(JobKind.LOAD, model, cause, audit)
        if new:
            task = asyncio.create_task(self._meter(job), name=f"meter:{model}")
            self._meters.add(task)
            task.add_done_callback(self._meters.discard)
        return job

    def _done(self, model: str, info: EngineInfo) -> None:
        status = self._runner(model).status()
        result = {
            "generation": status.generation,
            "pid": status.pid,
            "port": status.port,
            "build": info.build,
            "slots": info.slots,
        }
        self._close(model, JobState.DONE, result=result)

    def _failed(self, model: str, error: ProxyError) -> None:
        self._close(model, JobState.FAILED, error=error.message, code=error.code.value)

    def _close(
        self,
        model: str,
        state: JobState,
        *,
        error: str = "",
        code: str = "",
        result: Mapping[str, object] | None = None,
    ) -> None:
        job = self._desk.running(model, JobKind.LOAD)
        if job is not None:
            self._desk.close(job.id, state, error=error, code=code, result=result)

    async def _meter(self, job: Job) -> None:
        """Show stage and bytes until the job ends."""
        path = self._model(job.model).path
        total = await asyncio.to_thread(modelfile.size, path) or None
        read = 0 if total else None
        while (now := self._desk.get(job.id)) is not None and not now.ended:
            status = self._runner(job.model).status()
            if path is not None and total and status.pid is not None and status.state in _LOADING:
                seen = await asyncio.to_thread(modelfile.taken_in, status.pid, path)
                read = min(total, max(read or 0, seen or 0))
            stage = status.stage.value if status.stage else "waiting"
            self._desk.advance(job.id, Progress(stage, read, total))
            with contextlib.suppress(TimeoutError):
                await self._desk.wait(job.id, LOOK_S)
