"""What crosses admission's boundary: frozen records, and nothing that can change behind a reader's back.

Times are monotonic seconds (`proxy.clock`); durations end in `_s`.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from proxy.errors import ErrorCode
from proxy.types import AdminState, BackendKey, Outcome, Reason, TicketState

GateMode = Literal["hold", "reject"]

TAG_LIMIT = 64
"""The engine copies at most this many characters of `x-request-id` into a slot."""

_TAG_SAFE = re.compile(r"[A-Za-z0-9._-]+")


class Mirror(StrEnum):
    """How much of an engine's slots is known; decides which capacity rules apply."""

    YOUNG = "young"
    """No snapshot of this generation yet, and none is overdue."""
    NATIVE = "native"
    """Fresh, with request tags: the exact rules."""
    STOCK = "stock"
    """Fresh, without tags: busy slots can be counted but not attributed."""
    STALE = "stale"
    """Seen before, but not for `stale_after_s`."""
    ABSENT = "absent"
    """Never seen, and overdue: an engine that does not show its slots."""

    @property
    def fresh(self) -> bool:
        """Whether what the snapshot says of slots may be used."""
        return self in {Mirror.NATIVE, Mirror.STOCK}


@dataclass(frozen=True, slots=True)
class TicketSpec:
    """One request as admission sees it.

    `tasks` is what the engine will post for it (`cost.count_work`), 0 for requests that take no slot;
    `n` is the completions asked for per prompt: above an engine's slots the request is passed on at
    once, because the engine refuses it by itself. `key` names the client. A greater `priority` goes
    first. `max_queue` is the key's own cap on waiting requests. `may_load` is false for reads that
    must not start a model: without a ready backend they are refused.

    `weight` is the key's share. `prompt_bytes` (text of the prompt, 0: the body's size is taken) and
    `prefix` (digests of the conversation's messages, shortest first, so that equal digests mean an equal
    beginning) feed estimates. `retry_id` is the client's own request id: who was refused with it and comes
    back in time keeps its place in the order of arrival.
    """

    id: str
    model: str
    key: str
    priority: int
    priority_name: str
    tasks: int
    stream: bool
    body_bytes: int
    endpoint: str
    replayable: bool = True
    max_queue: int | None = None
    n: int = 1
    may_load: bool = True
    weight: float = 1.0
    prompt_bytes: int = 0
    prefix: tuple[bytes, ...] = ()
    retry_id: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """Capacity held on one backend generation.

    `tag` goes to the engine as `x-request-id`. `gather_ms` goes as `x-phase-gather-ms`: how long the
    engine may wait for companions before it forms a cohort. `cohort` is the cohort that was open to
    newcomers when the grant was made, if one was seen.
    """

    key: BackendKey
    tag: str
    gather_ms: int = 0
    cohort: int | None = None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Per-model bounds; None is off."""

    max_queue: int | None = None
    load_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """All bounds and knobs of the core; None is off, durations in seconds."""

    max_queue: int | None = 256
    max_queued_bytes: int | None = 1_073_741_824
    queue_timeout_s: float | None = 600.0
    gate_hold_max_s: float | None = 600.0
    wide_patience_s: float = 5.0
    gather_ms: int = 20
    stale_after_s: float = 3.0
    native_standby: bool = True
    fair_share: bool = True
    fair_decode_weight: float = 2.0
    age_after_s: float | None = 60.0
    age_every: int = 8
    recall: bool = True
    shape: bool = False
    shape_ratio: float = 1.0
    shape_max_wait_s: float = 10.0
    models: Mapping[str, ModelLimits] = field(default_factory=dict)

    def of(self, model: str) -> ModelLimits:
        """Return a model's own limits (all off when it has none)."""
        return self.models.get(model, ModelLimits())


