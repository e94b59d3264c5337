"""`llama-proxy` with its admission looked at from inside: the real proxy, plus a file of what was decided.

Run as `python -m tests.e2e.traced serve …` with `ADMISSION_TRACE` naming the file. After every step of the
core one JSON line tells when it was (on the clock that an engine's records have, too), what arrived and was granted
or finished in it, what every backend is charged, and which of admission's own rules are broken.
"""

import json
import os
from typing import Any

from proxy.__main__ import main
from proxy.admission import controller
from proxy.admission.core import step
from proxy.admission.events import Arrived, Effect, Event, Finished, Granted
from proxy.admission.state import State
from proxy.admission.views import broken_rules


def record(state: State, event: Event, effects: list[Effect], now: float) -> dict[str, Any]:
    """Return one step as a JSON value."""
    line: dict[str, Any] = {"at": now, "broken": broken_rules(state, now)}
    if isinstance(event, Arrived):
        line["arrived"] = [event.spec.id, event.spec.tasks]
    line["granted"] = [
        [effect.ticket, state.tickets[effect.ticket].cost]
        for effect in effects
        if isinstance(effect, Granted)
    ]
    line["finished"] = [
        [effect.ending.id, effect.ending.queued_s] for effect in effects if isinstance(effect, Finished)
    ]
    line["books"] = [
        {
            "model": room.model,
            "slots": ledger.info.slots,
            "charged": sum(charge.cost for charge in ledger.charges.values()),
            "cancelling": sum(c.cost for c in ledger.charges.values() if c.released_at is not None),
            "grants": sum(1 for charge in ledger.charges.values() if charge.cost),
            "wide": any(charge.wide for charge in ledger.charges.values()),
        }
        for room in state.rooms.values()
        for ledger in room.books.values()
    ]
    return line


if __name__ == "__main__":
    with open(os.environ["ADMISSION_TRACE"], "a", buffering=1, encoding="utf-8") as file:

        def traced(state: State, event: Event, now: float) -> list[Effect]:
            effects = step(state, event, now)
            file.write(json.dumps(record(state, event, effects, now)) + "\n")
            return effects

        controller.step = traced
        main()
