"""One live ticket: where it is, where it may go from there, and what it waited for. Mutable, the core's own."""

from dataclasses import dataclass, field
from enum import StrEnum

from proxy.admission.fair import Account
from proxy.admission.records import Grant, TicketSpec
from proxy.errors import ProxyError
from proxy.types import Outcome, Reason, TicketState


class IllegalTransitionError(Exception):
    """A ticket was told to go where its table does not lead; nothing was changed."""


_ENGINE = frozenset(
    {
        TicketState.NATIVE_QUEUED,
        TicketState.PREFILL,
        TicketState.READY,
        TicketState.GENERATING,
        TicketState.PAUSED,
    }
)
_OUT = frozenset({TicketState.CANCELLING, TicketState.DONE})

TRANSITIONS: dict[TicketState, frozenset[TicketState]] = {
    TicketState.QUEUED: frozenset({TicketState.GRANTED, TicketState.DONE}),
    # back into the queue leads a recall, also one that the engine's progress has overtaken
    TicketState.GRANTED: _ENGINE | _OUT | {TicketState.QUEUED},
    # polling skips states, and a full cache sends members back to the engine's queue
    **{state: (_ENGINE - {state}) | _OUT | {TicketState.QUEUED} for state in _ENGINE},
    TicketState.CANCELLING: frozenset({TicketState.DONE}),
    TicketState.DONE: frozenset(),
}


class Budget(StrEnum):
    """Clocks that run while a ticket waits; each has its own limit and its own error code."""

    QUEUE = "queue"
    LOAD = "load"
    GATE = "gate"


_BUDGET_OF_REASON: dict[Reason, Budget] = {
    Reason.GATE_BLOCKED: Budget.GATE,
    Reason.MODEL_DRAINING: Budget.GATE,
    Reason.MODEL_LOADING: Budget.LOAD,
    Reason.BACKEND_DOWN: Budget.LOAD,
    Reason.SWAP_WAIT: Budget.LOAD,
    Reason.NO_FREE_SLOT: Budget.QUEUE,
    Reason.COHORT_SEALED: Budget.QUEUE,
    Reason.COHORT_SHAPE: Budget.QUEUE,
    Reason.FAIRNESS: Budget.QUEUE,
    Reason.WIDE_REQUEST: Budget.QUEUE,
}


@dataclass(slots=True, eq=False)
class Entry:
    """One live ticket.

    `number` is its arrival rank and `senior_at` what its age counts from (both older than `arrived_at`
    after a refusal that was kept to). `account` is its key's, `need` the estimate of prompt tokens to
    be read for it, `charged` and `folded` what was charged for its prompt and how many of its generated
    tokens. `since` is when (state, reason) last changed; `lived`, `held` and
    `spent` hold the seconds of what came before, by state, reason and budget; `due` remembers the deadline that
    follows from them while `due_known`. `wide_since` is when a wide ticket first stood at the head, `shape_since` when
    one was first passed over for its length.
    `ended` is set when it was ended from elsewhere, `outcome` once it is settled (a cancelling ticket
    has one already). `recalling` is set from the recall to the return, `committed` once the engine
    answered; `recalls` counts returns. `promised`: it came back as it was told to after a
    refusal.
    """

    spec: TicketSpec
    number: int
    arrived_at: float
    since: float
    account: Account
    senior_at: float
    need: float = 0.0
    charged: float = 0.0
    folded: int = 0
    refundable: bool = False
    reported: bool = False
    recalling: bool = False
    committed: bool = False
    promised: bool = False
    recalls: int = 0
    state: TicketState = TicketState.QUEUED
    reason: Reason | None = None
    grant: Grant | None = None
    granted_at: float | None = None
    cost: int = 0
    tokens: int = 0
    cohort: int | None = None
    wide_since: float | None = None
    shape_since: float | None = None
    lived: dict[TicketState, float] = field(default_factory=dict)
    held: dict[Reason, float] = field(default_factory=dict)
    spent: dict[Budget, float] = field(default_factory=dict)
    due: float | None = None
    due_known: bool = False
    ended: ProxyError | None = None
    outcome: Outcome | None = None
    finished_at: float | None = None

    @property
    def waiting(self) -> bool:
        """Whether it stands in the proxy's queue."""
        return self.state is TicketState.QUEUED

    @property
    def parked(self) -> bool:
        """Whether it holds a grant on which its engine did not begin, as far as is known."""
        return self.state in {TicketState.GRANTED, TicketState.NATIVE_QUEUED}

    @property
    def budget(self) -> Budget | None:
        """The clock that runs now: queueing counts in the proxy, in the engine and at the barrier."""
        if self.reason is not None:
            return _BUDGET_OF_REASON[self.reason]
        return Budget.QUEUE if self.state is TicketState.READY else None

    def queued_s(self, now: float) -> float:
        """Seconds in the proxy's queue so far."""
        end = self.granted_at if self.granted_at is not None else self.finished_at
        return (now if end is None else end) - self.arrived_at