@dataclass(frozen=True, slots=True)
class TicketView:
    """One live ticket for the API and the UI. `position` is 1-based in its model's queue, 0 outside it.

    `left_s` is what is left of its budgets by their setting's name, where they are on.
    """

    id: str
    model: str
    key: str
    priority: str
    endpoint: str
    stream: bool
    state: TicketState
    reason: Reason | None
    position: int
    age_s: float
    queued_s: float
    tasks: int
    cost: int
    body_bytes: int
    tokens: int
    backend: BackendKey | None
    tag: str
    cohort: int | None
    held_s: Mapping[Reason, float]
    recalls: int = 0
    estimate_tokens: int = 0
    left_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LiveTickets:
    """Ids of live tickets by what they are at: waiting and running in the order of arrival, cancelling.

    `tags` are the names under which engines may still work for one: of all grants in the books, those of
    recalled tickets included.
    """

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    cancelling: tuple[str, ...]
    tags: frozenset[str]


@dataclass(frozen=True, slots=True)
class BackendView:
    """One backend's books: `charged` includes `cancelling`; `free` may be below 0 under foreign load."""

    key: BackendKey
    slots: int
    charged: int
    cancelling: int
    foreign: int
    free: int
    standby: int
    mirror: Mirror
    grants: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class ModelAdmissionView:
    """One model's queue and books."""

    model: str
    gate: AdminState
    gate_reason: str
    gate_mode: GateMode
    queued: int
    running: int
    cancelling: int
    queued_bytes: int
    oldest_s: float
    reasons: Mapping[Reason, int]
    states: Mapping[TicketState, int]
    backends: tuple[BackendView, ...]

    @property
    def charged(self) -> int:
        """Sum of all grants' cost."""
        return sum(backend.charged for backend in self.backends)

    @property
    def slots(self) -> int:
        """Sum of the ready backends' slots."""
        return sum(backend.slots for backend in self.backends)

    @property
    def free(self) -> int:
        """Sum of what could be granted now, standby aside."""
        return sum(max(0, backend.free) for backend in self.backends)


@dataclass(frozen=True, slots=True)
class Ending:
    """A ticket's one outcome, for logs and metrics. `code` is empty when nothing went wrong."""

    id: str
    spec: TicketSpec
    outcome: Outcome
    code: str
    age_s: float
    queued_s: float
    held_s: Mapping[Reason, float]
    state: TicketState


def make_tag(ticket: str, generation: int, recalls: int = 0) -> str:
    """Return the engine's tag for a ticket on a generation: `<ticket>.<generation>`, `….r1` after a recall.

    A ticket id that the engine would not copy whole (length, characters) is replaced by a digest.
    """
    again = f".r{recalls}" if recalls else ""
    tag = f"{ticket}.{generation}{again}"
    if len(tag) <= TAG_LIMIT and _TAG_SAFE.fullmatch(ticket):
        return tag
    return f"{hashlib.blake2s(ticket.encode(), digest_size=12).hexdigest()}.{generation}{again}"


_OUTCOMES: dict[ErrorCode, Outcome] = {
    ErrorCode.QUEUE_FULL: Outcome.REJECTED,
    ErrorCode.KEY_QUEUE_FULL: Outcome.REJECTED,
    ErrorCode.GATE_BLOCKED: Outcome.REJECTED,
    ErrorCode.MODEL_DRAINING: Outcome.REJECTED,
    ErrorCode.MODEL_LOADING: Outcome.REJECTED,
    ErrorCode.NO_BACKEND: Outcome.REJECTED,
    ErrorCode.MODEL_NOT_FOUND: Outcome.REJECTED,
    ErrorCode.QUEUE_TIMEOUT: Outcome.EXPIRED,
    ErrorCode.LOAD_TIMEOUT: Outcome.EXPIRED,
    ErrorCode.FIRST_TOKEN_TIMEOUT: Outcome.EXPIRED,
    ErrorCode.INTER_TOKEN_TIMEOUT: Outcome.EXPIRED,
    ErrorCode.TOTAL_TIMEOUT: Outcome.EXPIRED,
    ErrorCode.GATE_HOLD_TIMEOUT: Outcome.EXPIRED,
    ErrorCode.MODEL_UNLOADED: Outcome.CANCELLED,
    ErrorCode.CANCELLED_BY_OPERATOR: Outcome.CANCELLED,
    ErrorCode.SHUTTING_DOWN: Outcome.CANCELLED,
}


def outcome_of(code: ErrorCode) -> Outcome:
    """Return the outcome of a ticket that was ended with an error of ours."""
    return _OUTCOMES.get(code, Outcome.FAILED)
