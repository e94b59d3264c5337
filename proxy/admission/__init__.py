"""Admission: who is offered to an engine, when, and with whom."""

from proxy.admission.controller import Admission
from proxy.admission.cost import Work, count_work
from proxy.admission.ports import World
from proxy.admission.records import (
    BackendView,
    GateMode,
    Grant,
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
