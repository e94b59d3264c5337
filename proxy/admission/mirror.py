"""Engine-side states of granted tickets, as their slots show them. Pure."""

from proxy.admission import life
from proxy.admission.events import Effect
from proxy.admission.state import Room, State
from proxy.types import MemberState, Reason, SlotView, Snapshot, TicketState

_STATE_OF_MEMBER: dict[MemberState, TicketState | None] = {
    MemberState.NONE: None,
    MemberState.QUEUED: TicketState.NATIVE_QUEUED,
    MemberState.PREFILL: TicketState.PREFILL,
    MemberState.READY: TicketState.READY,
    MemberState.PAUSED: TicketState.PAUSED,
    MemberState.GENERATE: TicketState.GENERATING,
}
_PROGRESS: dict[MemberState, int] = {member: rank for rank, member in enumerate(_STATE_OF_MEMBER)}
"""A request with several tasks is where its most advanced task is."""


def reflect(state: State, room: Room, snapshot: Snapshot, now: float) -> list[Effect]:
    """Set the states of a generation's granted tickets to what their slots say.

    A ticket without a slot keeps its state: its task is on the way there, or its answer on the way
    back. Where every slot is another's it waits for one in the engine's own queue, as a standby does. Stock
    engines say nothing; their tickets stay `granted` until their first byte.
    """
    if not snapshot.native:
        return []
    full = all(slot.busy for slot in snapshot.slots)
    best: dict[str, SlotView] = {}
    for slot in snapshot.slots:
        if slot.busy and slot.tag:
            known = best.get(slot.tag)
            if known is None or _PROGRESS[slot.member] > _PROGRESS[known.member]:
                best[slot.tag] = slot
    effects: list[Effect] = []
    ledger = room.ledger(snapshot.key)
    if ledger is None:
        return effects
    for charge in list(ledger.charges.values()):
        if charge.recalled:
            continue
        entry = state.tickets[charge.ticket]
        if snapshot.asked_at < entry.since:
            continue  # what moved it since was newer
        seen = best.get(charge.tag)
        if seen is None:
            if full and entry.state is TicketState.GRANTED and charge.cost > 0 and not entry.committed:
                behind = Reason.COHORT_SEALED if ledger.phased else Reason.NO_FREE_SLOT
                effects += life.move(entry, TicketState.NATIVE_QUEUED, behind, now)
            continue
        target = _STATE_OF_MEMBER[seen.member]
        if target is None or entry.state is TicketState.CANCELLING:
            continue
        entry.cohort = seen.cohort
        charge.begun = target is not TicketState.NATIVE_QUEUED
        reason = Reason.COHORT_SEALED if target is TicketState.NATIVE_QUEUED else None
        effects += life.move(entry, target, reason, now)
    return effects
