"""A ticket's steps from one place to the next, with the accounts of what it waited for. Pure.

Every function returns the effects of what it did. Nothing else moves a ticket.
"""

from collections.abc import Iterator

from proxy.admission import accounts
from proxy.admission.entry import TRANSITIONS, Budget, Entry, IllegalTransitionError
from proxy.admission.events import Effect, Ended, Finished, Returned, Waited
from proxy.admission.records import Ending, outcome_of
from proxy.admission.state import Room, State
from proxy.errors import ErrorCode, ProxyError
from proxy.types import Outcome, Reason, TicketState

_EXPIRED: dict[Budget, tuple[ErrorCode, str]] = {
    Budget.QUEUE: (
        ErrorCode.QUEUE_TIMEOUT,
        "no engine slot became free within admission.queue_timeout_s ({limit:g} s); try again later",
    ),
    Budget.LOAD: (
        ErrorCode.LOAD_TIMEOUT,
        "the model was not ready within budgets.load_timeout_s ({limit:g} s): see its log or raise it",
    ),
    Budget.GATE: (
        ErrorCode.GATE_HOLD_TIMEOUT,
        "the model stayed closed for longer than admission.gate_hold_max_s ({limit:g} s)",
    ),
}


def move(entry: Entry, state: TicketState, reason: Reason | None, now: float) -> list[Effect]:
    """Put a ticket into a state with a reason to wait (or none); close the account of the old reason.

    Raises `IllegalTransitionError`, changing nothing, where the table does not lead there.
    """
    if state is not entry.state and state not in TRANSITIONS[entry.state]:
        raise IllegalTransitionError(f"ticket {entry.spec.id}: {entry.state} does not lead to {state}")
    if state is entry.state and reason is entry.reason:
        return []
    seconds = now - entry.since
    entry.lived[entry.state] = entry.lived.get(entry.state, 0.0) + seconds
    effects: list[Effect] = []
    budget = entry.budget
    if budget is not None:
        entry.spent[budget] = entry.spent.get(budget, 0.0) + seconds
    if entry.reason is not None:
        entry.held[entry.reason] = entry.held.get(entry.reason, 0.0) + seconds
        effects.append(Waited(entry.spec.id, entry.spec.model, entry.reason, seconds))
    entry.state = state
    entry.reason = reason
    entry.since = now
    entry.due_known = False
    return effects


def hold(entry: Entry, reason: Reason, now: float) -> list[Effect]:
    """Let a waiting ticket wait, for this reason."""
    return move(entry, TicketState.QUEUED, reason, now)


def settle(entry: Entry, outcome: Outcome, code: str, now: float) -> list[Effect]:
    """Give a ticket its one outcome; a second one is ignored."""
    if entry.outcome is not None:
        return []
    accounts.ended(entry, outcome)
    entry.outcome = outcome
    entry.finished_at = now
    return [
        Finished(
            Ending(
                id=entry.spec.id,
                spec=entry.spec,
                outcome=outcome,
                code=code,
                age_s=now - entry.arrived_at,
                queued_s=entry.queued_s(now),
                held_s=held_s(entry, now),
                state=entry.state,
            )
        )
    ]


def remove(state: State, entry: Entry, now: float) -> list[Effect]:
    """Take a ticket out of everything: its place in the queue, the list of the living, its key's account."""
    room = state.room(entry.spec.model)
    shares = room.shares.of(entry.account)
    if entry.waiting:
        room.queue.remove(entry)
        shares.go(entry.account)
    effects = move(entry, TicketState.DONE, None, now)
    del state.tickets[entry.spec.id]
    accounts.decoded(entry, state.limits)
    shares.leave(entry.account)
    return effects


def requeue(room: Room, entry: Entry, now: float) -> list[Effect]:
    """Put a recalled ticket back where it stood; what its grant was charged is given back."""
    accounts.refund(entry)
    entry.recalling = False
    entry.recalls += 1
    entry.grant = entry.granted_at = entry.cohort = None
    entry.cost = 0
    effects = move(entry, TicketState.QUEUED, None, now)
    room.queue.add(entry)
    room.shares.of(entry.account).come_back(entry.account)
    return [*effects, Returned(entry.spec.id, entry.spec.model)]


def end_waiting(state: State, entry: Entry, error: ProxyError, now: float) -> list[Effect]:
    """End a ticket that has no grant: its requester is told why."""
    entry.ended = error
    effects: list[Effect] = [Ended(entry.spec.id, error)]
    effects += settle(entry, outcome_of(error.code), error.code.value, now)
    return effects + remove(state, entry, now)


