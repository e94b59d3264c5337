"""Cohorts of like with like: who must not be read together with whom. Pure.

Everybody in a cohort waits until all are read, so one long prompt costs each of its companions its whole
reading time. What it loses by waiting is one generation: the next cohort comes when this one has answered.
And an empty
place is lost to all who wait behind it: each of them is served one place, a generation's share, later. So
a prompt is left out when

    companions * its tokens  >  ratio * (tokens read in a generation's time) * (1 + waiting behind / slots)

and joins otherwise: where reading is cheap beside answering, or the queue long, cohorts are full. Both
speeds are learned from what the engine shows. A prompt that was passed over waits for shape's sake at most
`shape_max_wait_s`, counted from the first cohort that it could have joined; then it goes with the next.

Under `drain` a ticket that an engine has queued is bound to its next cohort. With shaping on, nothing is
offered to an engine whose cohort runs: the choice is made when the cohort has ended, among all who came.
"""

from dataclasses import dataclass, field

from proxy.admission.entry import Entry
from proxy.admission.ledger import Ledger, Stage
from proxy.admission.order import projected
from proxy.admission.records import Limits
from proxy.admission.state import Room, State
from proxy.types import PhasePolicy, Reason

_WINDOW = 2
"""How many cohorts' worth of the line compete for one: further behind, turns decide, not lengths."""


@dataclass(slots=True)
class Plan:
    """Who is held back for what (by number), and the engines to which nothing is offered now."""

    held: dict[int, Reason] = field(default_factory=dict)
    closed: list[Ledger] = field(default_factory=list)

    standby: bool = True
    """Whether engines take one more than they have slots; not while their next cohort is to be chosen."""


def plan(state: State, room: Room, now: float) -> Plan:
    """Choose the members of the cohorts that can be formed or joined now."""
    made = Plan()
    limits = state.limits
    books = room.takers
    if not limits.shape or not books or not all(_late(book, now) for book in books):
        return made
    made.standby = False
    made.closed = [book for book in books if _runs(book, now)]
    ready = [book for book in books if not _runs(book, now)]
    if not ready:
        made.held = {entry.number: Reason.COHORT_SEALED for entry in room.queue if _simple(entry)}
        return made
    order = [entry for entry in projected(room, limits, now) if _simple(entry)]
    rest = order
    for book in sorted(ready, key=lambda book: book.expected_wait(now)):
        taken = _members(limits, book, rest, now)
        rest = [entry for entry in rest if entry not in taken]
    chosen = len(order) - len(rest)
    free = sum(max(0, book.capacity(now).free) for book in ready)
    last = max((place for place, entry in enumerate(order) if entry not in rest), default=-1)
    for place, entry in enumerate(order):
        # left out for its length is who sees others pass, or stays behind although there is room
        if entry in rest and (place < last or chosen < free):
            if entry.shape_since is None:
                entry.shape_since = now
            if not _forced(entry, limits, now):
                made.held[entry.number] = Reason.COHORT_SHAPE
    return made


def over_at(entry: Entry, limits: Limits) -> float | None:
    """Return when a ticket that was passed over need not wait for its like any longer."""
    return None if entry.shape_since is None else entry.shape_since + limits.shape_max_wait_s


def _late(book: Ledger, now: float) -> bool:
    """Whether the choice for an engine's next cohort can be left until the running one has ended.

    Not while strangers are at work there: their next cohort may come before ours, again and again.
    """
    if book.info.policy is not PhasePolicy.DRAIN or book.cohort(now).stage is Stage.UNKNOWN:
        return False
    return book.capacity(now).foreign == 0


def _runs(book: Ledger, now: float) -> bool:
    return book.cohort(now).stage is Stage.SEALED


def _simple(entry: Entry) -> bool:
    return entry.spec.tasks == 1


def _forced(entry: Entry, limits: Limits, now: float) -> bool:
    over = over_at(entry, limits)
    return over is not None and now >= over


def _members(limits: Limits, book: Ledger, rest: list[Entry], now: float) -> list[Entry]:
    """Fill a cohort: who has waited long enough, then by class the shortest as long as they cost too little."""
    room_left = max(0, book.capacity(now).free)
    worth = book.pace.tokens_per_generation
    if worth is None:
        return rest[:room_left]
    taken = [entry for entry in rest if _forced(entry, limits, now)][:room_left]
    company = len(taken) + sum(c.cost for c in book.charges.values() if c.released_at is None)
    compete = rest[: _WINDOW * book.info.slots]
    line_up = sorted(compete, key=lambda entry: (-entry.spec.priority, entry.need))
    for entry in [*line_up, *rest[len(compete) :]]:
        if len(taken) >= room_left:
            break
        behind = len(rest) - len(taken) - 1
        loss = worth * (1.0 + behind / book.info.slots)
        if entry not in taken and company * entry.need <= limits.shape_ratio * loss:
            taken.append(entry)
            company += 1
    return taken
