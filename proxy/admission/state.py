"""The core's state: tickets, and per model its gate, queue and backends' books. Mutable, one owner.

Only the core changes it; everybody else reads views.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from proxy.admission.entry import Entry
from proxy.admission.estimate import Lengths
from proxy.admission.fair import Book
from proxy.admission.ledger import Charge, Ledger
from proxy.admission.records import GateMode, Limits
from proxy.admission.retry import Returns, Turnover
from proxy.admission.waiting import Queue
from proxy.errors import ProxyError
from proxy.types import AdminState, BackendKey


@dataclass(slots=True)
class Room:
    """One model: gate, queue (arrival order), books of its ready generations, and what was asked for.

    `retired` holds the newest dead generation by backend: whatever comes from it or an older one is
    ignored.
    """

    model: str
    admin: AdminState = AdminState.ENABLED
    gate_reason: str = ""
    gate_mode: GateMode = "hold"
    queue: Queue = field(default_factory=Queue)
    books: dict[str, Ledger] = field(default_factory=dict)
    retired: dict[str, int] = field(default_factory=dict)
    load_asked: bool = False
    went_down: bool = False
    dropped: bool = False
    swap_wait: bool = False
    turnover: Turnover = field(default_factory=Turnover)
    returns: Returns = field(default_factory=Returns)
    shares: Book = field(default_factory=Book)
    lengths: Lengths = field(default_factory=Lengths)
    turns: int = 0
    """Grants since the last turn by age."""

    @property
    def takers(self) -> list[Ledger]:
        """The books of the engines that get new requests."""
        return [ledger for ledger in self.books.values() if not ledger.draining]

    def ledger(self, key: BackendKey) -> Ledger | None:
        """Return the books of exactly this generation, None when it is not (or no longer) ready."""
        ledger = self.books.get(key.backend)
        return ledger if ledger is not None and ledger.key == key else None


@dataclass(slots=True)
class State:
    """Everything admission knows."""

    limits: Limits = field(default_factory=Limits)
    rooms: dict[str, Room] = field(default_factory=dict)
    tickets: dict[str, Entry] = field(default_factory=dict)
    arrivals: int = 0
    closed: ProxyError | None = None
    timer: float | None = None

    def room(self, model: str) -> Room:
        """Return a model's room, made at the first use."""
        found = self.rooms.get(model)
        if found is None:
            found = self.rooms[model] = Room(model)
        return found

    def taken(self, ticket: str) -> bool:
        """Whether an id is in use: by a live ticket, or by a grant that an engine has not let go of yet.

        A recalled ticket can be gone before its old grant is: another one with its id would get its tag.
        """
        return ticket in self.tickets or any(
            charge.ticket == ticket
            for room in self.rooms.values()
            for ledger in room.books.values()
            for charge in ledger.charges.values()
        )

    def waiting(self) -> Iterator[Entry]:
        """All waiting tickets of all models."""
        for room in self.rooms.values():
            yield from room.queue

    def ledger_of(self, entry: Entry) -> Ledger | None:
        """Return the books a granted ticket is charged in."""
        if entry.grant is None:
            return None
        room = self.rooms.get(entry.spec.model)
        return None if room is None else room.ledger(entry.grant.key)

    def charge_of(self, entry: Entry) -> tuple[Ledger, Charge] | None:
        """Return the books and the charge of a ticket's present grant."""
        ledger = self.ledger_of(entry)
        if ledger is None or entry.grant is None:
            return None
        charge = ledger.charges.get(entry.grant.tag)
        return None if charge is None else (ledger, charge)
