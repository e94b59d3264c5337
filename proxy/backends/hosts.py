"""A host that may sleep: where it is between awake and asleep, and when its idle command is due. Pure.

Probes, hooks and the clock come in as events; `step` is the only way on. A host that is going to sleep still answers:
probes say nothing while the idle command runs, nor for `settle_s` after it. An event without a place in the table
raises and changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class HostState(StrEnum):
    """`asleep` is what does not answer: put to sleep, switched off, or out of reach."""

    UNKNOWN = "unknown"
    AWAKE = "awake"
    WAKING = "waking"
    IDLING = "idling"
    ASLEEP = "asleep"


class HostEvent(StrEnum):
    """What happens to a host."""

    ANSWERED = "answered"
    SILENT = "silent"
    WAKE_BEGUN = "wake_begun"
    WAKE_FAILED = "wake_failed"
    IDLE_BEGUN = "idle_begun"
    IDLE_DONE = "idle_done"
    IDLE_FAILED = "idle_failed"


class HostCause(StrEnum):
    """Why a host changed; label of `host_transitions_total`."""

    PROBE = "probe"
    REQUEST = "request"
    OPERATOR = "operator"
    IDLE = "idle"
    SHUTDOWN = "shutdown"


S, E = HostState, HostEvent
_AT_REST: Final = {E.ANSWERED: S.AWAKE, E.SILENT: S.ASLEEP, E.WAKE_BEGUN: S.WAKING}

TABLE: Final[Mapping[HostState, Mapping[HostEvent, HostState]]] = MappingProxyType(
    {
        S.UNKNOWN: {**_AT_REST, E.IDLE_BEGUN: S.IDLING},
        S.AWAKE: {**_AT_REST, E.IDLE_BEGUN: S.IDLING},
        S.ASLEEP: _AT_REST,
        S.WAKING: {E.ANSWERED: S.AWAKE, E.WAKE_FAILED: S.ASLEEP},
        S.IDLING: {
            E.ANSWERED: S.IDLING,
            E.SILENT: S.IDLING,
            E.IDLE_DONE: S.ASLEEP,
            E.IDLE_FAILED: S.AWAKE,
        },
    }
)
"""Where an event leads; a missing entry is illegal."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host now. `used_at` is when it was last needed; `settled_at` when what its idle command began is over.

    `error` is what went wrong with the last hook, empty once one went well.
    """

    state: HostState = HostState.UNKNOWN
    since: float = 0.0
    used_at: float = 0.0
    settled_at: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """A change: one log line, one counter."""

    before: HostState
    after: HostState
    cause: HostCause


class IllegalHostEvent(Exception):  # noqa: N818 - names what happened
    """The event has no place in the table for this state."""


def step(
    host: Host, event: HostEvent, now: float, *, cause: HostCause, settle_s: float = 0.0, error: str = ""
) -> tuple[Host, Moved | None]:
    """Return the next host, and the move if there was one. Raises `IllegalHostEvent` and changes nothing."""
    after = TABLE[host.state].get(event)
    if after is None:
        raise IllegalHostEvent(f"{event.value} in state {host.state.value}")
    if host.state is S.ASLEEP and event is E.ANSWERED and now < host.settled_at:
        return host, None
    changed = replace(host, state=after)
    match event:
        case E.IDLE_DONE:
            changed = replace(changed, settled_at=now + settle_s, error="")
        case E.WAKE_FAILED:
            changed = replace(changed, error=error)
        case E.IDLE_FAILED:
            # tried again after another whole idle time
            changed = replace(changed, error=error, used_at=now)
        case E.ANSWERED if host.state is S.WAKING:
            changed = replace(changed, error="")
        case _:
            pass
    if after is host.state:
        return changed, None
    if after is S.AWAKE:
        # whoever woke it may be about to use it
        changed = replace(changed, used_at=max(changed.used_at, now))
    return replace(changed, since=now), Moved(host.state, after, cause)


@dataclass(frozen=True, slots=True)
class Use:
    """What is known of a host's models at one instant.

    `leased`: a keep-awake lease is held. `wanted`: requests wait for or use one of them, or one is being loaded.
    `loaded` are those that hold anything on the host. `idle_since` is when the last of the ready ones became idle,
    None without any.
    """

    leased: bool = False
    wanted: bool = False
    loaded: tuple[str, ...] = ()
    idle_since: float | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """Nothing is due."""


@dataclass(frozen=True, slots=True)
class Retire:
    """Unload these first: they would be lost with their host."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Run the idle command now."""


Due = Stay | Retire | Sleep


def used(host: Host, use: Use, now: float) -> Host:
    """Return the host with the time it was last needed: now while anything needs it or a lease is held."""
    if use.leased or use.wanted:
        return replace(host, used_at=now)
    if use.idle_since is not None and use.idle_since > host.used_at:
        return replace(host, used_at=min(now, use.idle_since))
    return host


def due(host: Host, use: Use, now: float, after_s: float | None) -> Due:
    """Decide what an idle host's turn is; `host` has been brought up to date by `used`. None: it never sleeps."""
    resting = host.state in (S.UNKNOWN, S.AWAKE)
    if after_s is None or not resting or use.leased or use.wanted or now - host.used_at < after_s:
        return Stay()
    return Retire(use.loaded) if use.loaded else Sleep()
