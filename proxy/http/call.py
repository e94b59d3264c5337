"""One client request on its way through: stamps and facts, filled in as they become known.

Mutable and owned by the request's own task; everybody else reads. Times are monotonic seconds, 0.0
until they happened.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from proxy.headers import RequestId
from proxy.sse import Usage
from proxy.types import Dialect, Outcome, TicketState


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `key` tells clients apart (a configured name or an address), `label` is for metrics.

    `models` are glob patterns of what may be used; `weight` is the key's share, `max_tokens_default` and
    `max_tokens_cap` limit its answers (None: off).
    """

    key: str
    label: str
    priority: str
    rank: int
    max_queue: int | None = None
    models: tuple[str, ...] = ("*",)
    weight: float = 1.0
    max_tokens_default: int | None = None
    max_tokens_cap: int | None = None


@dataclass(slots=True)
class Call:
    """The record behind the canonical log line and the request metrics."""

    id: RequestId
    method: str
    path: str
    dialect: Dialect
    arrived: float
    endpoint: str = ""
    ticket: str = ""
    caller: Caller | None = None
    model: str = ""
    stream: bool = False
    tasks: int = 0
    body_bytes: int = 0

    body_done: float = 0.0
    submitted: float = 0.0
    granted: float = 0.0
    opened: float = 0.0
    head: float = 0.0
    first: float = 0.0
    second: float = 0.0
    last: float = 0.0

    backend: str = ""
    generation: int = 0
    cohort: int | None = None
    reason: str = ""
    recalls: int = 0
    lived_s: Mapping[TicketState, float] = field(default_factory=dict)
    chunks: int = 0
    max_gap: float = 0.0
    usage: Usage | None = None

    status: int = 0
    outcome: Outcome | None = None
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    """Extra response fields (CORS), put on whatever answer goes out."""

    @property
    def queue_wait_s(self) -> float:
        """Time in the queue; 0 until it is over."""
        return self.granted - self.submitted if self.granted else 0.0


CALL: web.RequestKey[Call] = web.RequestKey("call", Call)