def refuse(state: State, entry: Entry, error: ProxyError, now: float) -> list[Effect]:
    """Turn a newcomer away at the door."""
    return settle(entry, Outcome.REJECTED, error.code.value, now) + end_waiting(state, entry, error, now)


def end_running(entry: Entry, error: ProxyError, now: float) -> list[Effect]:
    """End a ticket whose engine lives: it stays charged until its requester and the engine let go."""
    if entry.ended is not None or entry.outcome is not None:
        return []
    entry.ended = error
    effects: list[Effect] = [Ended(entry.spec.id, error)]
    effects += settle(entry, outcome_of(error.code), error.code.value, now)
    return effects + move(entry, TicketState.CANCELLING, None, now)


def end_orphan(state: State, entry: Entry, error: ProxyError, now: float) -> list[Effect]:
    """End a ticket whose engine is gone: there is nothing left to be charged for."""
    effects: list[Effect] = []
    if entry.ended is None and entry.outcome is None:
        entry.ended = error
        effects.append(Ended(entry.spec.id, error))
    effects += settle(entry, outcome_of(error.code), error.code.value, now)
    return effects + remove(state, entry, now)


def end(state: State, entry: Entry, error: ProxyError, now: float) -> list[Effect]:
    """End a ticket from elsewhere, wherever it is."""
    return end_waiting(state, entry, error, now) if entry.waiting else end_running(entry, error, now)


def held_s(entry: Entry, now: float) -> dict[Reason, float]:
    """Return the seconds waited by reason, the present one included."""
    held = dict(entry.held)
    if entry.reason is not None:
        held[entry.reason] = held.get(entry.reason, 0.0) + now - entry.since
    return held


def left_s(state: State, entry: Entry, now: float) -> dict[Budget, float]:
    """Return what is left of each budget that is on, the time of the running one counted up to now."""
    left: dict[Budget, float] = {}
    for budget in Budget:
        limit = _limit(state, entry, budget)
        if limit is not None:
            running = now - entry.since if entry.budget is budget else 0.0
            left[budget] = max(0.0, limit - entry.spent.get(budget, 0.0) - running)
    return left


def deadline(state: State, entry: Entry, now: float) -> float | None:
    """Return when the running budget of a ticket is spent, None when none runs or it is off.

    What the mirror said of a granted ticket counts only while the mirror is fresh.
    """
    if not entry.due_known:
        entry.due_known = True
        entry.due = _due(state, entry)
    if entry.due is None or entry.waiting:
        return entry.due
    ledger = state.ledger_of(entry)
    return entry.due if ledger is not None and ledger.mirror(now).fresh else None


def _due(state: State, entry: Entry) -> float | None:
    budget = entry.budget
    limit = None if budget is None else _limit(state, entry, budget)
    if budget is None or limit is None or entry.ended is not None:
        return None
    return entry.since + limit - entry.spent.get(budget, 0.0)


def expire(state: State, now: float) -> Iterator[tuple[Room, list[Effect]]]:
    """End every ticket whose running budget is spent."""
    for entry in list(state.tickets.values()):
        due = deadline(state, entry, now)
        budget = entry.budget
        if due is None or due > now or budget is None:
            continue
        code, text = _EXPIRED[budget]
        limit = _limit(state, entry, budget) or 0.0
        room = state.room(entry.spec.model)
        retry = retry_after_s(room, now) if code is ErrorCode.QUEUE_TIMEOUT else None
        error = ProxyError(code, f"{entry.spec.model}: {text.format(limit=limit)}", retry_after_s=retry)
        yield room, end(state, entry, error, now)


def retry_after_s(room: Room, now: float, *, ahead: int | None = None) -> float:
    """Return when a client refused by this model should come back, in seconds.

    `ahead` requests have to be served until then (None: all that wait).
    """
    in_flight = sum(ledger.info.slots + int(ledger.phased) for ledger in room.takers)
    return room.turnover.retry_after_s(now, len(room.queue) if ahead is None else ahead, in_flight)


def _limit(state: State, entry: Entry, budget: Budget) -> float | None:
    limits = state.limits
    match budget:
        case Budget.QUEUE:
            return limits.queue_timeout_s
        case Budget.LOAD:
            return limits.of(entry.spec.model).load_timeout_s
        case Budget.GATE:
            return limits.gate_hold_max_s
