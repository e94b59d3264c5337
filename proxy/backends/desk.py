"""The desk of jobs: the book, with a clock, a log line for each end, a listener, and somebody to wait with."""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

from proxy import logs
from proxy.backends.jobs import Job, JobBook, JobKind, JobState, Progress
from proxy.backends.ports import JobChanged, Listener
from proxy.clock import Clock, wall
from proxy.types import Audit, Cause

_log = logs.get("backends")


class Desk:
    """All jobs of this proxy. Reading is free; only the backends open, advance and close jobs."""

    def __init__(self, clock: Clock, tell: Listener) -> None:
        self._book = JobBook(prefix=f"{secrets.token_hex(2)}-")
        self._clock = clock
        self._tell = tell
        self._waiters: dict[str, asyncio.Event] = {}

    # -- read side --------------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job | None:
        """Return a job, None when it is unknown or long over."""
        return self._book.get(job_id)

    def all(self, model: str | None = None) -> tuple[Job, ...]:
        """Return jobs (of one model), the newest first."""
        return self._book.all(model)

    def running(self, model: str, kind: JobKind) -> Job | None:
        """Return the model's running job of this kind."""
        return self._book.running(model, kind)

    def seconds(self, job: Job) -> float:
        """Return how long a job took, or has taken so far."""
        return job.seconds(self._clock())

    async def wait(self, job_id: str, timeout_s: float) -> Job | None:
        """Return the job once it has ended, or as it is after `timeout_s`; None for an unknown one."""
        job = self._book.get(job_id)
        if job is None or job.ended:
            return job
        event = self._waiters.setdefault(job_id, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass
        return self._book.get(job_id)

    # -- write side -------------------------------------------------------------------------------------

    def open(self, kind: JobKind, model: str, cause: Cause, audit: Audit) -> tuple[Job, bool]:
        """Return the model's running job of this kind, and whether it is new."""
        job, new = self._book.open(kind, model, cause, audit, self._clock(), wall())
        if new:
            _log.info(
                "job",
                job=job.id,
                kind=kind.value,
                model=model,
                cause=cause.value,
                key=audit.key,
                address=audit.address,
            )
            self._tell(JobChanged(job))
        return job, new

    def advance(self, job_id: str, progress: Progress) -> None:
        """Note progress; of a job that has ended meanwhile there is none."""
        job = self._book.get(job_id)
        if job is None or job.ended:
            return
        changed = self._book.advance(job_id, progress)
        if changed is not None:
            self._tell(JobChanged(changed))

    def close(
        self,
        job_id: str,
        state: JobState,
        *,
        error: str = "",
        code: str = "",
        cut: tuple[str, ...] = (),
        result: Mapping[str, Any] | None = None,
    ) -> Job | None:
        """End a job; the first end counts."""
        job = self._book.get(job_id)
        if job is None or job.ended:
            return job
        job = self._book.close(job_id, state, self._clock(), error=error, code=code, cut=cut, result=result)
        _log.info(
            "job ended",
            job=job.id,
            kind=job.kind.value,
            model=job.model,
            state=state.value,
            seconds=round(self.seconds(job), 3),
            cut=len(cut),
            error=error or None,
        )
        self._tell(JobChanged(job))
        waiter = self._waiters.pop(job_id, None)
        if waiter is not None:
            waiter.set()
        return job
