"""Backends: the life of a model and its processes, operators' control of it, the client to llama-server, its mirror."""

from proxy.backends.command import EngineBinary, needs_engine
from proxy.backends.fleet import Fleet, check_models
from proxy.backends.gatekeeper import blocked, opened
from proxy.backends.gates import Gate, GateMode
from proxy.backends.hostkeeper import HostStatus
from proxy.backends.hosts import HostState
from proxy.backends.jobs import Job, JobKind, JobState, Progress
from proxy.backends.leases import Lease
from proxy.backends.logfeed import LogFollower
from proxy.backends.ports import (
    ControlEvent,
    GateChanged,
    JobChanged,
    LeaseChanged,
    Listener,
    LiveRequests,
    Requests,
)
from proxy.backends.reconcile import Difference, Odd, ReconcileReport, Repaired
from proxy.backends.views import (
    EngineResolver,
    FleetObserver,
    Kind,
    ModelStatus,
    Stage,
    Then,
    UnloadReport,
    Verify,
    WouldCut,
)

__all__ = [
    "ControlEvent",
    "Difference",
    "EngineBinary",
    "EngineResolver",
    "Fleet",
    "FleetObserver",
    "Gate",
    "GateChanged",
    "GateMode",
    "HostState",
    "HostStatus",
    "Job",
    "JobChanged",
    "JobKind",
    "JobState",
    "Kind",
    "Lease",
    "LeaseChanged",
    "Listener",
    "LiveRequests",
    "LogFollower",
    "ModelStatus",
    "Odd",
    "Progress",
    "ReconcileReport",
    "Repaired",
    "Requests",
    "Stage",
    "Then",
    "UnloadReport",
    "Verify",
    "WouldCut",
    "blocked",
    "check_models",
    "needs_engine",
    "opened",
]
