"""The core of admission: `step(state, event, now)` → effects. Pure: no clock, no I/O, no log.

An event that cannot be (an unknown ticket's release, a dead generation's snapshot) changes nothing.
Every step ends with the decision for each model that was touched, so that capacity and waiting
tickets never meet without a grant, and with no deadline in the past, so that a timer is ahead of each.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import assert_never

from proxy.admission import accounts, door, life, mirror, shape
from proxy.admission.decide import decide
from proxy.admission.entry import Budget, Entry
from proxy.admission.events import (
    ArmTimer,
    Arrived,
    BackendDown,
    BackendDraining,
    BackendReady,
    Cancelled,
    Committed,
    Configured,
    Effect,
    Event,
    FirstByte,
    GateSet,
    LoadFailed,
    Mismatch,
    ModelDropped,
    ModelEnded,
    Poke,
    Released,
    Reported,
    Requeued,
    Seen,
    ShutDown,
    SwapWait,
    Tick,
)
from proxy.admission.ledger import Charge, Ledger
from proxy.admission.state import Room, State
from proxy.errors import ErrorCode, ProxyError
from proxy.types import BackendKey, Outcome, Snapshot, TicketState


def step(state: State, event: Event, now: float) -> list[Effect]:
    """Apply one event at a time not before the last one's; return what is to be done, in order.

    Raises `ValueError` for the arrival of an id that is in use, and changes nothing then.
    """
    if isinstance(event, Arrived) and state.taken(event.spec.id):
        raise ValueError(f"ticket {event.spec.id} is already here")
    rooms: dict[str, Room] = {}
    effects: list[Effect] = []
    due = state.timer is not None and now >= state.timer
    if due:
        effects += _time_passed(state, rooms, now)
    effects += _apply(state, event, rooms, now)
    for room in rooms.values():
        effects += decide(state, room, now, arrived=isinstance(event, Arrived))
    if isinstance(event, Arrived):
        effects += door.bounded(state, event.spec, now, again=due)
    at = _next_wake(state, now)
    while at is not None and at <= now:
        # the step itself put a deadline into the past: limits that were lowered, a mirror that is back, a
        # budget that runs again; each turn ends whom it found, so there are no more turns than tickets
        ended = _overdue(state, rooms, now)
        if not ended:
            break
        effects += ended
        at = _next_wake(state, now)
    _forget_dropped(state, rooms)
    if at != state.timer:
        state.timer = at
        effects.append(ArmTimer(at))
    return effects


def _apply(state: State, event: Event, rooms: dict[str, Room], now: float) -> list[Effect]:
    match event:
        case Arrived(spec):
            room = rooms[spec.model] = state.room(spec.model)
            return door.enter(state, room, spec, now)
        case Released():
            return _released(state, event, rooms, now)
        case Cancelled(ticket, error):
            entry = state.tickets.get(ticket)
            return [] if entry is None else _touch(state, entry, rooms, life.end(state, entry, error, now))
        case FirstByte(ticket):
            return _first_byte(state, ticket, now)
        case Committed(ticket):
            return _committed(state, ticket, rooms)
        case Requeued(ticket):
            return _requeued(state, ticket, rooms, now)
        case Reported():
            return _reported(state, event, rooms)
        case SwapWait(model, waiting):
            room = rooms[model] = state.room(model)
            room.swap_wait = waiting
            return []
        case BackendReady(key, info):
            limits = state.limits
            return _ready(
                state, Ledger(key, info, now, limits.stale_after_s, limits.native_standby), rooms, now
            )
        case BackendDown(key, error):
            return _down(state, key, error, rooms, now)
        case BackendDraining(key, draining):
            known = state.rooms.get(key.model)
            if known is not None and (ledger := known.ledger(key)) is not None:
                rooms[key.model], ledger.draining = known, draining
            return []
        case LoadFailed(model, error):
            return _load_failed(state, model, error, rooms, now)
        case Seen(snapshot):
            return _seen(state, snapshot, rooms, now)
        case GateSet(model, admin, reason, mode):
            room = rooms[model] = state.room(model)
            room.admin, room.gate_reason, room.gate_mode = admin, reason, mode
            return []
        case ModelEnded(model, error):
            return _model_ended(state, model, error, rooms, now)
        case ModelDropped(model, error):
            room = rooms[model] = state.room(model)
            room.dropped = True
            return _all(life.end_waiting(state, entry, error, now) for entry in list(room.queue))
        case ShutDown(error, cut):
            return _shut_down(state, error, rooms, now, cut=cut)
        case Configured(limits):
            state.limits = limits
            for entry in state.tickets.values():
                entry.due_known = False
            for room in state.rooms.values():
                for ledger in room.books.values():
                    ledger.stale_after_s = limits.stale_after_s
                    ledger.native_standby = limits.native_standby
            return _mirrors_aged(state, rooms, now)
        case Tick():
            rooms.update(state.rooms)
            return []
        case _:
            assert_never(event)


def _released(state: State, event: Released, rooms: dict[str, Room], now: float) -> list[Effect]:
    entry = state.tickets.get(event.ticket)
    if entry is None:
        return []
    room = rooms[entry.spec.model] = state.room(entry.spec.model)
    effects = life.settle(entry, event.outcome, event.code, now)
    held = state.charge_of(entry)
    if held is None:
        return effects + life.remove(state, entry, now)
    ledger, charge = held
    if charge.released_at is not None:
        return effects
    if ledger.release(charge.tag, now, upstream_open=event.upstream_open):
        if entry.outcome is Outcome.COMPLETED and entry.granted_at is not None:
            room.turnover.served(now - entry.granted_at, entry.cost)
            ledger.turnover.served(now - entry.granted_at, entry.cost)
        return effects + life.remove(state, entry, now)
    if entry.state is not TicketState.CANCELLING:
        effects += life.move(entry, TicketState.CANCELLING, None, now)
    return [*effects, Poke(ledger.key)]


def _first_byte(state: State, ticket: str, now: float) -> list[Effect]:
    """Believe a stream's first byte at once: the mirror comes later, on a stock engine never."""
    entry = state.tickets.get(ticket)
    waits = {TicketState.GRANTED, TicketState.NATIVE_QUEUED, TicketState.PREFILL, TicketState.READY}
    if entry is None or entry.state not in waits or not entry.spec.stream:
        return []
    held = state.charge_of(entry)
    if held is not None:
        held[1].begun = True
    return life.move(entry, TicketState.GENERATING, None, now)


