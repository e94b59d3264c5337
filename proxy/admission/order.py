"""In which order waiting tickets are offered: the policy, and nothing else. Pure.

Class first; within a class the key with the smallest counter; within a key arrival. Ageing bounds any
wait: once a ticket has waited `age_after_s`, it stands in a second line by arrival, and every
`age_every`-th grant goes to the head of that line. A turn is charged to its key like any other grant, so
fair shares hold as long as a key's share is at least one in `age_every`.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from proxy.admission.records import Limits
from proxy.admission.state import Entry, Room


@dataclass(frozen=True, slots=True)
class Turn:
    """Who is next, and whether by age."""

    entry: Entry
    aged: bool = False


def line(room: Room, limits: Limits, now: float) -> Iterator[Turn]:
    """Yield a model's waiting tickets in the order in which they are to be offered.

    The caller may grant what it was given before it asks on: counters and turns are read anew each time.
    The queue itself is copied at the first `next`.
    """
    yield from _line(room, limits, now, _Live(room))


def projected(room: Room, limits: Limits, now: float) -> list[Entry]:
    """Return the whole line as it would go if everybody were granted in turn: what a position means."""
    return [turn.entry for turn in _line(room, limits, now, _Projection(room))]


def aged(entry: Entry, limits: Limits, now: float) -> bool:
    """Whether a waiting ticket stands in the line of the aged."""
    return limits.age_after_s is not None and now >= entry.senior_at + limits.age_after_s


class _Live:
    """Counters and turns as they are."""

    def __init__(self, room: Room) -> None:
        self.room = room

    def counter(self, entry: Entry) -> float:
        return entry.account.counter

    @property
    def turns(self) -> int:
        return self.room.turns

    def given(self, turn: Turn) -> None:
        """Nothing to do: the grant itself was or was not."""


class _Projection:
    """Counters and turns as they would be, with each ticket's estimate charged."""

    def __init__(self, room: Room) -> None:
        self.turns = room.turns
        self.ahead: dict[tuple[int, str], float] = {}

    def counter(self, entry: Entry) -> float:
        account = entry.account
        return account.counter + self.ahead.get((account.rank, account.key), 0.0)

    def given(self, turn: Turn) -> None:
        account = turn.entry.account
        if turn.entry.spec.tasks > 0:
            mine = (account.rank, account.key)
            self.ahead[mine] = self.ahead.get(mine, 0.0) + turn.entry.need / account.weight
            self.turns = 0 if turn.aged else self.turns + 1


def _line(room: Room, limits: Limits, now: float, book: _Live | _Projection) -> Iterator[Turn]:
    queue = list(room.queue)
    if not queue:
        return
    old = deque(entry for entry in queue if aged(entry, limits, now))
    gone: set[int] = set()
    fair = _by_share(queue, book, gone) if limits.fair_share else _by_arrival(queue, gone)
    while True:
        while old and old[0].number in gone:
            old.popleft()
        if old and book.turns >= limits.age_every - 1:
            turn = Turn(old.popleft(), aged=True)
        else:
            entry = next(fair, None)
            if entry is None:
                return
            turn = Turn(entry)
        gone.add(turn.entry.number)
        yield turn
        book.given(turn)


def _by_arrival(queue: list[Entry], gone: set[int]) -> Iterator[Entry]:
    for entry in sorted(queue, key=lambda entry: -entry.spec.priority):  # stable: arrival within a class
        if entry.number not in gone:
            yield entry


def _by_share(queue: list[Entry], book: _Live | _Projection, gone: set[int]) -> Iterator[Entry]:
    classes: dict[int, dict[str, deque[Entry]]] = {}
    for entry in queue:
        keys = classes.setdefault(entry.spec.priority, {})
        mine = keys.get(entry.spec.key)
        if mine is None:
            mine = keys[entry.spec.key] = deque()
        mine.append(entry)
    for rank in sorted(classes, reverse=True):
        yield from _of_a_class(list(classes[rank].values()), book, gone)


def _of_a_class(keys: list[deque[Entry]], book: _Live | _Projection, gone: set[int]) -> Iterator[Entry]:
    """Merge the keys' own lines: smallest counter first, ties by arrival of their next."""
    heap = [(book.counter(mine[0]), mine[0].number, mine) for mine in keys]
    heapify(heap)
    while heap:
        *then, mine = heappop(heap)
        while mine and mine[0].number in gone:
            mine.popleft()
        if not mine:
            continue
        now = (book.counter(mine[0]), mine[0].number)
        if [*now] != then:
            # turns by age took from this key's line and charged it since it was put here
            heappush(heap, (*now, mine))
            continue
        yield mine.popleft()
        if mine:
            heappush(heap, (book.counter(mine[0]), mine[0].number, mine))
