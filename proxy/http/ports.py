"""What the HTTP surface needs from the rest; the composition passes objects that fit."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.admission import Grant, ModelAdmissionView, TicketSpec
from proxy.catalog import Catalog
from proxy.clock import Clock
from proxy.errors import ProxyError
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.types import BackendKey, ModelState, Outcome, Reason, TicketState
from proxy.upstream import Upstream


class Ticket(Protocol):
    """A request's place in admission."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> TicketState: ...
    @property
    def reason(self) -> Reason | None: ...
    @property
    def position(self) -> int: ...
    @property
    def ended(self) -> asyncio.Future[ProxyError]: ...

    async def granted(self, timeout: float | None = None) -> Grant | None:
        """Wait for the grant; None when `timeout` seconds passed first; raises `ProxyError` when ended."""

    def first_byte(self) -> None: ...
    def tokens(self, count: int, /) -> None: ...
    def release(self, outcome: Outcome, code: str = "", *, upstream_open: bool = False) -> None: ...


class Admission(Protocol):
    """The queue in front of the engines."""

    def submit(self, spec: TicketSpec) -> Ticket:
        """Take a request in, or raise `ProxyError`."""

    def view(self, model: str) -> ModelAdmissionView: ...


class Models(Protocol):
    """What is known of models, for the read-only surfaces. All calls return at once."""

    def state(self, model: str) -> ModelState:
        """Return the operational state of a model's backend."""

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
