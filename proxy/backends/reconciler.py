"""Looks at a model from all sides, says what does not fit, and repairs what is safe to repair."""

import asyncio
from typing import Final

import psutil

from proxy import logs
from proxy.backends.listening import GONE, descendants
from proxy.backends.ports import Requests
from proxy.backends.reconcile import (
    Difference,
    Facts,
    Odd,
    ReconcileReport,
    Repaired,
    differences,
    persistent,
)
from proxy.backends.runner import ModelRunner
from proxy.backends.runs import RunStore, look, processes
from proxy.metrics import Metrics
from proxy.types import ModelState

BETWEEN_S: Final = 0.4
"""Between the two looks: longer than a grant takes to become an exchange, or a release to free a slot."""
FRESH_S: Final = 2.0
_log = logs.get("backends")


async def reconcile(
    runner: ModelRunner, runs: RunStore, requests: Requests, metrics: Metrics
) -> ReconcileReport:
    """Compare and repair one model; takes about half a second. Live requests are never touched."""
    first, _ = await _look(runner, runs, requests)
    runner.poke_now()
    await asyncio.sleep(BETWEEN_S)
    second, checked = await _look(runner, runs, requests)
    found = persistent(differences(first), differences(second))
    repaired = [Repaired(difference, await _repair(difference, runner, runs)) for difference in found]
    if repaired:
        metrics.mirror_mismatch.labels(runner.name, runner.kind.value).inc()
        for one in repaired:
            _log.warning(
                "reconciled",
                model=runner.name,
                odd=one.difference.odd.value,
                what=one.difference.words,
                repair=one.repair or None,
            )
    return ReconcileReport(runner.name, runner.life.operational, checked, tuple(repaired))


async def _look(runner: ModelRunner, runs: RunStore, requests: Requests) -> tuple[Facts, tuple[str, ...]]:
    records = runs.known(runner.name)
    seen = await asyncio.to_thread(processes)
    # from here on nothing awaits: state, books and slots are of one instant
    status, slots, live = runner.status(), runner.fresh_slots(FRESH_S), requests.live(runner.name)
    pid, present = status.pid, runner.token
    tokens = {record.token for record in records}
    bearers = {p: s.token for p, s in seen.items() if s.token in tokens}
    settled = status.state in (ModelState.READY, ModelState.UNLOADED, ModelState.FAILED)
    moving = not settled or runner.clearing
    facts = Facts(
        state=status.state,
        live=live,
        exchanges=status.exchanges,
        pid=pid,
        pid_alive=pid is None or look(pid) is not None,
        bearers=frozenset() if moving else frozenset(bearers),
        family=frozenset(p for p, token in bearers.items() if token == present),
        stale=frozenset() if moving else frozenset(tokens - {present} - set(bearers.values())),
        slots=slots,
        foreign=_foreign(pid, status.port) if status.state is ModelState.READY else 0,
        books=requests.check(runner.name),
    )
    checked = ["books", "processes", "records"]
    if pid is not None and status.port is not None:
        checked.append("sockets")
    if slots is not None:
        checked.append("slots")
    return facts, tuple(checked)


def _foreign(pid: int | None, port: int | None) -> int:
    """Count established connections to the engine's port that do not come from this process."""
    if pid is None or port is None:
        return 0
    try:
        ours = {local for local, remote in _pairs(psutil.Process().pid) if remote == port}
        theirs = [pair for member in (pid, *descendants(pid)) for pair in _pairs(member)]
        return sum(local == port and remote not in ours for local, remote in theirs)
    except (*GONE, psutil.AccessDenied):
        return 0


def _pairs(pid: int) -> list[tuple[int, int]]:
    """Return local and remote port of a process's established connections."""
    found = psutil.Process(pid).net_connections("tcp")
    return [(c.laddr[1], c.raddr[1]) for c in found if c.status == psutil.CONN_ESTABLISHED and c.raddr]


async def _repair(difference: Difference, runner: ModelRunner, runs: RunStore) -> str:
    """Repair one difference where that can harm nobody; return what was done."""
    match difference.odd:
        case Odd.STRAY_PROCESS:
            pid = int(difference.subject)
            seen = look(pid)
            for record in runs.known(runner.name):
                if seen is not None and record.token == seen.token != runner.token:
                    left = await runs.reap(record, [pid])
                    return "" if left else "it was ended"
            return "it has ended meanwhile"
        case Odd.STALE_RECORD:
            for record in runs.known(runner.name):
                if record.token.startswith(difference.subject) and record.token != runner.token:
                    runs.forget(record)
                    return "the record was removed"
            return ""
        case Odd.PROCESS_GONE:
            return "its exit is being reported"
        case Odd.BOOKS:
            return ""
        case Odd.FOREIGN_CONNECTION | Odd.UNKNOWN_SLOT | Odd.UNANSWERED_REQUEST | Odd.LOST_EXCHANGE:
            runner.poke_now()
            return ""
