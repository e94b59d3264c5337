"""The door: who is let into the queue, in which place, and what those are told who are not. Pure."""

from proxy.admission import accounts, life
from proxy.admission.decide import decide, gate_error
from proxy.admission.entry import Entry
from proxy.admission.events import Effect
from proxy.admission.records import TicketSpec
from proxy.admission.retry import RETRY_MIN_S
from proxy.admission.state import Room, State
from proxy.errors import ErrorCode, ProxyError
from proxy.types import AdminState


def enter(state: State, room: Room, spec: TicketSpec, now: float) -> list[Effect]:
    """Put a newcomer into the queue, at the place of its first try if it comes back as it was told."""
    room.dropped = False
    state.arrivals += 1
    account = room.shares.enter(spec.key, spec.priority, spec.weight)
    told = room.returns.redeem((spec.key, spec.retry_id), now) if spec.retry_id else None
    entry = Entry(spec, state.arrivals, now, now, account, senior_at=now)
    if told is not None:
        entry.number, entry.senior_at, entry.promised = told.number, told.senior_at, True
    _, entry.need = accounts.estimate(room, entry)
    state.tickets[spec.id] = entry
    room.queue.add(entry)
    if state.closed is not None:
        return life.refuse(state, entry, state.closed, now)
    if room.admin is not AdminState.ENABLED and room.gate_mode == "reject":
        return life.refuse(state, entry, gate_error(room, now), now)
    return []


def bounded(state: State, spec: TicketSpec, now: float, *, again: bool) -> list[Effect]:
    """Refuse a newcomer that would have to wait where a bound is already reached.

    `again`: more than the arrival changed in this step, so the newcomer may have stood in the way of
    somebody who fits now.
    """
    entry = state.tickets.get(spec.id)
    if entry is None or not entry.waiting:
        return []
    room = state.room(spec.model)
    over = _over_a_bound(state, room, entry, now)
    if over is None:
        return []
    error = ProxyError(*over, retry_after_s=_come_back(room, entry, now))
    effects = life.refuse(state, entry, error, now)
    return effects + decide(state, room, now) if again else effects


def _come_back(room: Room, entry: Entry, now: float) -> float:
    """Tell a refused client when to try again; to one that can be recognised then, it is a promise."""
    spec = entry.spec
    who = (spec.key, spec.retry_id)
    told = room.returns.standing(who, now) if spec.retry_id else None
    if told is not None:
        return told
    after_s = life.retry_after_s(room, now, ahead=1)
    if spec.retry_id:
        room.returns.give(who, entry.number, entry.senior_at, now, after_s)
    return after_s


def _over_a_bound(state: State, room: Room, entry: Entry, now: float) -> tuple[ErrorCode, str] | None:
    limits, spec = state.limits, entry.spec
    bound, where = limits.of(spec.model).max_queue, f"models.{spec.model}.max_queue"
    if bound is None:
        bound, where = limits.max_queue, "admission.max_queue"
    if bound is not None and len(room.queue) > bound:
        return ErrorCode.QUEUE_FULL, f"{bound} requests are already waiting for {spec.model} ({where})"
    if bound is not None and not entry.promised and len(room.queue) > bound // 2:
        ahead_s = room.turnover.mean_s or RETRY_MIN_S
        kept = min(bound // 2, room.returns.places(now, ahead_s))
        if len(room.queue) > bound - kept:
            text = f"{spec.model}: the last {kept} of {bound} places ({where}) are kept for clients that were told to come back"
            return ErrorCode.QUEUE_FULL, text
    if spec.max_queue is not None:
        mine = sum(1 for entry in state.waiting() if entry.spec.key == spec.key)
        if mine > spec.max_queue:
            text = f"{spec.max_queue} requests of this API key are already waiting (its max_queue)"
            return ErrorCode.KEY_QUEUE_FULL, text
    cap = limits.max_queued_bytes
    if cap is not None and sum(entry.spec.body_bytes for entry in state.waiting()) > cap:
        return ErrorCode.QUEUE_FULL, f"the waiting bodies reached admission.max_queued_bytes ({cap})"
    return None