def _committed(state: State, ticket: str, rooms: dict[str, Room]) -> list[Effect]:
    entry = state.tickets.get(ticket)
    if entry is None or entry.grant is None:
        return []
    entry.committed = True
    if not entry.recalling:
        return []
    # a recall that came too late is void; who was to profit from it may want another ticket's place
    entry.recalling = False
    return _touch(state, entry, rooms, [])


def _requeued(state: State, ticket: str, rooms: dict[str, Room], now: float) -> list[Effect]:
    entry = state.tickets.get(ticket)
    held = None if entry is None else state.charge_of(entry)
    if entry is None or held is None or not entry.recalling or entry.outcome is not None:
        return []
    ledger, charge = held
    room = rooms[entry.spec.model] = state.room(entry.spec.model)
    charge.recalled = True
    ledger.release(charge.tag, now, upstream_open=True)
    effects = life.requeue(room, entry, now)
    if state.closed is not None:
        effects += life.end_waiting(state, entry, state.closed, now)
    elif room.dropped:
        gone = ProxyError(ErrorCode.MODEL_NOT_FOUND, f"{room.model} was removed from the configuration")
        effects += life.end_waiting(state, entry, gone, now)
    return [*effects, Poke(ledger.key)]


def _reported(state: State, event: Reported, rooms: dict[str, Room]) -> list[Effect]:
    entry = state.tickets.get(event.ticket)
    if entry is not None:
        # counters move, and with them who is first
        room = rooms[entry.spec.model] = state.room(entry.spec.model)
        accounts.reported(
            room, entry, state.limits, event.prompt_tokens, event.cached_tokens, event.generated_tokens
        )
    return []


def _ready(state: State, ledger: Ledger, rooms: dict[str, Room], now: float) -> list[Effect]:
    key = ledger.key
    room = state.room(key.model)
    known = room.books.get(key.backend)
    if key.generation <= room.retired.get(key.backend, -1) or (
        known and known.key.generation >= key.generation
    ):
        return []
    effects: list[Effect] = []
    if known is not None:
        error = ProxyError(ErrorCode.UPSTREAM_ERROR, f"{key.model}: its backend was replaced by a newer one")
        effects += _down(state, known.key, error, rooms, now)
    rooms[key.model] = room
    room.books[key.backend] = ledger
    room.load_asked = room.went_down = room.swap_wait = False
    return effects


def _down(
    state: State, key: BackendKey, error: ProxyError, rooms: dict[str, Room], now: float
) -> list[Effect]:
    room = state.rooms.get(key.model)
    if room is None or key.generation <= room.retired.get(key.backend, -1):
        return []
    rooms[key.model] = room
    room.retired[key.backend] = key.generation
    ledger = room.ledger(key)
    if ledger is None:
        return []
    del room.books[key.backend]
    if not room.books:
        room.load_asked, room.went_down = False, True
    mine = [state.tickets[charge.ticket] for charge in ledger.charges.values() if not charge.recalled]
    return _all(life.end_orphan(state, entry, error, now) for entry in mine)


