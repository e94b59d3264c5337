"""Engines, jobs, gates, leases and reports of backends as JSON values; names with a unit end in it."""

from collections.abc import Callable
from typing import Any

from proxy.backends import Gate, HostStatus, Job, Lease, ReconcileReport, UnloadReport
from proxy.types import Audit, Snapshot


def job_shown(job: Job, seconds: float) -> dict[str, Any]:
    """Return a job; `seconds` is how long it took, or has taken so far."""
    progress = job.progress
    return {
        "id": job.id,
        "kind": job.kind.value,
        "model": job.model,
        "state": job.state.value,
        "ended": job.ended,
        "cause": job.cause.value,
        "by": _by(job.audit),
        "started_at": job.started_wall,
        "seconds": round(seconds, 3),
        "progress": {
            "stage": progress.stage,
            "bytes_read": progress.bytes_read,
            "bytes_total": progress.bytes_total,
            "requests_left": progress.requests_left,
        },
        "error": job.error or None,
        "code": job.code or None,
        "cut": list(job.cut),
        "result": dict(job.result),
    }


def gate_shown(gate: Gate) -> dict[str, Any]:
    """Return a gate; `since` is a Unix time, null for one that was never set."""
    return {
        "state": "open" if gate.open else gate.state.value,
        "reason": gate.reason,
        "mode": gate.mode,
        "by": _by(gate.audit),
        "since": gate.since_wall or None,
    }


def lease_shown(lease: Lease, left_s: float) -> dict[str, Any]:
    """Return a lease."""
    return {
        "id": lease.id,
        "reason": lease.reason,
        "ttl_s": lease.ttl_s,
        "left_s": round(left_s, 3),
        "expires_at": lease.expires_wall,
        "by": _by(lease.audit),
    }


def engine_shown(seen: Snapshot, now: float) -> dict[str, Any]:
    """Return an engine as it was last seen."""
    return {
        "backend": seen.key.backend,
        "phase": seen.phase.value,
        "cohort": seen.cohort,
        "age_s": round(now - seen.taken_at, 3),
        "slots": [
            {
                "id": slot.id,
                "busy": slot.busy,
                "member": slot.member.value,
                "request": slot.tag or None,
                "held_tokens": slot.held_tokens,
                "prompt_tokens": slot.prompt_tokens,
                "decoded_tokens": slot.decoded_tokens,
            }
            for slot in seen.slots
        ],
    }


def host_shown(host: HostStatus) -> dict[str, Any]:
    """Return a host; `idle_in_s` is null where it has no idle command, or sleeps."""
    return {
        "name": host.name,
        "state": host.state.value,
        "since_s": round(host.since_s, 3),
        "idle_in_s": None if host.idle_in_s is None else round(host.idle_in_s, 3),
        "last_error": host.error or None,
    }


def force_shown(report: UnloadReport, job: Callable[[str], dict[str, Any] | None]) -> dict[str, Any]:
    """Return the answer to a force-unload."""
    return {
        "ok": report.clean,
        "status": "unloaded" if not report.left else "stopping",
        "force": True,
        "model": report.model,
        "was": report.before.value,
        "cancelled": {"queued": report.queued, "running": report.running},
        "requests": list(report.names),
        "seconds": round(report.seconds, 3),
        "exit_code": report.code,
        "signals": list(report.signals),
        "left": list(report.left),
        "unsettled": list(report.unsettled),
        "job": job(report.job),
        "warning": report.problem or None,
    }


def report_shown(report: ReconcileReport) -> dict[str, Any]:
    """Return what a reconciliation found and mended."""
    return {
        "ok": True,
        "model": report.model,
        "state": report.state.value,
        "clean": report.clean,
        "checked": list(report.checked),
        "found": [
            {
                "kind": one.difference.odd.value,
                "subject": one.difference.subject,
                "words": one.difference.words,
                "repair": one.repair or None,
            }
            for one in report.found
        ],
    }


def _by(audit: Audit) -> dict[str, str] | None:
    return {"key": audit.key, "address": audit.address} if audit.key or audit.address else None
