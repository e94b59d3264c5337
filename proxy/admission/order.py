"""In which order waiting tickets are offered: the policy, and nothing else. Pure.

Class first; within a class the key with the smallest counter; within a key arrival. Ageing bounds any
wait: once a ticket has waited `age_after_s`, it stands in a second line by arrival, and every
`age_every`-th grant goes to the head of that line. A turn is charged to its key like any other grant, so
fair shares hold as long as a key's share is at least one in `age_every`.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from itertools import islice, takewhile

from proxy.admission.entry import Entry
from proxy.admission.records import Limits
from proxy.admission.state import Room
from proxy.admission.waiting import Queue


@dataclass(frozen=True, slots=True)
class Turn:
    """Who is next, and whether by age."""

    entry: Entry
    aged: bool = False


def line(room: Room, limits: Limits, now: float) -> Iterator[Turn]:
    """Yield a model's waiting tickets in the order in which they are to be offered.

    The caller may grant what it was given before it asks on: counters and turns are read anew each time.
    Nobody may join meanwhile. The first few cost little, however long the queue is.
    """
    return _line(room, limits, now, _Live(room))


def projected(room: Room, limits: Limits, now: float) -> Iterator[Entry]:
    """Yield the whole line as it would go if everybody were granted in turn: what a position means."""
    return (turn.entry for turn in _line(room, limits, now, _Projection(room)))


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
    gone: set[int] = set()
    old: list[Entry] | None = None
    fair = _by_share(room.queue, book, gone) if limits.fair_share else _by_arrival(room.queue, gone)
    while True:
        oldest: Entry | None = None
        if book.turns >= limits.age_every - 1:
            if old is None:
                old = list(takewhile(lambda entry: aged(entry, limits, now), room.queue))
            oldest = next((entry for entry in old if entry.number not in gone), None)
        if oldest is not None:
            turn = Turn(oldest, aged=True)
        else:
            entry = next(fair, None)
            if entry is None:
                return
            turn = Turn(entry)
        gone.add(turn.entry.number)
        yield turn
        book.given(turn)


def _by_arrival(queue: Queue, gone: set[int]) -> Iterator[Entry]:
    for rank in sorted(queue.lines, reverse=True):
        for entry in merge(*map(list, queue.lines[rank].values()), key=lambda entry: entry.number):
            if entry.number not in gone:
                yield entry


def _by_share(queue: Queue, book: _Live | _Projection, gone: set[int]) -> Iterator[Entry]:
    for rank in sorted(queue.lines, reverse=True):
        yield from _of_a_class([_Own(mine) for mine in queue.lines.get(rank, {}).values()], book, gone)


class _Own:
    """A key's own line while it is walked, though tickets leave it: what is gone is skipped by number."""

    def __init__(self, mine: list[Entry]) -> None:
        self._mine = mine
        self._after = -1

    def first(self, gone: set[int]) -> Entry | None:
        """Return the first that was not given yet."""
        start = bisect_right(self._mine, self._after, key=lambda entry: entry.number)
        for entry in islice(self._mine, start, None):
            if entry.number not in gone:
                self._after = entry.number - 1
                return entry
        return None


def _of_a_class(keys: list[_Own], book: _Live | _Projection, gone: set[int]) -> Iterator[Entry]:
    """Merge the keys' own lines: smallest counter first, ties by arrival of their next."""
    heap: list[tuple[float, int, _Own]] = []
    for own in keys:
        _push(heap, own, book, gone)
    while heap:
        counter, number, own = heappop(heap)
        entry = own.first(gone)
        if entry is None:
            continue
        if (book.counter(entry), entry.number) != (counter, number):
            # turns by age took from this key's line and charged it since it was put here
            _push(heap, own, book, gone)
            continue
        yield entry
        _push(heap, own, book, gone)


def _push(heap: list[tuple[float, int, _Own]], own: _Own, book: _Live | _Projection, gone: set[int]) -> None:
    entry = own.first(gone)
    if entry is not None:
        heappush(heap, (book.counter(entry), entry.number, own))
