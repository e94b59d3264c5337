"""What the HTTP surface needs from the rest; the composition passes objects that fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.admission import Admission
from proxy.catalog import Catalog
from proxy.clock import Clock
from proxy.http.hub import EventHub
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.types import BackendKey, EnginePhase, ModelState
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


@dataclass(frozen=True, slots=True)
class HttpContext:
    """What the handlers work with. One per proxy."""

    settings: Settings
    catalog: Catalog
    metrics: Metrics
    admission: Admission
    upstream: Callable[[BackendKey], Upstream]
    models: Models
    clock: Clock
    hub: EventHub = field(default_factory=EventHub)
