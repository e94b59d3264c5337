"""Where a ticket goes: the choice among a model's engines, and what a grant enters where. Pure."""

from dataclasses import dataclass, replace

from proxy.admission import accounts, cost, life
from proxy.admission.entry import Entry
from proxy.admission.events import Effect, Granted, Poke
from proxy.admission.ledger import Charge, Ledger, Stage
from proxy.admission.records import Grant, Mirror, TicketSpec, make_tag
from proxy.admission.shape import Plan
from proxy.admission.state import Room, State
from proxy.types import Reason, TicketState


@dataclass(frozen=True, slots=True)
class Placed:
    """A ticket, the books it fits into, and what it costs there."""

    entry: Entry
    ledger: Ledger
    cost: int
    wide: bool

    @property
    def grant(self) -> Grant:
        """Return the grant, hints aside."""
        key = self.ledger.key
        return Grant(key, make_tag(self.entry.spec.id, key.generation, self.entry.recalls))


def find(
    room: Room, entry: Entry, now: float, plan: Plan | None = None, *, free_only: bool = False
) -> Placed | None:
    """Find the best backend among those where a ticket fits (`free_only`: at no cost).

    `plan` says which engines take nothing now, or no standby.

    One that is seen first, of these one whose cohort still takes members, then an idle one, then the least expected wait; what it
    still has of the conversation breaks ties, then room.
    """
    best: Placed | None = None
    rank: tuple[float, ...] = ()
    spec = entry.spec
    # what takes no slot is no burden to an engine that is about to go
    for ledger in room.takers or (room.books.values() if spec.tasks == 0 else ()):
        slots = ledger.info.slots
        charged = cost.charge(spec.tasks, spec.n, slots)
        if charged > 0 and (free_only or (plan is not None and ledger in plan.closed)):
            continue
        wide = cost.is_wide(spec.tasks, spec.n, slots)
        capacity = ledger.capacity(now)
        if plan is not None and not plan.standby:
            capacity = replace(capacity, standby=0)
        if not capacity.fits(charged, wide):
            continue
        cached = ledger.prefixes.cached(spec.prefix)
        # one that is not seen any more may be dead: only if there is no other
        silent = capacity.mirror is Mirror.STALE
        mine = (silent, *ledger.expected_wait(now), -cached, -capacity.free)
        if best is None or mine < rank:
            best, rank = Placed(entry, ledger, charged, wide), mine
    return best


def wide_everywhere(room: Room, spec: TicketSpec) -> bool:
    """Whether a request has more tasks than any engine has slots that gets new ones."""
    takers = room.takers
    return bool(takers) and all(cost.is_wide(spec.tasks, spec.n, ledger.info.slots) for ledger in takers)


def kept_out(room: Room, spec: TicketSpec, now: float) -> bool:
    """Whether others' work on the engines leaves too little for a request, whatever becomes of ours.

    Nobody knows when that ends: places kept free for it would serve nobody. Never so for a request of one task:
    nothing is narrower.
    """
    takers = room.takers if spec.tasks > 1 else ()
    return bool(takers) and not any(
        ledger.reach(now).fits(
            cost.charge(spec.tasks, spec.n, ledger.info.slots),
            cost.is_wide(spec.tasks, spec.n, ledger.info.slots),
        )
        for ledger in takers
    )


def grant(room: Room, placed: Placed, now: float) -> list[Effect]:
    """Enter a grant into the books and charge its key; the requester is told by `announce`."""
    entry, ledger = placed.entry, placed.ledger
    entry.grant = placed.grant
    ledger.grant(Charge(entry.spec.id, entry.grant.tag, placed.cost, placed.wide), now)
    room.queue.remove(entry)
    room.shares.of(entry.account).go(entry.account)
    if placed.cost > 0:
        whole, _ = accounts.estimate(room, entry)
        uncached = max(0.0, whole - ledger.prefixes.cached(entry.spec.prefix))
        accounts.granted(entry, uncached, seen=ledger.mirror(now) is Mirror.NATIVE)
    effects = life.move(entry, TicketState.GRANTED, None, now)
    entry.cost = placed.cost
    entry.granted_at = now
    return effects


def announce(state: State, room: Room, granted: list[Placed], now: float) -> list[Effect]:
    """Tell the requesters, with a gather hint for those whom others can follow into a cohort.

    The last of a burst has nobody behind it: those before it already make the engine wait for it, and
    a lone request must never wait for companions that do not exist.
    """
    effects: list[Effect] = []
    follow = any(entry.spec.tasks > 0 and entry.reason is not Reason.COHORT_SHAPE for entry in room.queue)
    for placed in reversed(granted):
        entry, ledger = placed.entry, placed.ledger
        gather = state.limits.gather_ms if follow and placed.cost > 0 and ledger.phased else 0
        grant = replace(placed.grant, gather_ms=gather, cohort=_open_cohort(ledger, now))
        entry.grant = grant
        effects.append(Granted(entry.spec.id, grant, placed.wide))
        follow = follow or placed.cost > 0
    effects.reverse()
    effects += [
        Poke(key) for key in dict.fromkeys(placed.ledger.key for placed in granted if placed.cost > 0)
    ]
    return effects


def _open_cohort(ledger: Ledger, now: float) -> int | None:
    cohort = ledger.cohort(now)
    return cohort.number if cohort.stage is Stage.OPEN else None
