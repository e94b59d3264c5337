"""Admission: who is offered to an engine, when, and with whom.

A request's way: `cost` counts its tasks, `controller.Admission.submit` takes it in, the pure `core`
applies what happens (`events`) to the `state`, `decide` grants in the `order` of the policy what the
`ledger` has room for and `recall` takes back what waits in an engine before somebody who should go
first, `life` moves tickets and keeps the accounts of what they waited for, `mirror` reflects the
engine's slots; `door` lets newcomers in or tells them when to come back (`retry`), `place` chooses the
engine, `shape` who is read together, at the `pace` that the engine shows; `fair` holds the keys' counters, `accounts` charges them, `estimate` guesses what a
request will cost; `views` and `instruments` show it all.
"""

from proxy.admission.controller import Admission
from proxy.admission.cost import Work, count_work
from proxy.admission.ports import World
from proxy.admission.records import (
    BackendView,
    GateMode,
    Grant,
    LiveTickets,
    Mirror,
    ModelAdmissionView,
    TicketSpec,
    TicketView,
    outcome_of,
)
from proxy.admission.ticket import Ticket

__all__ = [
    "Admission",
    "BackendView",
    "GateMode",
    "Grant",
    "LiveTickets",
    "Mirror",
    "ModelAdmissionView",
    "Ticket",
    "TicketSpec",
    "TicketView",
    "Work",
    "World",
    "count_work",
    "outcome_of",
]
