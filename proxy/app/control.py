"""Operators' control for the HTTP surface: the fleet's, in JSON values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proxy.app.reloading import Reloader
from proxy.app.shown import force_shown, gate_shown, job_shown, lease_shown, report_shown
from proxy.backends import (
    ControlEvent,
    Fleet,
    GateChanged,
    GateMode,
    Job,
    JobChanged,
    LeaseChanged,
    LogFollower,
    Then,
    blocked,
    opened,
)
from proxy.http.hub import EventHub
from proxy.types import Audit


class Control:
    """What operators may do, as `proxy.http.ports.Control`."""

    def __init__(self, fleet: Fleet, reloader: Callable[[], Reloader]) -> None:
        """`reloader` is asked for when it is needed: it is made after this."""
        self._fleet = fleet
        self._reloader = reloader

    # --- jobs ---------------------------------------------------------------------------------------

    def load(self, model: str, audit: Audit) -> Mapping[str, Any]:
        return self._job(self._fleet.begin_load(model, audit))

    def unload(
        self,
        model: str,
        *,
        deadline_s: float | None,
        block: bool,
        reason: str,
        mode: GateMode | None,
        audit: Audit,
    ) -> Mapping[str, Any]:
        then = Then.BLOCK if block else Then.OPEN
        return self._job(
            self._fleet.begin_unload(
                model, deadline_s=deadline_s, then=then, reason=reason, mode=mode, audit=audit
            )
        )

    async def force(
        self, model: str, *, block: bool, reason: str, mode: GateMode, audit: Audit
    ) -> Mapping[str, Any]:
        then = Then.BLOCK if block else Then.OPEN
        report = await self._fleet.force(model, then=then, reason=reason, mode=mode, audit=audit)
        return force_shown(report, self._known)

    def would_cut(self, model: str) -> Mapping[str, Any]:
        would = self._fleet.would_cut(model)
        return {
            "model": model,
            "state": would.state.value,
            "pid": would.pid,
            "cancelled": {
                "queued": len(would.waiting),
                "running": max(len(would.running), would.exchanges),
            },
            "requests": {"queued": list(would.waiting), "running": list(would.running)},
        }

    async def reconcile(self, model: str) -> Mapping[str, Any]:
        return report_shown(await self._fleet.reconcile(model))

    def jobs(self, model: str | None = None) -> Sequence[Mapping[str, Any]]:
        return [self._job(job) for job in self._fleet.jobs.all(model)]

    def job(self, job_id: str) -> Mapping[str, Any] | None:
        return self._known(job_id)

    async def wait(self, job_id: str, timeout_s: float) -> Mapping[str, Any] | None:
        job = await self._fleet.jobs.wait(job_id, timeout_s)
        return self._job(job) if job is not None else None

    # --- gates and leases ---------------------------------------------------------------------------

    def gate(self, model: str) -> Mapping[str, Any]:
        return gate_shown(self._fleet.gates.gate(model))

    async def set_gate(
        self, model: str | None, *, block: bool, reason: str, mode: GateMode, audit: Audit
    ) -> str:
        return await self._fleet.set_gate(model, blocked(reason, mode, audit) if block else opened(audit))

    def leases(self) -> Sequence[Mapping[str, Any]]:
        held = self._fleet.leases
        return [lease_shown(lease, held.left_s(lease)) for lease in held.held()]

    async def lease(self, ttl_s: float, reason: str, audit: Audit) -> tuple[Mapping[str, Any], str]:
        lease, problem = await self._fleet.leases.grant(ttl_s, reason, audit)
        return lease_shown(lease, self._fleet.leases.left_s(lease)), problem

    async def release(self, lease_id: str) -> tuple[Mapping[str, Any], str] | None:
        released = await self._fleet.leases.release(lease_id)
        return (lease_shown(released[0], 0.0), released[1]) if released is not None else None

    async def reload(self, audit: Audit, *, dry_run: bool) -> Mapping[str, Any]:
        return await self._reloader().reload(audit, dry_run=dry_run)

    # --- looking ------------------------------------------------------------------------------------

    def log_tail(self, model: str, lines: int) -> Sequence[str]:
        return self._fleet.log_tail(model, lines)

    def follow_log(self, model: str, lines: int) -> LogFollower:
        return self._fleet.follow_log(model, lines)

    @property
    def state_problem(self) -> str:
        return self._fleet.state_problem

    def note(self, hub: EventHub, event: ControlEvent) -> None:
        """Tell watchers. Gates are told where requests are compared: there they have taken effect."""
        match event:
            case JobChanged(job):
                hub.publish("job", self._job(job))
            case LeaseChanged(lease, held):
                left_s = self._fleet.leases.left_s(lease) if held else 0.0
                hub.publish("lease", {**lease_shown(lease, left_s), "held": held})
            case GateChanged():
                pass

    def _job(self, job: Job) -> dict[str, Any]:
        return job_shown(job, self._fleet.jobs.seconds(job))

    def _known(self, job_id: str) -> dict[str, Any] | None:
        job = self._fleet.jobs.get(job_id)
        return self._job(job) if job is not None else None
