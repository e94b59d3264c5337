"""What the mirror's snapshots say about phases over time. Pure: snapshots in, observations out.

A phase-aware engine reports its transitions as events with engine-monotonic stamps; polling only bounds
how late we learn of them. The engine's clock is laid against ours by a bound that every poll tightens: an event
happened before the poll that shows it was answered.

Expected events: `admit` (slot, cohort, tokens = prompt), `seal`, `ready` (slot), `open`, `pause`, `resume`,
`release` (slot), `idle`.
"""

from dataclasses import dataclass, field
from typing import Final

from proxy.types import EnginePhase, PhaseEvent, Snapshot

P = EnginePhase
_ENTERS: Final = {
    "seal": P.PREFILL_SEALED,
    "open": P.GENERATE,
    "pause": P.YIELD_PREFILL,
    "resume": P.GENERATE,
    "idle": P.IDLE,
}
_MAX_COHORTS: Final = 64


@dataclass(frozen=True, slots=True)
class Sealed:
    """A cohort became closed: its members and their prompt tokens."""

    size: int
    prompt_tokens: int


@dataclass(slots=True)
class Observations:
    """What one snapshot added. Times in seconds."""

    phase_seconds: dict[EnginePhase, float] = field(default_factory=dict)
    durations: list[tuple[EnginePhase, float]] = field(default_factory=list)
    seals: list[Sealed] = field(default_factory=list)
    barrier_waits: list[float] = field(default_factory=list)
    native_queues: list[float] = field(default_factory=list)
    paused: list[float] = field(default_factory=list)


class PhaseLedger:
    """Accounts one engine generation's phases. `engine_is_ours`: its first events are all of its life."""

    def __init__(self, *, engine_is_ours: bool) -> None:
        self._skip = not engine_is_ours
        self._phase = P.UNKNOWN
        self._entered: float | None = None
        self._at: float | None = None
        self._high = float("inf")
        self._ready: dict[int, int] = {}
        self._cohorts: dict[int, dict[int, int]] = {}
        self._waits: dict[str, tuple[float, float]] = {}

    def observe(self, snapshot: Snapshot) -> Observations:
        """Take the next snapshot (in order of `taken_at`)."""
        seen = Observations()
        events = () if self._skip else snapshot.events
        self._skip = False
        if self._at is None:
            self._at = snapshot.taken_at
            self._phase = P.UNKNOWN if events else snapshot.phase
        self._lay_clocks(snapshot, events)
        for event in events:
            self._event(event, seen)
        self._charge(snapshot.taken_at, seen)
        if snapshot.phase is not self._phase:
            # events were lost, or the engine has none: the snapshot is right
            self._enter(snapshot.phase, snapshot.taken_at, seen)
        for slot in snapshot.slots:
            if slot.busy and slot.tag:
                self._waits[slot.tag] = (slot.queue_ms / 1000, slot.paused_ms / 1000)
        live = {slot.tag for slot in snapshot.slots if slot.busy}
        for tag in [tag for tag in self._waits if tag not in live]:
            queued, paused = self._waits.pop(tag)
            seen.native_queues.append(queued)
            if paused:
                seen.paused.append(paused)
        return seen

    def _lay_clocks(self, snapshot: Snapshot, events: tuple[PhaseEvent, ...]) -> None:
        if not events:
            return
        self._high = min(self._high, snapshot.taken_at - events[-1].t_us / 1e6)

    def _event(self, event: PhaseEvent, seen: Observations) -> None:
        at = event.t_us / 1e6 + self._high
        slot = -1 if event.slot is None else event.slot
        name = event.event
        if name == "admit":
            if len(self._cohorts) > _MAX_COHORTS:
                self._cohorts.clear()
            self._cohorts.setdefault(event.cohort, {})[slot] = event.tokens
            if self._phase in (P.IDLE, P.UNKNOWN):
                self._enter_at(P.PREFILL_OPEN, at, seen)
        elif name == "ready":
            self._ready[slot] = event.t_us
        elif name == "release":
            self._ready.pop(slot, None)
        elif name in _ENTERS:
            if name == "seal":
                members = self._cohorts.pop(event.cohort, {})
                seen.seals.append(Sealed(len(members), sum(members.values())))
            if name == "open":
                seen.barrier_waits += [max(0.0, (event.t_us - t) / 1e6) for t in self._ready.values()]
                self._ready.clear()
            if not (name == "seal" and self._phase is P.YIELD_PREFILL):
                self._enter_at(_ENTERS[name], at, seen)

    def _enter_at(self, phase: EnginePhase, at: float, seen: Observations) -> None:
        self._charge(at, seen)
        self._enter(phase, at, seen)

    def _enter(self, phase: EnginePhase, at: float, seen: Observations) -> None:
        if phase is self._phase:
            return
        if self._entered is not None and self._phase not in (P.UNKNOWN, P.IDLE):
            seen.durations.append((self._phase, max(0.0, at - self._entered)))
        self._phase, self._entered = phase, at

    def _charge(self, until: float, seen: Observations) -> None:
        """Add the time since the last charge to the present phase; time never runs backwards."""
        if self._at is None or until <= self._at:
            return
        total = seen.phase_seconds.get(self._phase, 0.0)
        seen.phase_seconds[self._phase] = total + until - self._at
        self._at = until
