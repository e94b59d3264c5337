"""The decision per model: who is offered to an engine now, and why everybody else waits. Pure.

It starts from the whole queue each time it is asked, so no wake-up can be lost: whatever changed, the
answer is the same as if it had always been so.
"""

from proxy.admission import accounts, life, place, recall, shape
from proxy.admission.entry import Entry
from proxy.admission.events import Effect, Load
from proxy.admission.ledger import Stage
from proxy.admission.order import line
from proxy.admission.state import Room, State
from proxy.errors import ErrorCode, ProxyError
from proxy.types import AdminState, Reason


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
    return _offer(state, room, now) + recall.wanted(state, room, now)


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


def _offer(state: State, room: Room, now: float) -> list[Effect]:
    """Walk the line until somebody must wait; after that only tickets that take no slot pass.

    A wide ticket that reaches the head lets narrower ones by until its patience is over; then every
    slot that becomes free is kept for it, also when a wide ticket of a higher class came before it. Who
    is held back for the shape of a cohort lets others by, too, and who is kept out by others' work on
    the engines.
    """
    shaped = shape.plan(state, room, now)
    effects: list[Effect] = []
    granted: list[place.Placed] = []
    passed: set[int] = set()
    for turn in line(room, state.limits, now):
        entry = turn.entry
        held = shaped.held.get(entry.number)
        if held is not None:
            passed.add(entry.number)
            effects += _held(entry, held, now)
            continue
        found = place.find(room, entry, now, shaped)
        if found is not None:
            effects += place.grant(room, found, now)
            granted.append(found)
            if found.cost > 0:
                room.turns = 0 if turn.aged else room.turns + 1
            continue
        reason, patient = _no_room(room, now), False
        if place.wide_everywhere(room, entry.spec):
            reason = Reason.WIDE_REQUEST
            if not passed and entry.wide_since is None:
                entry.wide_since = now
            patient = entry.wide_since is None or now < entry.wide_since + state.limits.wide_patience_s
        if patient or place.kept_out(room, entry.spec, now):
            passed.add(entry.number)
            effects += _held(entry, reason, now)
            continue
        effects += _bulk(room, entry, reason, passed, granted, now)
        break
    return effects + place.announce(state, room, granted, now)


def _bulk(
    room: Room, first: Entry, reason: Reason, passed: set[int], granted: list[place.Placed], now: float
) -> list[Effect]:
    """Let all behind the first who must wait do so, too, except those who take no slot."""
    effects: list[Effect] = []
    for entry in list(room.queue):
        spec = entry.spec
        if entry.number in passed:
            continue
        if spec.tasks == 0 or spec.n > 1:
            found = place.find(room, entry, now, free_only=True)
            if found is not None:
                effects += place.grant(room, found, now)
                granted.append(found)
                continue
        if entry.number < first.number and spec.priority >= first.spec.priority:
            # it would go before the first, were it not for its key's share
            effects += _held(entry, Reason.FAIRNESS, now)
        else:
            effects += _held(entry, reason, now)
    return effects


def _held(entry: Entry, reason: Reason, now: float) -> list[Effect]:
    return [] if entry.reason is reason else life.hold(entry, reason, now)


def _no_room(room: Room, now: float) -> Reason:
    """Say what capacity lacks: slots, or the end of a cohort whose successors already wait in the engines."""
    takers = room.takers
    if takers and all(book.cohort(now).stage is Stage.SEALED and book.parked > 1 for book in takers):
        return Reason.COHORT_SEALED
    return Reason.NO_FREE_SLOT
