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
    back. Stock engines say nothing; their tickets stay `granted` until their first byte.
    """
    if not snapshot.native:
        return []
    best: dict[str, SlotView] = {}
    for slot in snapshot.slots:
        if slot.busy and slot.tag:
            known = best.get(slot.tag)
            if known is None or _PROGRESS[slot.member] > _PROGRESS[known.member]:
                best[slot.tag] = slot
    effects: list[Effect] = []
    ledger = room.ledger(snapshot.key)
    for charge in list(ledger.charges.values()) if ledger is not None else []:
        if charge.recalled:
            continue
        entry = state.tickets[charge.ticket]
        seen = best.get(charge.tag)
        target = None if seen is None else _STATE_OF_MEMBER[seen.member]
        if seen is None or target is None or entry.state is TicketState.CANCELLING:
            continue
        if snapshot.asked_at < entry.since:
            continue  # what moved it since was newer
        entry.cohort = seen.cohort
        charge.begun = target is not TicketState.NATIVE_QUEUED
        reason = Reason.COHORT_SEALED if target is TicketState.NATIVE_QUEUED else None
        effects += life.move(entry, target, reason, now)
    return effects
