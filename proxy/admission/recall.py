"""Taking back what waits in an engine's own queue, for somebody who should go first. Pure.

What an engine has queued is not begun: closing its exchange costs nothing but the trip. A ticket is
recalled at most once, keeps its place in the order of arrival, and stays charged until the engine shows
that it let go; whoever it made room for is granted then.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from proxy.admission import cost
from proxy.admission.entry import Entry
from proxy.admission.events import Effect, Recall
from proxy.admission.ledger import Charge, Ledger, Stage
from proxy.admission.order import aged, projected
from proxy.admission.records import Limits
from proxy.admission.state import Room, State
from proxy.types import BackendKey


@dataclass(frozen=True, slots=True)
class _Parked:
    entry: Entry
    charge: Charge


def wanted(state: State, room: Room, now: float) -> list[Effect]:
    """Return the recalls that those who wait, in their order, are worth."""
    if not state.limits.recall or not room.queue:
        return []
    parked = {ledger.key: found for ledger in room.takers if (found := list(_parked(state, ledger, now)))}
    if not parked:
        return []
    coming = sum(_on_its_way_back(state, ledger) for ledger in room.takers)
    effects: list[Effect] = []
    ahead: dict[str, float] = {}
    for waiter in projected(room, state.limits, now):
        need = _need(room, waiter)
        if need is None:
            break
        if coming >= need:
            coming -= need
        else:
            taken = _take(room, state.limits, waiter, need, parked, ahead.get(waiter.spec.key, 0.0))
            if not taken:
                break
            effects += [Recall(one.entry.spec.id) for one in taken]
        ahead[waiter.spec.key] = ahead.get(waiter.spec.key, 0.0) + waiter.need / waiter.account.weight
    return effects


def _parked(state: State, ledger: Ledger, now: float) -> Iterator[_Parked]:
    """What waits in an engine while a cohort runs there, as the newest snapshot tells it."""
    if ledger.cohort(now).stage is not Stage.SEALED or ledger.snapshot is None:
        return
    for charge in ledger.charges.values():
        entry = state.tickets.get(charge.ticket)
        if (
            entry is not None
            and charge.released_at is None
            and charge.cost > 0
            and not charge.wide
            and entry.parked
            and entry.granted_at is not None
            and entry.granted_at < ledger.snapshot.asked_at
            and entry.recalls == 0
            and entry.spec.replayable
            and not (entry.recalling or entry.committed or aged(entry, state.limits, now))
        ):
            yield _Parked(entry, charge)


def _on_its_way_back(state: State, ledger: Ledger) -> int:
    """Slots that earlier recalls will free."""
    return sum(
        charge.cost
        for charge in ledger.charges.values()
        if charge.recalled or ((entry := state.tickets.get(charge.ticket)) is not None and entry.recalling)
    )


def _need(room: Room, waiter: Entry) -> int | None:
    """Slots a waiter takes where it takes fewest; None for one that needs an engine to itself."""
    spec = waiter.spec
    fits = [
        cost.charge(spec.tasks, spec.n, book.info.slots)
        for book in room.takers
        if not cost.is_wide(spec.tasks, spec.n, book.info.slots)
    ]
    return min(fits, default=None)


def _take(
    room: Room,
    limits: Limits,
    waiter: Entry,
    need: int,
    parked: dict[BackendKey, list[_Parked]],
    ahead: float,
) -> list[_Parked]:
    """Choose what makes room for a waiter on one engine: lowest class, furthest ahead, latest first."""
    for places in parked.values():
        worse = [one for one in places if _goes_before(room, limits, waiter, one.entry, ahead)]
        worse.sort(key=lambda one: (one.entry.spec.priority, -one.entry.account.counter, -one.entry.number))
        taken: list[_Parked] = []
        room_made = 0
        for one in worse:
            if room_made >= need:
                break
            taken.append(one)
            room_made += one.charge.cost
        if taken and room_made >= need:
            for one in taken:
                one.entry.recalling = True
                places.remove(one)
            return taken
    return []


def _goes_before(room: Room, limits: Limits, waiter: Entry, other: Entry, ahead: float) -> bool:
    """Whether a waiter is of a higher class, or its key is behind by more than a cohort's tokens."""
    if waiter.spec.priority != other.spec.priority:
        return waiter.spec.priority > other.spec.priority
    if not limits.fair_share or waiter.account is other.account:
        return False
    request = room.lengths.request_tokens
    slots = max((book.info.slots for book in room.takers), default=1)
    cohort = slots * (other.charged if request is None else max(request, other.charged))
    theirs = other.account.counter - other.charged / other.account.weight
    return theirs - (waiter.account.counter + ahead) > cohort / waiter.account.weight
