"""The books of one backend generation: who is charged for what, and the one capacity formula. Pure.

    free = slots - sum(cost of all grants, cancelling included) - foreign

A grant is dropped only when its requester released it *and* the engine is known to be done with it:
at once when the requester saw the end, else on evidence from a snapshot asked after the release.
Nothing is dropped by age. What the engine does not show is handled by these degraded rules:

- **stock** (no request tags): busy slots cannot be attributed, so foreign = 0, and the cancelling
  grants together stay charged for as many slots as are busy beyond what live grants account for.
  A slot kept busy by somebody else's request is then charged through a cancelling grant: right in
  number, and it ends with that work.
- **stale** (the mirror went dark): foreign = 0, no standby; cancelling grants stay charged, but when
  nothing else is charged the next request may go: service slows down, it does not stop.
- **absent** (the engine never showed its slots): no evidence can ever come, so a cancelling grant is
  dropped as soon as that is clear.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from proxy.admission.estimate import Prefixes
from proxy.admission.pace import Pace
from proxy.admission.records import BackendView, Mirror
from proxy.admission.retry import Turnover
from proxy.types import BackendKey, EngineInfo, EnginePhase, PhasePolicy, Snapshot

_RELEASED_LIMIT = 1024
"""Tags remembered until a snapshot asked after their release; more come only while the mirror is dark."""

_TAKES_MEMBERS = frozenset({EnginePhase.PREFILL_OPEN, EnginePhase.YIELD_PREFILL})
_EXCLUSIVE = frozenset({PhasePolicy.DRAIN, PhasePolicy.YIELD})


@dataclass(slots=True)
class Charge:
    """One grant in the books. `released_at` is set while it is cancelling.

    `in_the_dark` marks a grant made by the stale rule, beside grants that were still cancelling.
    `begun` says that the engine was seen to work on it. `recalled` marks one whose ticket went back into the queue: nobody's any more, but still charged.
    """

    ticket: str
    tag: str
    cost: int
    wide: bool = False
    in_the_dark: bool = False
    released_at: float | None = None
    recalled: bool = False
    begun: bool = False


class Stage(StrEnum):
    """What an engine does with a newcomer."""

    OPEN = "open"
    """It joins the cohort that is being read, or about to be."""
    IDLE = "idle"
    """It starts a cohort."""
    SEALED = "sealed"
    """It waits for the running cohort to end (or to be paused)."""
    UNKNOWN = "unknown"
    """No cohorts, or nothing fresh is known of them."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """An engine's present cohort; `number` is the engine's, None where it is not known."""

    stage: Stage
    number: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What may be granted now: `free` slots, and `standby` beyond them (0 or 1)."""

    free: int
    standby: int
    foreign: int
    mirror: Mirror
    idle: bool

    def fits(self, cost: int, wide: bool) -> bool:
        """Whether a request fits. A wide one needs the engine to itself and is never a standby."""
        if cost == 0:
            return True
        if wide:
            return self.idle and self.free >= cost
        return self.free + self.standby >= cost


