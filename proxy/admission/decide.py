"""The decision per model: who is offered to an engine now, and why everybody else waits. Pure.

It starts from the whole queue each time it is asked, so no wake-up can be lost: whatever changed, the
answer is the same as if it had always been so.
"""

from dataclasses import dataclass, replace

from proxy.admission import accounts, cost, life, recall
from proxy.admission.events import Effect, Granted, Load, Poke
from proxy.admission.ledger import Charge, Ledger, Stage
from proxy.admission.order import line
from proxy.admission.records import Grant, Mirror, TicketSpec, make_tag
from proxy.admission.state import Entry, Room, State
from proxy.errors import ErrorCode, ProxyError
from proxy.types import AdminState, Reason, TicketState


def decide(state: State, room: Room, now: float, *, arrived: bool = False) -> list[Effect]:
    """Grant what may go and give every other waiting ticket of a model its reason.

    `arrived` says that the queue just grew: a load is then asked for even if one was before.
    """
    if not room.queue:
        return []
    if room.admin is not AdminState.ENABLED:
        return _closed(state, room, now)
    if not room.books:
        return _not_ready(state, room, now, arrived=arrived)
    accounts.fold(room, state.limits, state.tickets)
    effects, left = _offer(state, room, now)
    return effects + recall.wanted(state, room, left, now)


def gate_error(room: Room, now: float) -> ProxyError:
    """Return the refusal of a gate that is not open."""
    why = f": {room.gate_reason}" if room.gate_reason else ""
    if room.admin is AdminState.DRAINING:
        code, text = ErrorCode.MODEL_DRAINING, f"{room.model} is being drained and takes no new requests{why}"
    else:
        code, text = ErrorCode.GATE_BLOCKED, f"{room.model} is blocked by an operator{why}"
    return ProxyError(code, text, retry_after_s=life.retry_after_s(room, now))


def _closed(state: State, room: Room, now: float) -> list[Effect]:
    effects: list[Effect] = []
    reason = Reason.MODEL_DRAINING if room.admin is AdminState.DRAINING else Reason.GATE_BLOCKED
    for entry in list(room.queue):
        if room.gate_mode == "reject":
            effects += life.end_waiting(state, entry, gate_error(room, now), now)
        else:
            effects += life.hold(entry, reason, now)
    return effects


def _not_ready(state: State, room: Room, now: float, *, arrived: bool) -> list[Effect]:
    effects: list[Effect] = []
    if room.swap_wait:
        reason = Reason.SWAP_WAIT
    else:
        reason = Reason.BACKEND_DOWN if room.went_down else Reason.MODEL_LOADING
    for entry in list(room.queue):
        if entry.spec.may_load:
            effects += life.hold(entry, reason, now)
        else:
            text = f"{room.model} is not loaded and this request does not load it: a completion or chat request does"
            error = ProxyError(ErrorCode.NO_BACKEND, text, retry_after_s=life.retry_after_s(room, now))
            effects += life.end_waiting(state, entry, error, now)
    if room.queue and (arrived or not room.load_asked):
        room.load_asked = True
        effects.append(Load(room.model))
    return effects


def _offer(state: State, room: Room, now: float) -> tuple[list[Effect], list[Entry]]:
    """Walk the line until somebody must wait; after that only tickets that take no slot pass.

    A wide ticket that reaches the head lets narrower ones by until its patience is over; then every
    slot that becomes free is kept for it, also when a wide ticket of a higher class came before it.
    Returns the effects and who is left, in order.
    """
    effects: list[Effect] = []
    granted: list[_Placed] = []
    left: list[Entry] = []
    blocker: Entry | None = None
    blocked: Reason | None = None
    for turn in line(room, state.limits, now):
        entry = turn.entry
        if blocked is not None and entry.spec.tasks > 0 and entry.spec.n == 1:
            placed = None  # the rule below, at the price of a long queue's bulk
        else:
            placed = _place(room, entry, now, free_only=blocked is not None)
        if placed is not None:
            effects += _grant(room, placed, now)
            granted.append(placed)
            if placed.cost > 0:
                room.turns = 0 if turn.aged else room.turns + 1
            continue
        left.append(entry)
        reason = blocked
        if reason is None and _wide_everywhere(room, entry.spec):
            reason = Reason.WIDE_REQUEST
            if len(left) == 1 and entry.wide_since is None:
                entry.wide_since = now
            if entry.wide_since is not None and now >= entry.wide_since + state.limits.wide_patience_s:
                blocked, blocker = reason, entry
        elif reason is None:
            reason = blocked = _no_room(room, now)
            blocker = entry
        elif blocker is not None and _passed_by(blocker, entry):
            reason = Reason.FAIRNESS
        if entry.reason is not reason:
            effects += life.hold(entry, reason, now)
    return effects + _announce(state, room, granted, now), left


def _no_room(room: Room, now: float) -> Reason:
    """Say what capacity lacks: slots, or the end of a cohort whose successors already wait in the engines."""
    if all(book.cohort(now).stage is Stage.SEALED and book.parked > 1 for book in room.books.values()):
        return Reason.COHORT_SEALED
    return Reason.NO_FREE_SLOT


def _passed_by(first: Entry, entry: Entry) -> bool:
    """Whether a ticket would stand before the first in line, were it not for its key's share."""
    return entry.number < first.number and entry.spec.priority >= first.spec.priority


@dataclass(frozen=True, slots=True)
class _Placed:
    entry: Entry
    ledger: Ledger
    cost: int
    wide: bool

    @property
    def grant(self) -> Grant:
        key = self.ledger.key
        return Grant(key, make_tag(self.entry.spec.id, key.generation, self.entry.recalls))


def _place(room: Room, entry: Entry, now: float, *, free_only: bool) -> _Placed | None:
    """Find the best backend among those where a ticket fits (`free_only`: at no cost).

    One whose cohort still takes members first, then an idle one, then the least expected wait; what it
    still has of the conversation breaks ties, then room.
    """
    best: _Placed | None = None
    rank: tuple[float, ...] = ()
    spec = entry.spec
    for ledger in room.books.values():
        slots = ledger.info.slots
        charged = cost.charge(spec.tasks, spec.n, slots)
        if charged > 0 and free_only:
            continue
        wide = cost.is_wide(spec.tasks, spec.n, slots)
        capacity = ledger.capacity(now)
        if not capacity.fits(charged, wide):
            continue
        cached = ledger.prefixes.cached(spec.prefix)
        mine = (*ledger.expected_wait(now), -cached, -capacity.free)
        if best is None or mine < rank:
            best, rank = _Placed(entry, ledger, charged, wide), mine
    return best


def _wide_everywhere(room: Room, spec: TicketSpec) -> bool:
    return all(cost.is_wide(spec.tasks, spec.n, ledger.info.slots) for ledger in room.books.values())


def _grant(room: Room, placed: _Placed, now: float) -> list[Effect]:
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


def _announce(state: State, room: Room, granted: list[_Placed], now: float) -> list[Effect]:
    """Tell the requesters, with a gather hint for those whom others can follow into a cohort.

    The last of a burst has nobody behind it: those before it already make the engine wait for it, and
    a lone request must never wait for companions that do not exist.
    """
    effects: list[Effect] = []
    follow = any(entry.spec.tasks > 0 for entry in room.queue)
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
