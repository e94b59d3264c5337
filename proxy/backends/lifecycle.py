"""The life of one model as a pure state machine: two axes, causes, generations, effects out.

Operational: `unloaded → starting → loading → ready → stopping → unloaded`, `failed` (per attempt; the
next load may try again). Administrative: `enabled | draining | blocked`. Neither implies the other.

A process start and a stop each take a new **generation**, so that everything which names an older one
(grants, snapshots, exits, probes) is told apart: events of another generation change nothing. An event
that has no place in the table raises `IllegalEvent` and changes nothing.

An engine that ended by itself is started again after a back-off (`Backoff`): the machine says when
(`RetryPlanned`), the shell comes back with `RetryDue`. Loads by requests join a planned restart; after an attempt
that was theirs they are refused until its time (`TooSoon`). An operator's load never waits.

No clock, no I/O: time is passed in, the fleet performs the effects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, assert_never

from proxy.backends.backoff import Backoff
from proxy.types import AdminState, Cause, ModelState

S = ModelState
DEFAULT_BACKOFF: Final = Backoff()
_BY_ITSELF: Final = (Cause.CRASH, Cause.WEDGE)


@dataclass(frozen=True, slots=True)
class Life:
    """A model's place on both axes.

    `cause` is why the present operational state was entered; `again` remembers a load asked for while
    the model stops; `reason` is the operator's text for `admin`. `strikes` are failures in a row; while `failed`,
    `retry_at` is the time before which requests start nothing, and `restart` tells that it will be tried then
    whoever asks. `ready_at` is when the backend last became ready.
    """

    operational: ModelState = S.UNLOADED
    admin: AdminState = AdminState.ENABLED
    generation: int = 0
    cause: Cause = Cause.OPERATOR
    reason: str = ""
    again: Cause | None = None
    strikes: int = 0
    retry_at: float | None = None
    restart: bool = False
    ready_at: float = 0.0

    @property
    def loading(self) -> bool:
        """Whether an attempt to load is under way."""
        return self.operational in (S.STARTING, S.LOADING)


@dataclass(frozen=True, slots=True)
class LoadAsked:
    """Someone needs the model. Joins an attempt under way; kept for later while the model stops."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Started:
    """The process of `generation` runs (or, for a remote one, its address is known)."""

    generation: int


@dataclass(frozen=True, slots=True)
class BecameReady:
    """Health, identity and properties of `generation` are good."""

    generation: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The attempt of `generation` ended without a ready engine and without a process."""

    generation: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The process of `generation` ended although nobody asked for it."""

    generation: int
    cause: Cause = Cause.CRASH


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The model is to go, whatever it is doing. Bumps the generation in this very step."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Stopped:
    """The process is gone and reaped; `generation` is the one given by the stop."""

    generation: int


@dataclass(frozen=True, slots=True)
class RetryDue:
    """The time of a planned restart of `generation` has come, and what was left of it is cleared away."""

    generation: int


@dataclass(frozen=True, slots=True)
class AdminSet:
    """The operator's wish for new requests."""

    admin: AdminState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reshaped:
    """Starts from now on are made from another configuration: failures of the old one say nothing of them."""


Event = (
    LoadAsked
    | Started
    | BecameReady
    | LoadFailed
    | Exited
    | StopAsked
    | Stopped
    | RetryDue
    | AdminSet
    | Reshaped
)


@dataclass(frozen=True, slots=True)
class Moved:
    """A change of the operational axis: one log line, one counter, one call of the observer."""

    before: ModelState
    after: ModelState
    cause: Cause


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start a process (or connect) for this generation."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Stop what runs; `was_ready` tells whether requests may be on it."""

    generation: int
    cause: Cause
    was_ready: bool


@dataclass(frozen=True, slots=True)
class EngineLost:
    """A ready engine is gone: everything granted on `generation` has failed."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class LoadRefused:
    """The operator's gate forbids this load: whoever waits for it must be told."""

    admin: AdminState
    reason: str


@dataclass(frozen=True, slots=True)
class RetryPlanned:
    """Post `RetryDue` at this time, and not before the lost process is gone."""

    generation: int
    at: float


@dataclass(frozen=True, slots=True)
class TooSoon:
    """The last attempt failed a moment ago: whoever asked is told its error again, and when to come back."""

    retry_at: float


Effect = Moved | StartEngine | StopEngine | EngineLost | LoadRefused | RetryPlanned | TooSoon


class IllegalEvent(Exception):  # noqa: N818 - names what happened
    """The event has no place in the table for this state."""


TABLE: Final[Mapping[ModelState, Mapping[type[Event], ModelState]]] = MappingProxyType(
    {
        S.UNLOADED: {LoadAsked: S.STARTING, StopAsked: S.UNLOADED, RetryDue: S.UNLOADED},
        S.FAILED: {LoadAsked: S.STARTING, StopAsked: S.UNLOADED, RetryDue: S.STARTING},
        S.STARTING: {
            LoadAsked: S.STARTING,
            Started: S.LOADING,
            LoadFailed: S.FAILED,
            StopAsked: S.STOPPING,
        },
        S.LOADING: {
            LoadAsked: S.LOADING,
            BecameReady: S.READY,
            LoadFailed: S.FAILED,
            StopAsked: S.STOPPING,
        },
        S.READY: {LoadAsked: S.READY, Exited: S.FAILED, StopAsked: S.STOPPING},
        S.STOPPING: {LoadAsked: S.STOPPING, StopAsked: S.STOPPING, Stopped: S.UNLOADED},
    }
)
"""Where an event of the present generation leads; a missing entry is illegal."""


