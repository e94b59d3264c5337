"""What a ticket's key is charged, when, and what it gets back. Pure.

Prompt tokens that must be read are charged at the grant by estimate and settled by the report; generated
tokens as they arrive, weighted, the rest when the ticket goes. What the engine never began is given back.
"""

from proxy.admission.entry import Entry
from proxy.admission.records import Limits
from proxy.admission.state import Room
from proxy.types import Outcome


def estimate(room: Room, entry: Entry) -> tuple[float, float]:
    """Return a ticket's prompt tokens, and how many of them the best placed engine would have to read."""
    spec = entry.spec
    whole = room.lengths.prompt_tokens(spec.prompt_bytes or spec.body_bytes)
    cached = max((book.prefixes.cached(spec.prefix) for book in room.takers), default=0)
    return whole, max(0.0, whole - cached)


def granted(entry: Entry, uncached_tokens: float, *, seen: bool) -> None:
    """Charge a grant; `seen`: the engine's own queue is visible, so what it never began can be told."""
    entry.charged = uncached_tokens
    entry.refundable = seen
    entry.account.charge(uncached_tokens)


def fold(room: Room, limits: Limits, tickets: dict[str, Entry]) -> None:
    """Charge the tokens generated since the last time, for all who run (few: slots and standby)."""
    for book in room.books.values():
        for charge in book.charges.values():
            entry = tickets.get(charge.ticket)
            if entry is not None:
                decoded(entry, limits)


def decoded(entry: Entry, limits: Limits) -> None:
    """Charge the tokens generated since the last time; the engine's own count, once reported, is the last word."""
    if not entry.reported:
        _decoded(entry, limits, entry.tokens)


def reported(
    room: Room, entry: Entry, limits: Limits, prompt: int | None, cached: int | None, generated: int | None
) -> None:
    """Settle by what the engine counted, and learn from it; only the first report counts."""
    if entry.reported or entry.grant is None:
        return
    entry.reported = True
    _decoded(entry, limits, entry.tokens if generated is None else generated)
    if prompt is None:
        return
    read = max(0, prompt - (cached or 0))
    entry.account.charge(read - entry.charged)
    entry.charged = read
    spec = entry.spec
    weighted = read + limits.fair_decode_weight * entry.folded
    room.lengths.learn(spec.prompt_bytes or spec.body_bytes, prompt, weighted)
    ledger = room.ledger(entry.grant.key)
    if ledger is not None:
        ledger.prefixes.learn(spec.prefix, prompt, cached or 0)


def ended(entry: Entry, outcome: Outcome) -> None:
    """Give back what was charged for work that the engine never began."""
    if outcome is not Outcome.COMPLETED and entry.parked and entry.refundable:
        refund(entry)


def refund(entry: Entry) -> None:
    """Give back what a grant was charged for its prompt."""
    entry.account.charge(-entry.charged)
    entry.charged = 0.0


def _decoded(entry: Entry, limits: Limits, total: int) -> None:
    if total != entry.folded:
        entry.account.charge(limits.fair_decode_weight * (total - entry.folded))
        entry.folded = total
