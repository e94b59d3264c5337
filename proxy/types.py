"""Words shared by every layer: wire values, identities and the frozen records that cross boundaries.

Enum values are the wire format and the metric label. All times are monotonic seconds (`proxy.clock`)
unless a name ends in another unit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class ModelState(StrEnum):
    """Operational axis of a model's backend (one per process start, see `Generation`)."""

    UNLOADED = "unloaded"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


class AdminState(StrEnum):
    """Administrative axis: what the operator wants, independent of what the process does."""

    ENABLED = "enabled"
    DRAINING = "draining"
    BLOCKED = "blocked"


class Cause(StrEnum):
    """Why a model changed state; label of `model_transitions_total`."""

    REQUEST = "request"
    OPERATOR = "operator"
    TTL = "ttl"
    EVICT = "evict"
    FORCE = "force"
    CRASH = "crash"
    WEDGE = "wedge"
    RELOAD = "reload"
    SHUTDOWN = "shutdown"


class EnginePhase(StrEnum):
    """Phase shown for an engine, derived from its `/slots` (`unknown`: no phase fields or stale)."""

    IDLE = "idle"
    PREFILL_OPEN = "prefill_open"
    PREFILL_SEALED = "prefill_sealed"
    YIELD_PREFILL = "yield_prefill"
    GENERATE = "generate"
    UNKNOWN = "unknown"


class MemberState(StrEnum):
    """A slot's place in the engine's cohort (values of the engine's `phase.member`)."""

    NONE = "none"
    QUEUED = "queued"
    PREFILL = "prefill"
    READY = "ready"
    GENERATE = "generate"
    PAUSED = "paused"


class PhasePolicy(StrEnum):
    """The engine's scheduling policy; `unknown` for an engine without the patch."""

    MIXED = "mixed"
    DRAIN = "drain"
    YIELD = "yield"
    UNKNOWN = "unknown"


class TicketState(StrEnum):
    """A request's place in admission; label of `requests_inflight`."""

    QUEUED = "queued"
    GRANTED = "granted"
    NATIVE_QUEUED = "native_queued"
    PREFILL = "prefill"
    READY = "ready"
    GENERATING = "generating"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    DONE = "done"


class Outcome(StrEnum):
    """How a request ended; exactly one per request."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"


class Reason(StrEnum):
    """Why a ticket waits."""

    GATE_BLOCKED = "gate_blocked"
    MODEL_LOADING = "model_loading"
    MODEL_DRAINING = "model_draining"
    NO_FREE_SLOT = "no_free_slot"
    COHORT_SEALED = "cohort_sealed"
    COHORT_SHAPE = "cohort_shape"
    FAIRNESS = "fairness"
    WIDE_REQUEST = "wide_request"
    BACKEND_DOWN = "backend_down"
    SWAP_WAIT = "swap_wait"


class Dialect(StrEnum):
    """Shape of errors and of in-stream error events."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True)
class Audit:
    """Who asked for an operator's action: the display name of a key, and the address it came from."""

    key: str = ""
    address: str = ""


NOBODY: Final = Audit()
"""Nobody asked: a timer, a crash, a request did."""


@dataclass(frozen=True, slots=True)
class BackendKey:
    """One process start of one model: stale grants, snapshots and callbacks are told by `generation`."""

    model: str
    backend: str
    generation: int


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot as last seen in `/slots`; fields are only meaningful while `busy` (F9).

    `tag` is the engine's copy of the request's `x-request-id`, empty on a stock engine.
    `prompt_tokens` is the whole prompt where the engine says it (`n_prompt_total`), else None.
    `processed_tokens` are the prompt's computed ones, `cached_tokens` those reused instead; `held_tokens` is what
    the slot holds now, prompt and generated.
    """

    id: int
    busy: bool
    task: int | None = None
    tag: str = ""
    member: MemberState = MemberState.NONE
    cohort: int | None = None
    prompt_tokens: int | None = None
    processed_tokens: int | None = None
    cached_tokens: int | None = None
    held_tokens: int | None = None
    decoded_tokens: int | None = None
    queue_ms: float = 0.0
    wait_ms: float = 0.0
    paused_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """One entry of the engine's transitions ring (`GET /slots?phase_since=`). `t_us` is engine-monotonic."""

    seq: int
    t_us: int
    event: str
    slot: int | None
    cohort: int
    request: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine's slots at one instant.

    `asked_at` is when the poll was sent: what the engine says is at least that fresh, so "taken after
    X" means `asked_at > X`. `native` is true when the engine carries the phase fields.
    """

    key: BackendKey
    asked_at: float
    taken_at: float
    slots: tuple[SlotView, ...]
    native: bool = False
    phase: EnginePhase = EnginePhase.UNKNOWN
    sealed: bool = False
    cohort: int | None = None
    decode_running_ms: float = 0.0
    seq: int = 0
    lost: int = 0
    events: tuple[PhaseEvent, ...] = ()

    @property
    def busy(self) -> int:
        """Number of slots at work."""
        return sum(1 for slot in self.slots if slot.busy)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a ready engine said of itself (`/props`), taken once per generation.

    `admit_ms` is how long it waits for companions of a queued prompt while it is idle.
    """

    slots: int
    context_tokens: int
    policy: PhasePolicy = PhasePolicy.UNKNOWN
    build: str = ""
    series: str = ""
    model_path: str = ""
    modalities: Mapping[str, bool] | None = None
    admit_ms: int = 0
