"""Compares what the books say of a model with its processes, sockets and slots. Pure: facts in, differences out.

A difference that is seen only once is a request between two states, not an error: two looks are compared and what
both show counts. Nothing here ever touches a live request.
"""

from dataclasses import dataclass
from enum import StrEnum

from proxy.backends.ports import LiveRequests
from proxy.types import ModelState, SlotView


class Odd(StrEnum):
    """Kinds of differences."""

    STRAY_PROCESS = "stray_process"
    STALE_RECORD = "stale_record"
    PROCESS_GONE = "process_gone"
    FOREIGN_CONNECTION = "foreign_connection"
    UNKNOWN_SLOT = "unknown_slot"
    UNANSWERED_REQUEST = "unanswered_request"
    LOST_EXCHANGE = "lost_exchange"
    BOOKS = "books"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that does not fit. `subject` is what it is about: a process id, a slot, a request id."""

    odd: Odd
    subject: str
    words: str


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was found and what was done about it; an empty `repair` means that nothing could or should be."""

    difference: Difference
    repair: str = ""


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """The result for one model. `checked` names what could be compared."""

    model: str
    state: ModelState
    checked: tuple[str, ...]
    found: tuple[Repaired, ...] = ()

    @property
    def clean(self) -> bool:
        """Whether everything fits."""
        return not self.found


@dataclass(frozen=True, slots=True)
class Facts:
    """One look. `bearers` are live processes with one of this model's tokens, `family` those of the present one.

    `stale` are tokens of records without any process; `slots` is None where no snapshot is fresh; `foreign` counts
    connections to the engine that are not the proxy's.
    """

    state: ModelState
    live: LiveRequests
    exchanges: int
    pid: int | None = None
    pid_alive: bool = True
    bearers: frozenset[int] = frozenset()
    family: frozenset[int] = frozenset()
    stale: frozenset[str] = frozenset()
    slots: tuple[SlotView, ...] | None = None
    foreign: int = 0
    books: tuple[str, ...] = ()


def differences(facts: Facts) -> tuple[Difference, ...]:
    """Return everything in one look that does not fit."""
    found = [
        Difference(Odd.STRAY_PROCESS, str(pid), f"process {pid} belongs to no running generation")
        for pid in sorted(facts.bearers - facts.family)
    ]
    found += [
        Difference(Odd.STALE_RECORD, token[:8], f"the record of run {token[:8]} has no process any more")
        for token in sorted(facts.stale)
    ]
    found += [Difference(Odd.BOOKS, words[:40], words) for words in facts.books]
    if facts.state is not ModelState.READY:
        found += [
            Difference(
                Odd.UNANSWERED_REQUEST, name, f"request {name} runs although the model is {facts.state.value}"
            )
            for name in facts.live.running
        ]
        return tuple(found)
    if facts.pid is not None and not facts.pid_alive:
        found.append(
            Difference(
                Odd.PROCESS_GONE, str(facts.pid), f"process {facts.pid} is gone and still counts as ready"
            )
        )
    if facts.foreign:
        words = f"{facts.foreign} connections to the engine are not the proxy's"
        found.append(Difference(Odd.FOREIGN_CONNECTION, "socket", words))
    return (*found, *_requests(facts))


def _requests(facts: Facts) -> list[Difference]:
    found = []
    running = set(facts.live.running)
    if facts.exchanges > len(running):
        words = f"{facts.exchanges} exchanges are open for {len(running)} running requests"
        found.append(Difference(Odd.LOST_EXCHANGE, "exchanges", words))
    if facts.slots is None:
        return found
    tagged = [slot for slot in facts.slots if slot.busy and slot.tag]
    if facts.live.tags is not None:
        for slot in tagged:
            if slot.tag not in facts.live.tags:
                words = f"slot {slot.id} works for {slot.tag}, which nobody here waits for"
                found.append(Difference(Odd.UNKNOWN_SLOT, f"slot {slot.id} {slot.tag}", words))
    busy = sum(slot.busy for slot in facts.slots)
    if not tagged and busy and not facts.exchanges:
        words = f"{busy} slots are busy and no exchange is open"
        found.append(Difference(Odd.UNKNOWN_SLOT, "slots", words))
    return found


def persistent(first: tuple[Difference, ...], second: tuple[Difference, ...]) -> tuple[Difference, ...]:
    """Return what both looks show."""
    before = {(found.odd, found.subject) for found in first}
    return tuple(found for found in second if (found.odd, found.subject) in before)