def _load_failed(
    state: State, model: str, error: ProxyError, rooms: dict[str, Room], now: float
) -> list[Effect]:
    room = state.rooms.get(model)
    if room is None:
        return []
    room.load_asked = room.swap_wait = False
    if room.books:
        return []
    rooms[model] = room
    counted_on_it = [entry for entry in room.queue if entry.budget is Budget.LOAD]
    return _all(life.end_waiting(state, entry, error, now) for entry in counted_on_it)


def _seen(state: State, snapshot: Snapshot, rooms: dict[str, Room], now: float) -> list[Effect]:
    key = snapshot.key
    room = state.rooms.get(key.model)
    ledger = None if room is None else room.ledger(key)
    if room is None or ledger is None or ledger.knows_better_than(snapshot):
        return []
    rooms[key.model] = room
    before = ledger.disputed
    gone = ledger.observe(snapshot)
    effects = _freed(state, gone, now)
    effects += mirror.reflect(state, room, snapshot, now)
    ledger.pace.observe(snapshot, sum(entry.charged for entry in _at_work(state, ledger)))
    if ledger.disputed > before:
        effects.append(Mismatch(key, ledger.disputed))
    return effects


def _model_ended(
    state: State, model: str, error: ProxyError, rooms: dict[str, Room], now: float
) -> list[Effect]:
    room = rooms[model] = state.room(model)
    effects = _all(life.end_waiting(state, entry, error, now) for entry in list(room.queue))
    for ledger in list(room.books.values()):
        effects += _down(state, ledger.key, error, rooms, now)
    room.load_asked = room.went_down = False
    return effects


def _shut_down(
    state: State, error: ProxyError, rooms: dict[str, Room], now: float, *, cut: bool
) -> list[Effect]:
    state.closed = error
    rooms.update(state.rooms)
    effects = _all(life.end_waiting(state, entry, error, now) for entry in list(state.waiting()))
    if cut:
        effects += _all(life.end_running(entry, error, now) for entry in list(state.tickets.values()))
    return effects


def _time_passed(state: State, rooms: dict[str, Room], now: float) -> list[Effect]:
    effects = _mirrors_aged(state, rooms, now)
    return effects + _all(ended for _, ended in life.expire(state, now))


def _mirrors_aged(state: State, rooms: dict[str, Room], now: float) -> list[Effect]:
    """Draw the consequences of what engines have not shown for too long, and touch every model."""
    rooms.update(state.rooms)
    books = [ledger for room in state.rooms.values() for ledger in room.books.values()]
    return _all(_freed(state, ledger.settle(now), now) for ledger in books)


def _overdue(state: State, rooms: dict[str, Room], now: float) -> list[Effect]:
    """End whose time is over and decide anew for those who are left."""
    effects: list[Effect] = []
    late: dict[str, Room] = {}
    for room, ended in life.expire(state, now):
        late[room.model] = room
        effects += ended
    rooms.update(late)
    return effects + _all(decide(state, room, now) for room in late.values())


def _next_wake(state: State, now: float) -> float | None:
    """Return the earliest time at which time alone changes an answer; not after `now` if a deadline is past."""
    dues = (life.deadline(state, entry, now) for entry in state.tickets.values())
    first = min((due for due in dues if due is not None), default=None)
    if first is not None and first <= now:
        return first
    times = [] if first is None else [first]
    for room in state.rooms.values():
        times += [book.mirror_changes_at() for book in room.books.values() if room.queue or book.charges]
        patience = state.limits.wide_patience_s
        times += [entry.wide_since + patience for entry in room.queue if entry.wide_since is not None]
        if state.limits.shape:
            overs = (shape.over_at(entry, state.limits) for entry in room.queue)
            times += [over for over in overs if over is not None]
        if state.limits.age_after_s is not None:
            of_age = room.queue.next_of_age(state.limits.age_after_s, now)
            times += [] if of_age is None else [of_age]
    # what is past of these has had its effect on the decisions of this step
    return min((at for at in times if at > now), default=None)


def _forget_dropped(state: State, rooms: dict[str, Room]) -> None:
    """Drop the room of a model that left the configuration once nothing of it is alive."""
    for room in rooms.values():
        if room.dropped and not room.queue and not room.books:
            del state.rooms[room.model]


def _at_work(state: State, ledger: Ledger) -> Iterator[Entry]:
    for charge in ledger.charges.values():
        entry = state.tickets.get(charge.ticket)
        if charge.begun and not charge.recalled and entry is not None:
            yield entry


def _freed(state: State, gone: Iterable[Charge], now: float) -> list[Effect]:
    """End the tickets of grants that the engine let go of; a recalled one's ticket lives on."""
    return _all(
        life.remove(state, state.tickets[charge.ticket], now) for charge in gone if not charge.recalled
    )


def _touch(state: State, entry: Entry, rooms: dict[str, Room], effects: list[Effect]) -> list[Effect]:
    rooms[entry.spec.model] = state.room(entry.spec.model)
    return effects


def _all(parts: Iterable[list[Effect]]) -> list[Effect]:
    return list(chain.from_iterable(parts))
