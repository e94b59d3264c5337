"""What happens to admission (events) and what it wants done (effects). Frozen; the core's only language."""

from dataclasses import dataclass

from proxy.admission.records import Ending, GateMode, Grant, Limits, TicketSpec
from proxy.errors import ProxyError
from proxy.types import AdminState, BackendKey, EngineInfo, Outcome, Reason, Snapshot

# --- events -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request wants in. Its id must not be in use (`State.taken`)."""

    spec: TicketSpec


@dataclass(frozen=True, slots=True)
class Released:
    """A requester is done with its ticket: the body ended, it failed, or its client left.

    `upstream_open` says that the engine may still be at work for it.
    """

    ticket: str
    outcome: Outcome
    code: str = ""
    upstream_open: bool = False


@dataclass(frozen=True, slots=True)
class Cancelled:
    """An operator (or a budget kept elsewhere) ends one ticket."""

    ticket: str
    error: ProxyError


@dataclass(frozen=True, slots=True)
class FirstByte:
    """The first content byte of a ticket's response went to its client."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The engine answered a ticket (its response head arrived): it cannot be recalled any more."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Requeued:
    """A recalled ticket's exchange is closed and nothing of it went to its client: it waits again."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Reported:
    """What a ticket's request really was, as the engine counted it; None where it did not say."""

    ticket: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SwapWait:
    """A load waits for another model to make room (or does so no longer)."""

    model: str
    waiting: bool


@dataclass(frozen=True, slots=True)
class BackendReady:
    """A generation can take requests."""

    key: BackendKey
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class BackendDown:
    """A generation takes no more requests; what ran on it ends with `error`."""

    key: BackendKey
    error: ProxyError


@dataclass(frozen=True, slots=True)
class BackendDraining:
    """A generation gets nothing new while `draining`; what runs on it goes on."""

    key: BackendKey
    draining: bool


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load that waiters were counting on failed."""

    model: str
    error: ProxyError


@dataclass(frozen=True, slots=True)
class Seen:
    """A snapshot of an engine's slots arrived."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class GateSet:
    """An operator opened, drained or blocked a model for new requests."""

    model: str
    admin: AdminState
    reason: str = ""
    mode: GateMode = "hold"


@dataclass(frozen=True, slots=True)
class ModelEnded:
    """Force-unload: everything of the model ends now, and its generations are dead to us."""

    model: str
    error: ProxyError


@dataclass(frozen=True, slots=True)
class ModelDropped:
    """The model left the configuration: waiters end with `error`, what runs may finish."""

    model: str
    error: ProxyError


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Nothing is accepted any more and waiters end; `cut` ends what runs, too."""

    error: ProxyError
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Configured:
    """New limits."""

    limits: Limits


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; the core asked for it with `ArmTimer`."""


Event = (
    Arrived
    | Released
    | Cancelled
    | FirstByte
    | Committed
    | Requeued
    | Reported
    | SwapWait
    | BackendReady
    | BackendDown
    | BackendDraining
    | LoadFailed
    | Seen
    | GateSet
    | ModelEnded
    | ModelDropped
    | ShutDown
    | Configured
    | Tick
)

# --- effects ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Granted:
    """Tell the requester that it may go to the engine."""

    ticket: str
    grant: Grant
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask the requester to close its exchange, of which nothing came back yet, and to requeue its ticket."""

    ticket: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A recalled ticket is back in the queue."""

    ticket: str
    model: str


@dataclass(frozen=True, slots=True)
class Waited:
    """A ticket stopped waiting for `reason` after `seconds` (or waits for something else now)."""

    ticket: str
    model: str
    reason: Reason
    seconds: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell the requester that its ticket was ended from elsewhere; it still has to release it."""

    ticket: str
    error: ProxyError


@dataclass(frozen=True, slots=True)
class Finished:
    """A ticket got its outcome; comes exactly once per accepted or refused ticket."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class Load:
    """Ask for the model to be loaded (idempotent)."""

    model: str


@dataclass(frozen=True, slots=True)
class Poke:
    """Ask for a fresh snapshot now."""

    key: BackendKey


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An engine is busy with work that is not ours (or no longer): more foreign slots than before."""

    key: BackendKey
    foreign: int


@dataclass(frozen=True, slots=True)
class ArmTimer:
    """Send a `Tick` at this time (None: not needed); replaces the one asked for before."""

    at: float | None


Effect = Granted | Recall | Returned | Waited | Ended | Finished | Load | Poke | Mismatch | ArmTimer
