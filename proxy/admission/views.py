"""What admission shows of itself: frozen views, and the check of its own rules. Pure."""

from collections import Counter
from collections.abc import Iterator

from proxy.admission import life
from proxy.admission.entry import Budget, Entry
from proxy.admission.life import deadline, held_s
from proxy.admission.order import projected
from proxy.admission.records import LiveTickets, ModelAdmissionView, TicketView
from proxy.admission.state import Room, State
from proxy.types import TicketState

_SETTING = {
    Budget.QUEUE: "queue_timeout_s",
    Budget.LOAD: "load_timeout_s",
    Budget.GATE: "gate_hold_max_s",
}
_NOT_RUNNING = frozenset({TicketState.QUEUED, TicketState.CANCELLING, TicketState.DONE})


def places(state: State, model: str, now: float) -> dict[str, int]:
    """Return the 1-based places of a model's waiting tickets, by id."""
    room = state.rooms.get(model)
    line = () if room is None else projected(room, state.limits, now)
    return {entry.spec.id: place for place, entry in enumerate(line, start=1)}


def ticket_view(state: State, entry: Entry, place: int, now: float) -> TicketView:
    """Return one ticket as a record; `place` is its position."""
    spec = entry.spec
    left = {_SETTING[budget]: seconds for budget, seconds in life.left_s(state, entry, now).items()}
    return TicketView(
        id=spec.id,
        model=spec.model,
        key=spec.key,
        priority=spec.priority_name,
        endpoint=spec.endpoint,
        stream=spec.stream,
        state=entry.state,
        reason=entry.reason,
        position=place,
        age_s=now - entry.arrived_at,
        queued_s=entry.queued_s(now),
        tasks=spec.tasks,
        cost=entry.cost,
        body_bytes=spec.body_bytes,
        tokens=entry.tokens,
        backend=entry.grant.key if entry.grant else None,
        tag=entry.grant.tag if entry.grant else "",
        cohort=entry.cohort,
        held_s=held_s(entry, now),
        recalls=entry.recalls,
        estimate_tokens=round(entry.need),
        left_s=left,
    )


def ticket_views(state: State, now: float) -> list[TicketView]:
    """Return all live tickets: by model, running before waiting, each in order."""
    found: dict[str, int] = {}
    for model in state.rooms:
        found |= places(state, model, now)
    ordered = sorted(
        state.tickets.values(),
        key=lambda entry: (entry.spec.model, found.get(entry.spec.id, 0), entry.number),
    )
    return [ticket_view(state, entry, found.get(entry.spec.id, 0), now) for entry in ordered]


def live(state: State, model: str | None = None) -> LiveTickets:
    """Return who is there, of a model or (None) of all: no order of the line, no records, so ask it often."""
    waiting: list[str] = []
    running: list[str] = []
    cancelling: list[str] = []
    place = {TicketState.QUEUED: waiting, TicketState.CANCELLING: cancelling}
    for name, entry in state.tickets.items():
        if model is None or entry.spec.model == model:
            place.get(entry.state, running).append(name)
    tags = (
        tag
        for room in state.rooms.values()
        if model is None or room.model == model
        for ledger in room.books.values()
        for tag in ledger.charges
    )
    return LiveTickets(tuple(waiting), tuple(running), tuple(cancelling), frozenset(tags))


def model_view(state: State, model: str, now: float) -> ModelAdmissionView:
    """Return one model's queue and books; an unknown model shows an empty, open room."""
    room = state.rooms.get(model, Room(model))
    mine = [entry for entry in state.tickets.values() if entry.spec.model == model]
    states = Counter(entry.state for entry in mine)
    return ModelAdmissionView(
        model=model,
        gate=room.admin,
        gate_reason=room.gate_reason,
        gate_mode=room.gate_mode,
        queued=len(room.queue),
        running=sum(1 for entry in mine if entry.state not in _NOT_RUNNING),
        cancelling=states[TicketState.CANCELLING],
        queued_bytes=sum(entry.spec.body_bytes for entry in room.queue),
        oldest_s=max((now - entry.arrived_at for entry in room.queue), default=0.0),
        reasons=Counter(entry.reason for entry in room.queue if entry.reason is not None),
        states=states,
        backends=tuple(ledger.view(now) for ledger in room.books.values()),
    )


def shares(state: State) -> dict[str, float]:
    """Return the sum of each key's virtual counters."""
    found: dict[str, float] = {}
    for room in state.rooms.values():
        for account in room.shares.accounts():
            found[account.key] = found.get(account.key, 0.0) + account.counter
    return found


def broken_rules(state: State, now: float) -> list[str]:
    """Return what is wrong with the state after a step, in words; empty when all rules hold.

    Cheap enough to be asked after every step of a test.
    """
    return [*_ledger_rules(state), *_waiting_rules(state, now)]


def _ledger_rules(state: State) -> Iterator[str]:
    charged: set[str] = set()
    for room in state.rooms.values():
        for ledger in room.books.values():
            live = [charge for charge in ledger.charges.values() if charge.released_at is None]
            extra = 1 if ledger.phased else 0
            room_for = ledger.info.slots + extra
            if sum(charge.cost for charge in live) > room_for:
                yield f"{ledger.key}: live grants cost more than {room_for}"
            if sum(c.cost for c in ledger.charges.values() if not c.in_the_dark) > room_for:
                yield f"{ledger.key}: grants cost more than {room_for}"
            if any(charge.wide for charge in live) and sum(1 for charge in live if charge.cost > 0) > 1:
                yield f"{ledger.key}: a wide request has company"
            for charge in ledger.charges.values():
                if charge.recalled:
                    if charge.released_at is None:
                        yield f"{charge.tag} was recalled and not released"
                    continue
                entry = state.tickets.get(charge.ticket)
                charged.add(charge.ticket)
                if entry is None or entry.grant is None or entry.grant.key != ledger.key:
                    yield f"{ledger.key}: charge of {charge.ticket} has no ticket"
                elif charge.released_at is not None and entry.state is not TicketState.CANCELLING:
                    yield f"{charge.ticket} was released and is {entry.state}"
    for entry in state.tickets.values():
        if entry.waiting == (entry.spec.id in charged):
            yield f"{entry.spec.id} is {entry.state} and {'charged' if entry.waiting else 'not charged'}"
        if entry.state is TicketState.DONE:
            yield f"{entry.spec.id} is done and still listed"


def _waiting_rules(state: State, now: float) -> Iterator[str]:
    queued = {id(entry) for entry in state.waiting()}
    off = {
        Budget.QUEUE: state.limits.queue_timeout_s is None,
        Budget.GATE: state.limits.gate_hold_max_s is None,
    }
    for entry in state.tickets.values():
        if entry.waiting != (id(entry) in queued):
            yield f"{entry.spec.id} is {entry.state} and {'not ' if entry.waiting else ''}in the queue"
        if entry.waiting and entry.reason is None:
            yield f"{entry.spec.id} waits without a reason"
        if entry.budget is None:
            continue
        no_limit = off.get(entry.budget, state.limits.of(entry.spec.model).load_timeout_s is None)
        due = deadline(state, entry, now)
        ledger = state.ledger_of(entry)
        # what a mirror that went dark said of a granted one does not count
        counted = entry.waiting or (ledger is not None and ledger.mirror(now).fresh and entry.outcome is None)
        if due is None and counted and not no_limit:
            yield f"{entry.spec.id} waits without a deadline"
        if due is not None and (state.timer is None or state.timer > due):
            yield f"{entry.spec.id} waits for {entry.reason or entry.state} and no timer covers its deadline"
