"""What the mirror's snapshots say about phases over time. Pure: snapshots in, observations out.

A phase-aware engine reports its transitions as events with engine-monotonic stamps, so that durations are
exact whatever the polling; polling only bounds how late we learn of them. The answer's own engine time lays
the two clocks beside each other, to within the time of one poll.

Events: `admit` (slot, tokens = its prompt; cohort 0: it waits for a cohort, else it joins that one) · `ready` (slot:
its prompt is done) · `seal` (tokens = members) · `open` (no slot: the barrier; a slot: its own, under `mixed`) ·
`pause`, `resume` (slot) · `release` (slot) · `idle`.
"""

from dataclasses import dataclass, field

from proxy.types import EnginePhase, PhaseEvent, Snapshot

P = EnginePhase
_PREFILL = (P.PREFILL_OPEN, P.PREFILL_SEALED, P.YIELD_PREFILL)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A cohort was closed: its members and the sum of their prompt tokens."""

    size: int
    prompt_tokens: int


@dataclass(slots=True)
class Observations:
    """What one snapshot added. Times in seconds; waits are one per request.

    `intervals` are the phases that ended, with begin and end on the snapshots' clock; the one that was going on
    when observation began is not among them, because its begin is not known.
    """

    phase_seconds: dict[EnginePhase, float] = field(default_factory=dict)
    durations: list[tuple[EnginePhase, float]] = field(default_factory=list)
    intervals: list[tuple[EnginePhase, float, float]] = field(default_factory=list)
    seals: list[Sealed] = field(default_factory=list)
    barrier_waits: list[float] = field(default_factory=list)
    native_queues: list[float] = field(default_factory=list)
    paused: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Member:
    """One slot's stamps, in engine microseconds."""

    tokens: int = 0
    cohort: int = 0
    queued_us: int | None = None
    ready_us: int | None = None
    paused_us: int | None = None
    paused_total_us: int = 0


class PhaseLedger:
    """Accounts one engine generation's phases. `engine_is_ours`: its first events are all of its life."""

    def __init__(self, *, engine_is_ours: bool) -> None:
        self._skip = not engine_is_ours
        self._phase = P.UNKNOWN
        self._entered: float | None = None
        self._at: float | None = None
        self._members: dict[int, _Member] = {}

    def observe(self, snapshot: Snapshot, engine_us: int | None = None) -> Observations:
        """Take the next snapshot (in order of `taken_at`) and the engine's clock in it, if it said so."""
        seen = Observations()
        events = () if self._skip else snapshot.events
        self._skip = False
        if self._at is None:
            self._at = snapshot.taken_at
            self._phase = P.UNKNOWN if events else snapshot.phase
        if snapshot.lost:
            # who was where is not known any more; phases are healed by the snapshot below
            self._members.clear()
        if engine_us is None:
            engine_us = events[-1].t_us if events else 0
        offset = snapshot.taken_at - engine_us / 1e6
        for event in events:
            self._event(event, event.t_us / 1e6 + offset, seen)
        self._charge(snapshot.taken_at, seen)
        if snapshot.phase is not self._phase:
            self._enter(snapshot.phase, snapshot.taken_at, seen)
        return seen

    def _event(self, event: PhaseEvent, at: float, seen: Observations) -> None:
        slot = -1 if event.slot is None else event.slot
        match event.event:
            case "admit":
                self._admit(event, slot, at, seen)
            case "ready":
                self._member(slot).ready_us = event.t_us
            case "seal":
                mates = [m for m in self._members.values() if m.cohort == event.cohort]
                size = event.tokens or len(mates)
                seen.seals.append(Sealed(size, sum(mate.tokens for mate in mates)))
                if self._phase is not P.YIELD_PREFILL:
                    self._enter_at(P.PREFILL_SEALED, at, seen)
            case "open" if slot < 0:
                for member in self._members.values():
                    if member.ready_us is not None:
                        seen.barrier_waits.append((event.t_us - member.ready_us) / 1e6)
                        member.ready_us = None
                self._enter_at(P.GENERATE, at, seen)
            case "open":
                self._member(slot).ready_us = None
            case "pause":
                self._member(slot).paused_us = event.t_us
                self._enter_at(P.YIELD_PREFILL, at, seen)
            case "resume":
                self._resume(self._member(slot), event.t_us)
            case "release":
                member = self._members.pop(slot, _Member())
                self._resume(member, event.t_us)
                if member.paused_total_us:
                    seen.paused.append(member.paused_total_us / 1e6)
            case "idle":
                self._enter_at(P.IDLE, at, seen)
            case _:
                pass  # a newer engine may say more

    def _admit(self, event: PhaseEvent, slot: int, at: float, seen: Observations) -> None:
        member = self._members.get(slot)
        if event.cohort == 0:
            self._members[slot] = _Member(event.tokens, queued_us=event.t_us)
            return
        waited = 0 if member is None or member.queued_us is None else event.t_us - member.queued_us
        seen.native_queues.append(waited / 1e6)
        self._members[slot] = _Member(event.tokens, event.cohort)
        if self._phase not in _PREFILL:
            self._enter_at(P.PREFILL_OPEN, at, seen)

    def _member(self, slot: int) -> _Member:
        return self._members.setdefault(slot, _Member())

    @staticmethod
    def _resume(member: _Member, t_us: int) -> None:
        if member.paused_us is not None:
            member.paused_total_us += t_us - member.paused_us
            member.paused_us = None

    def _enter_at(self, phase: EnginePhase, at: float, seen: Observations) -> None:
        self._charge(at, seen)
        self._enter(phase, at, seen)

    def _enter(self, phase: EnginePhase, at: float, seen: Observations) -> None:
        if phase is self._phase:
            return
        if self._entered is not None:
            seen.intervals.append((self._phase, self._entered, max(self._entered, at)))
            if self._phase not in (P.UNKNOWN, P.IDLE):
                seen.durations.append((self._phase, max(0.0, at - self._entered)))
        self._phase, self._entered = phase, at

    def _charge(self, until: float, seen: Observations) -> None:
        """Add the time since the last charge to the present phase; time never runs backwards."""
        if self._at is None or until <= self._at:
            return
        total = seen.phase_seconds.get(self._phase, 0.0)
        seen.phase_seconds[self._phase] = total + until - self._at
        self._at = until
