"""What the HTTP surface needs from the rest; the composition passes objects that fit."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.admission import Admission, GateMode
from proxy.catalog import Catalog
from proxy.clock import Clock
from proxy.http.hub import EventHub
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.types import Audit, BackendKey, EnginePhase, ModelState
from proxy.upstream import Upstream


class Models(Protocol):
    """What is known of models, for the read-only surfaces. All calls return at once."""

    def state(self, model: str) -> ModelState:
        """Return the operational state of a model's backend."""

    def phase(self, model: str) -> EnginePhase | None:
        """Return what a model's engine is doing, None when it is not known."""

    def meta(self, model: str) -> Mapping[str, Any]:
        """Return the small facts shown as `meta` in `/v1/models` (JSON values)."""

    def describe(self, model: str) -> Mapping[str, Any]:
        """Return everything an operator sees of a model (JSON values)."""

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        """Return whether requests can be taken, and the facts behind it (JSON values)."""


class LogLines(Protocol):
    """An engine's log as it grows, in batches of lines; close it when done."""

    @property
    def ended(self) -> str:
        """Why no more lines come; empty while some may."""

    def __aiter__(self) -> AsyncIterator[list[str]]: ...

    def close(self) -> None: ...


class Control(Protocol):
    """What operators may do to models. Mappings are JSON values, models are ids that exist.

    Everything raises `ProxyError` where it is refused. A text that is returned beside a result says why that will
    not survive the proxy; empty when it will.
    """

    def load(self, model: str, audit: Audit) -> Mapping[str, Any]:
        """Begin a load; return its job."""

    def unload(
        self,
        model: str,
        *,
        deadline_s: float | None,
        block: bool,
        reason: str,
        mode: GateMode | None,
        audit: Audit,
    ) -> Mapping[str, Any]:
        """Begin to drain and stop; return the job. None: as the model is configured."""

    async def force(
        self, model: str, *, block: bool, reason: str, mode: GateMode, audit: Audit
    ) -> Mapping[str, Any]:
        """End everything of a model now; return the whole answer."""

    def would_cut(self, model: str) -> Mapping[str, Any]:
        """Return what `force` would end."""

    async def reconcile(self, model: str) -> Mapping[str, Any]:
        """Compare and mend a model's books; return the report."""

    def jobs(self, model: str | None = None) -> Sequence[Mapping[str, Any]]:
        """Return jobs (of one model), the newest first."""

    def job(self, job_id: str) -> Mapping[str, Any] | None:
        """Return a job, None for an unknown one."""

    async def wait(self, job_id: str, timeout_s: float) -> Mapping[str, Any] | None:
        """Return a job once it has ended, or as it is after `timeout_s`."""

    def gate(self, model: str) -> Mapping[str, Any]:
        """Return the operator's gate of a model."""

    async def set_gate(
        self, model: str | None, *, block: bool, reason: str, mode: GateMode, audit: Audit
    ) -> str:
        """Block or open a model (None: all)."""

    def leases(self) -> Sequence[Mapping[str, Any]]:
        """Return the keep-awake leases that are held."""

    async def lease(self, ttl_s: float, reason: str, audit: Audit) -> tuple[Mapping[str, Any], str]:
        """Grant a lease."""

    async def release(self, lease_id: str) -> tuple[Mapping[str, Any], str] | None:
        """End a lease; return it and why it would come back with the next proxy, if so; None when there is none."""

    async def reload(self, audit: Audit, *, dry_run: bool) -> Mapping[str, Any]:
        """Read the configuration again; return what changed, or would."""

    def log_tail(self, model: str, lines: int) -> Sequence[str]:
        """Return the last lines of an engine's output."""

    def follow_log(self, model: str, lines: int) -> LogLines:
        """Follow an engine's output over its generations."""

    @property
    def state_problem(self) -> str:
        """Why nothing survives this proxy; empty while it does."""


@dataclass(frozen=True, slots=True)
class HttpContext:
    """What the handlers work with. One per proxy; without `control` there are no operators' orders."""

    settings: Settings
    catalog: Catalog
    metrics: Metrics
    admission: Admission
    upstream: Callable[[BackendKey], Upstream]
    models: Models
    clock: Clock
    hub: EventHub = field(default_factory=EventHub)
    control: Control | None = None