def step(
    life: Life, event: Event, now: float = 0.0, backoff: Backoff = DEFAULT_BACKOFF
) -> tuple[Life, tuple[Effect, ...]]:
    """Return the next life and what to do, in order. Raises `IllegalEvent` and changes nothing."""
    if isinstance(event, AdminSet):
        return replace(life, admin=event.admin, reason=event.reason), ()
    if isinstance(event, Reshaped):
        return _reshaped(life, now)
    if not isinstance(event, LoadAsked | StopAsked) and event.generation != life.generation:
        return life, ()
    after = TABLE[life.operational].get(type(event))
    if after is None:
        name = type(event).__name__
        raise IllegalEvent(f"{name} in state {life.operational.value} (generation {life.generation})")
    match event:
        case LoadAsked():
            return _asked(life, event.cause, after, now)
        case StopAsked():
            return _stop(_forgiven(life), event.cause, after)
        case Started():
            return _move(life, after, life.cause)
        case BecameReady():
            return _move(replace(life, ready_at=now), after, life.cause)
        case LoadFailed():
            again = backoff.restarts and life.cause in _BY_ITSELF
            return _fail(life, life.cause, life.strikes + 1, again=again, now=now, backoff=backoff)
        case Exited():
            strikes = backoff.strikes(life.strikes, now - life.ready_at)
            failed, effects = _fail(
                life, event.cause, strikes, again=backoff.restarts, now=now, backoff=backoff
            )
            return failed, (effects[0], EngineLost(life.generation, event.cause), *effects[1:])
        case RetryDue():
            if not life.restart:
                return life, ()
            life = replace(life, restart=False)
            if life.admin is not AdminState.ENABLED:
                return life, (LoadRefused(life.admin, life.reason),)
            return _start(life, life.cause, after)
        case Stopped():
            moved, effects = _move(replace(life, again=None), after, life.cause)
            if life.again is None:
                return moved, effects
            moved, more = _load(moved, life.again, S.STARTING)
            return moved, (*effects, *more)
        case _:
            assert_never(event)


def _forgiven(life: Life) -> Life:
    """Return a life whose failures are forgotten: an operator took it in hand."""
    return replace(life, strikes=0, retry_at=None, restart=False)


def _reshaped(life: Life, now: float) -> tuple[Life, tuple[Effect, ...]]:
    if life.operational is not S.FAILED:
        # in the others the stop that follows forgives, or there is nothing to forgive
        return life, ()
    if not life.restart:
        return _forgiven(life), ()
    return replace(life, strikes=0, retry_at=now), (RetryPlanned(life.generation, now),)


def _move(life: Life, after: ModelState, cause: Cause) -> tuple[Life, tuple[Effect, ...]]:
    moved = replace(life, operational=after, cause=cause)
    return moved, () if after is life.operational else (Moved(life.operational, after, cause),)


def _fail(
    life: Life, cause: Cause, strikes: int, *, again: bool, now: float, backoff: Backoff
) -> tuple[Life, tuple[Effect, ...]]:
    at = now + backoff.wait_s(strikes)
    moved, effects = _move(replace(life, strikes=strikes, retry_at=at, restart=again), S.FAILED, cause)
    return moved, (*effects, RetryPlanned(life.generation, at)) if again else effects


def _asked(life: Life, cause: Cause, after: ModelState, now: float) -> tuple[Life, tuple[Effect, ...]]:
    """Decide whether a load asked for while `failed` joins the restart, comes too soon, or starts now."""
    if life.operational is S.FAILED and cause is not Cause.OPERATOR and life.admin is AdminState.ENABLED:
        if life.restart:
            return life, ()
        if life.retry_at is not None and now < life.retry_at:
            return life, (TooSoon(life.retry_at),)
    return _load(life, cause, after)


def _load(life: Life, cause: Cause, after: ModelState) -> tuple[Life, tuple[Effect, ...]]:
    if life.operational is S.STOPPING:
        # an operator's load passes a gate that a request's does not
        return replace(life, again=cause if cause is Cause.OPERATOR else life.again or cause), ()
    if after is life.operational:
        return life, ()
    if life.admin is not AdminState.ENABLED and cause is not Cause.OPERATOR:
        return life, (LoadRefused(life.admin, life.reason),)
    return _start(life, cause, after)


def _start(life: Life, cause: Cause, after: ModelState) -> tuple[Life, tuple[Effect, ...]]:
    started = replace(life, generation=life.generation + 1, retry_at=None, restart=False)
    moved, effects = _move(started, after, cause)
    return moved, (*effects, StartEngine(moved.generation, cause))


def _stop(life: Life, cause: Cause, after: ModelState) -> tuple[Life, tuple[Effect, ...]]:
    if life.operational is S.STOPPING:
        return replace(life, again=None), ()
    if after is not S.STOPPING:
        return _move(life, after, cause)
    moved, effects = _move(replace(life, generation=life.generation + 1), after, cause)
    return moved, (*effects, StopEngine(moved.generation, cause, life.operational is S.READY))
