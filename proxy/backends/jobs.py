"""Jobs: what an operator (or a timer, or a crash) set going on a model, how far it is, and how it ended. Pure.

One running job per model and kind: asking again returns the one under way. Ended jobs are remembered up to a
bound; running ones are never forgotten. Times in `*_at` are monotonic seconds, `started_wall` is for people.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from proxy.types import Audit, Cause

HISTORY: Final = 200


class JobKind(StrEnum):
    """What is being done."""

    LOAD = "load"
    UNLOAD = "unload"
    FORCE = "force"


class JobState(StrEnum):
    """How it stands. `cancelled`: another job (or the shutdown) took its place."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a job is. None: not known, or of no meaning for this kind.

    `bytes_read` of `bytes_total` are the model file's; `requests_left` still run while draining.
    """

    stage: str = ""
    bytes_read: int | None = None
    bytes_total: int | None = None
    requests_left: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One job at one instant. `cut` names the requests it ended; `result` is a flat summary once it is done."""

    id: str
    kind: JobKind
    model: str
    cause: Cause
    audit: Audit
    state: JobState
    started_at: float
    started_wall: float
    progress: Progress = Progress()
    ended_at: float | None = None
    error: str = ""
    code: str = ""
    cut: tuple[str, ...] = ()
    result: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.state in ENDED

    def seconds(self, now: float) -> float:
        """Return how long it took, or has taken so far."""
        return max(0.0, (now if self.ended_at is None else self.ended_at) - self.started_at)


class JobEnded(Exception):  # noqa: N818 - names what happened
    """A job that has ended cannot change."""


class JobBook:
    """All jobs. `prefix` makes ids of one proxy differ from those of the one before it."""

    def __init__(self, prefix: str = "", history: int = HISTORY) -> None:
        self._prefix = prefix
        self._history = history
        self._jobs: dict[str, Job] = {}
        self._running: dict[tuple[str, JobKind], str] = {}
        self._count = 0

    def open(
        self, kind: JobKind, model: str, cause: Cause, audit: Audit, now: float, wall: float
    ) -> tuple[Job, bool]:
        """Return the model's running job of this kind, and whether it is new."""
        running = self._running.get((model, kind))
        if running is not None:
            return self._jobs[running], False
        self._count += 1
        job = Job(
            id=f"{self._prefix}{self._count}",
            kind=kind,
            model=model,
            cause=cause,
            audit=audit,
            state=JobState.RUNNING,
            started_at=now,
            started_wall=wall,
        )
        self._jobs[job.id] = job
        self._running[model, kind] = job.id
        self._forget()
        return job, True

    def advance(self, job_id: str, progress: Progress) -> Job | None:
        """Note progress; return the job when that changed it. Raises `JobEnded`."""
        job = self._open(job_id)
        if job.progress == progress:
            return None
        self._jobs[job_id] = job = replace(job, progress=progress)
        return job

    def close(
        self,
        job_id: str,
        state: JobState,
        now: float,
        *,
        error: str = "",
        code: str = "",
        cut: tuple[str, ...] = (),
        result: Mapping[str, Any] | None = None,
    ) -> Job:
        """End a job. Raises `JobEnded` for one that has ended, `ValueError` for a state that is no end."""
        job = self._open(job_id)
        if state not in ENDED:
            raise ValueError(f"{state.value} is not an end")
        job = replace(
            job, state=state, ended_at=now, error=error, code=code, cut=cut, result=dict(result or {})
        )
        # ended jobs are remembered in the order of their ends
        del self._jobs[job_id]
        self._jobs[job_id] = job
        del self._running[job.model, job.kind]
        self._forget()
        return job

    def get(self, job_id: str) -> Job | None:
        """Return a job, None when it is unknown or forgotten."""
        return self._jobs.get(job_id)

    def running(self, model: str, kind: JobKind) -> Job | None:
        """Return a model's running job of this kind."""
        job_id = self._running.get((model, kind))
        return None if job_id is None else self._jobs[job_id]

    def all(self, model: str | None = None) -> tuple[Job, ...]:
        """Return jobs (of one model), the newest first."""
        found = [job for job in self._jobs.values() if model is None or job.model == model]
        return tuple(sorted(found, key=lambda job: (job.started_at, len(job.id), job.id), reverse=True))

    def _open(self, job_id: str) -> Job:
        job = self._jobs[job_id]
        if job.ended:
            raise JobEnded(f"job {job_id} is {job.state.value}")
        return job

    def _forget(self) -> None:
        ended = [job_id for job_id, job in self._jobs.items() if job.ended]
        for job_id in ended[: max(0, len(ended) - self._history)]:
            del self._jobs[job_id]
