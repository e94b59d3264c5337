"""What is shown of models, read off admission and backends at the moment of asking."""

from collections.abc import Callable, Mapping
from typing import Any

from proxy.admission import Admission
from proxy.app.shown import engine_shown, gate_shown, host_shown
from proxy.app.why import why
from proxy.backends import Fleet
from proxy.catalog import Catalog
from proxy.clock import Clock
from proxy.types import EnginePhase, ModelState


class Described:
    """Read-only views of models for the HTTP surface, as JSON values."""

    def __init__(
        self, catalog: Catalog, fleet: Fleet, admission: Admission, stopping: Callable[[], bool], clock: Clock
    ) -> None:
        self._catalog, self._fleet, self._admission = catalog, fleet, admission
        self._stopping, self._clock = stopping, clock

    def state(self, model: str) -> ModelState:
        return self._fleet.status(model).state

    def phase(self, model: str) -> EnginePhase | None:
        snapshot = self._fleet.snapshot(model)
        return snapshot.phase if snapshot is not None else None

    def meta(self, model: str) -> Mapping[str, Any]:
        status = self._fleet.status(model)
        info = status.info
        return {
            "state": status.state.value,
            "description": self._catalog.model(model).description,
            "aliases": list(self._catalog.model(model).aliases),
            "n_ctx": info.context_tokens if info else None,
            "n_slots": info.slots if info else None,
        }

    def describe(self, model: str) -> Mapping[str, Any]:
        fleet = self._fleet
        status, view = fleet.status(model), self._admission.view(model)
        snapshot, info = fleet.snapshot(model), status.info
        now = self._clock()
        tickets = [ticket for ticket in self._admission.tickets() if ticket.model == model]
        return {
            "id": model,
            **self.meta(model),
            "admin": view.gate.value,
            "gate": gate_shown(fleet.gates.gate(model)),
            "host": host_shown(host) if (host := fleet.host(model)) is not None else None,
            "why": why(status, view, tickets, snapshot, now),
            "jobs": [job.id for job in fleet.jobs.all(model) if not job.ended],
            "backend": {
                "kind": status.kind.value,
                "generation": status.generation,
                "pid": status.pid,
                "port": status.port,
                "since_s": round(now - status.since, 3),
                "stage": status.stage.value if status.stage else None,
                "waits_for": status.waits_for or None,
                "cause": status.cause.value,
                "strikes": status.strikes,
                "retry_in_s": None if status.retry_at is None else round(max(0.0, status.retry_at - now), 3),
                "identity": status.identity,
                "build": info.build if info else "",
                "series": info.series if info else "",
                "policy": info.policy.value if info else None,
                "last_error": status.last_error or None,
                "log_tail": list(fleet.log_tail(model, 20)) if status.last_error else [],
            },
            "engine": engine_shown(snapshot, now) if snapshot is not None else None,
            "engines": [engine_shown(one, now) for one in fleet.snapshots(model)],
            "admission": {
                "gate": {"state": view.gate.value, "reason": view.gate_reason, "mode": view.gate_mode},
                "queued": view.queued,
                "running": view.running,
                "cancelling": view.cancelling,
                "queued_bytes": view.queued_bytes,
                "oldest_s": round(view.oldest_s, 3),
                "charged": view.charged,
                "slots": view.slots,
                "free": view.free,
                "backends": [
                    {
                        "backend": backend.key.backend,
                        "generation": backend.key.generation,
                        "mirror": backend.mirror.value,
                        "draining": backend.draining,
                        "slots": backend.slots,
                        "charged": backend.charged,
                        "cancelling": backend.cancelling,
                        "foreign": backend.foreign,
                        "free": backend.free,
                        "standby": backend.standby,
                    }
                    for backend in view.backends
                ],
                "reasons": {reason.value: count for reason, count in view.reasons.items()},
                "states": {state.value: count for state, count in view.states.items()},
            },
        }

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        states = {name: self.state(name).value for name in self._catalog.ids()}
        ready = not self._stopping() and bool(states)
        return ready, {"ready": ready, "stopping": self._stopping(), "models": states}