@dataclass(slots=True, eq=False)
class Ledger:
    """Books of one backend generation."""

    key: BackendKey
    info: EngineInfo
    ready_at: float
    stale_after_s: float
    native_standby: bool = True
    """Whether one more than the slots may wait in the engine's own queue."""
    charges: dict[str, Charge] = field(default_factory=dict)
    """By tag."""
    snapshot: Snapshot | None = None
    prefixes: Prefixes = field(default_factory=Prefixes)
    turnover: Turnover = field(default_factory=Turnover)
    pace: Pace = field(default_factory=Pace)
    draining: bool = False
    """Whether it gets nothing new: it is about to go."""
    disputed: int = 0
    """Foreign slots in the last two snapshots alike: work that is not ours, not just an ending of ours."""
    _last_foreign: int = 0
    _released: dict[str, float] = field(default_factory=dict)

    @property
    def phased(self) -> bool:
        """Whether the engine forms cohorts."""
        return self.info.policy in _EXCLUSIVE

    def mirror(self, now: float) -> Mirror:
        """Return how much is known of the engine's slots at `now`."""
        if self.snapshot is None:
            return Mirror.ABSENT if now >= self.mirror_changes_at() else Mirror.YOUNG
        if now >= self.mirror_changes_at():
            return Mirror.STALE
        return Mirror.NATIVE if self.snapshot.native else Mirror.STOCK

    def mirror_changes_at(self) -> float:
        """Return when the mirror's standing changes if no snapshot comes."""
        seen = self.ready_at if self.snapshot is None else self.snapshot.taken_at
        return seen + self.stale_after_s

    def capacity(self, now: float) -> Capacity:
        """Return what may be granted at `now`: the one place of the capacity formula."""
        most = self.reach(now)
        stale = most.mirror is Mirror.STALE
        charged, live = self._sum(cancelling=None), self._sum(cancelling=False)
        free = most.free if stale and live == 0 else most.free - charged
        crowded = any(charge.wide for charge in self.charges.values())
        standby = 0 if crowded else most.standby
        idle = live == 0 and (stale or charged == 0)
        if self.draining:
            free, standby, idle = min(free, 0), 0, False
        return Capacity(free, standby, most.foreign, most.mirror, idle)

    def reach(self, now: float) -> Capacity:
        """Return what could be granted at `now` if all of ours had ended: only others' work is in the way."""
        mirror = self.mirror(now)
        foreign = self._foreign() if mirror is Mirror.NATIVE else 0
        standby = 1 if self.native_standby and self.phased and mirror is not Mirror.STALE else 0
        return Capacity(self.info.slots - foreign, standby, foreign, mirror, idle=True)

    def cohort(self, now: float) -> Cohort:
        """Return what a newcomer would meet: the newest snapshot, corrected by endings and grants since."""
        seen = self.snapshot
        if seen is None or not self.phased or self.mirror(now) is not Mirror.NATIVE:
            return Cohort(Stage.UNKNOWN)
        if seen.phase in _TAKES_MEMBERS and not seen.sealed:
            return Cohort(Stage.OPEN, seen.cohort)
        at_work = any(charge.begun for charge in self.charges.values()) or self._foreign() > 0
        if at_work and seen.phase is not EnginePhase.IDLE:
            return Cohort(Stage.SEALED, seen.cohort)
        # nothing that the snapshot showed at work is left: who was granted since forms the next cohort
        return Cohort(Stage.OPEN if self.charges else Stage.IDLE)

    def expected_wait(self, now: float) -> tuple[int, float]:
        """Return how soon a newcomer would start: joining at once, starting at once, or after seconds."""
        match self.cohort(now).stage:
            case Stage.OPEN:
                return 0, 0.0
            case Stage.IDLE:
                return 1, 0.0
            case _:
                charged = self._sum(cancelling=None)
                idle = 1 if charged == 0 else 2
                return idle, charged / self.info.slots * (self.turnover.mean_s or 1.0)

    @property
    def parked(self) -> int:
        """Slots' worth of grants on which the engine was not seen to work yet."""
        return sum(c.cost for c in self.charges.values() if c.released_at is None and not c.begun)

    def grant(self, charge: Charge, now: float) -> None:
        """Enter a grant; its tag must not be in the books."""
        if charge.tag in self.charges:
            raise ValueError(f"{charge.tag} is already charged on {self.key}")
        charge.in_the_dark = self.mirror(now) is Mirror.STALE and self._sum(cancelling=True) > 0
        self.charges[charge.tag] = charge

    def release(self, tag: str, now: float, *, upstream_open: bool) -> bool:
        """Take a release; return whether the grant left the books (else it is cancelling now)."""
        charge = self.charges[tag]
        if upstream_open and charge.cost > 0 and self.mirror(now) is not Mirror.ABSENT:
            charge.released_at = now
            return False
        self._drop(tag, now)
        return True

    def knows_better_than(self, snapshot: Snapshot) -> bool:
        """Whether the snapshot at hand was asked later than this one."""
        return self.snapshot is not None and snapshot.asked_at < self.snapshot.asked_at

    def observe(self, snapshot: Snapshot) -> tuple[Charge, ...]:
        """Take a snapshot that is newer than the one at hand; return the cancelling grants it ended."""
        self.snapshot = snapshot
        asked = snapshot.asked_at
        candidates = [c for c in self.charges.values() if c.released_at is not None and c.released_at < asked]
        if snapshot.native:
            shown = {slot.tag for slot in snapshot.slots if slot.busy}
            gone = [charge for charge in candidates if charge.tag not in shown]
        else:
            gone = list(self._unexplained(candidates, snapshot.busy))
        for charge in gone:
            self._drop(charge.tag, charge.released_at or asked)
        self._released = {tag: at for tag, at in self._released.items() if at >= asked}
        foreign = self._foreign() if snapshot.native else 0
        self.disputed = min(foreign, self._last_foreign)
        self._last_foreign = foreign
        return tuple(gone)

    def settle(self, now: float) -> tuple[Charge, ...]:
        """Drop what can never be confirmed (an absent mirror), and return it."""
        if self.mirror(now) is not Mirror.ABSENT:
            return ()
        gone = tuple(c for c in self.charges.values() if c.released_at is not None)
        for charge in gone:
            self._drop(charge.tag, now)
        return gone

    def view(self, now: float) -> BackendView:
        """Return the books as one record."""
        capacity = self.capacity(now)
        return BackendView(
            key=self.key,
            slots=self.info.slots,
            charged=self._sum(cancelling=None),
            cancelling=self._sum(cancelling=True),
            foreign=capacity.foreign,
            free=capacity.free,
            standby=capacity.standby,
            mirror=capacity.mirror,
            grants=len(self.charges),
            draining=self.draining,
        )

    def _foreign(self) -> int:
        """Busy slots of no grant of ours, except where the grant ended after the snapshot was asked."""
        if self.snapshot is None:
            return 0
        return sum(
            1
            for slot in self.snapshot.slots
            if slot.busy
            and slot.tag not in self.charges
            and self._released.get(slot.tag, float("-inf")) < self.snapshot.asked_at
        )

    def _unexplained(self, candidates: list[Charge], busy: int) -> Iterator[Charge]:
        """Cut cancelling grants, oldest first, down to the busy slots that live grants leave over."""
        surplus = sum(charge.cost for charge in candidates) - max(0, busy - self._sum(cancelling=False))
        for charge in sorted(candidates, key=lambda charge: charge.released_at or 0.0):
            if surplus <= 0:
                return
            cut = min(charge.cost, surplus)
            surplus -= cut
            charge.cost -= cut
            if charge.cost == 0:
                yield charge

    def _sum(self, *, cancelling: bool | None) -> int:
        """Sum of costs: of cancelling grants, of the others, or (None) of all."""
        return sum(
            charge.cost
            for charge in self.charges.values()
            if cancelling is None or (charge.released_at is not None) is cancelling
        )

    def _drop(self, tag: str, now: float) -> None:
        del self.charges[tag]
        self._released[tag] = now
        while len(self._released) > _RELEASED_LIMIT:
            del self._released[next(iter(self._released))]
