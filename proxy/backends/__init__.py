"""Backends: the life of a model and its processes, the client to llama-server, the mirror of its slots."""

from proxy.backends.command import EngineBinary
from proxy.backends.fleet import Fleet, check_models
from proxy.backends.views import (
    EngineResolver,
    FleetObserver,
    Kind,
    ModelStatus,
    Stage,
    UnloadReport,
    Verify,
)

__all__ = [
    "EngineBinary",
    "EngineResolver",
    "Fleet",
    "FleetObserver",
    "Kind",
    "ModelStatus",
    "Stage",
    "UnloadReport",
    "Verify",
    "check_models",
]
