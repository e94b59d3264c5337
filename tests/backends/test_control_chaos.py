"""500 seeded operator actions against random traffic: one outcome per request, an end per job, nothing left."""

import asyncio
import os
import random
import signal
from collections import Counter

import pytest

from proxy.backends.gatekeeper import blocked, opened
from proxy.backends.views import Then
from proxy.errors import ErrorCode, ProxyError
from proxy.state import StateDir
from proxy.types import Audit
from tests.backends.conftest import alive, eventually
from tests.backends.test_control import World

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]
ACTIONS = 500
BUSY_S = 5.0
"""What a machine that does much else may add: the bound itself is shown by the tests of single forces."""
AT_ONCE = 24
"""Requests alive at a time: enough to fill both models' slots and queue."""
NAMES = ("a", "b")
KNOWN = {
    *("completed", "model_unloaded", "gate_blocked", "model_draining", "upstream_error", "upstream_wedged"),
    *("cancelled_by_operator", "load_timeout", "model_load_failed"),
}


@pytest.mark.parametrize("seed", [7])
async def test_random_operators(engine_binary, mid_model, tmp_path, seed):
    rng = random.Random(seed)
    model = {
        "path": mid_model, "stop": {"grace_s": 1}, "restart": {"first_s": 0.2, "max_s": 1}, "ttl_s": 2,
        "args": ["-c", "2048", "-np", "3"], "budgets": {"load_timeout_s": 20},
    }  # fmt: skip
    world = World(
        {name: model for name in NAMES},
        engine_binary,
        state=StateDir.open(tmp_path),
        args=("-t", "1", "--no-warmup"),
    )
    fleet, audit = world.fleet, Audit("chaos", "::1")
    await fleet.start()
    clients, pids, leases, doing, done = [], set(), [], set(), Counter()

    def traffic():
        if sum(not client.task.done() for client in clients) < AT_ONCE:
            name = f"c{len(clients)}"
            clients.append(
                world.client(
                    name, rng.choice(NAMES), n_predict=rng.choice([3, 20, 400]), stream=rng.random() < 0.6
                )
            )

    async def force(name):
        then = rng.choice([Then.OPEN, Then.OPEN, Then.BLOCK])
        report = await fleet.force(
            name, then=then, reason="chaos", mode=rng.choice(["hold", "reject"]), audit=audit
        )
        assert report.seconds < 1 + 2 + BUSY_S and not report.unsettled, report
        # a busy kernel may take longer to clear a killed process away: said, and true soon
        await eventually(lambda: not any(map(alive, report.left)), 30)

    async def gate(name):
        wanted = (
            opened(audit) if rng.random() < 0.6 else blocked("chaos", rng.choice(["hold", "reject"]), audit)
        )
        assert await fleet.set_gate(rng.choice([name, None]), wanted) == ""

    async def lease(name):
        if leases and rng.random() < 0.5:
            await fleet.leases.release(leases.pop())
        else:
            granted, _ = await fleet.leases.grant(rng.random() * 3 + 0.1, "chaos", audit)
            leases.append(granted.id)

    async def cancel(name):
        live = [client.name for client in clients if not client.task.done()]
        if live:
            error = ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "chaos")
            world.admission.cancel(rng.choice(live), error)

    async def kill(name):
        pid = fleet.status(name).pid
        if pid is not None:
            os.kill(pid, rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]))

    async def load(name):
        fleet.begin_load(name, audit)

    async def unload(name):
        fleet.begin_unload(name, deadline_s=rng.random(), then=rng.choice(list(Then)), audit=audit)

    async def look(name):
        found = (await fleet.reconcile(name)).found
        # an engine that was stopped still shows slots at work for clients that left
        assert all(one.difference.odd == "unknown_slot" for one in found), found

    weighted = (
        [load] * 6
        + [unload] * 4
        + [force] * 4
        + [gate] * 6
        + [lease] * 3
        + [cancel] * 4
        + [kill] * 2
        + [look]
    )
    try:
        for _ in range(ACTIONS):
            action = rng.choice(weighted)
            done[action.__name__] += 1
            task = asyncio.create_task(action(rng.choice(NAMES)), name=f"act:{action.__name__}")
            doing.add(task)
            for _ in range(rng.randrange(3)):
                traffic()
            pids.update(status.pid for status in fleet.statuses() if status.pid)
            assert world.admission.broken_rules() == []
            await asyncio.sleep(rng.random() * 0.06)
        finished, late = await asyncio.wait(doing, timeout=60)
        assert not late
        for task in finished:
            task.result()
        await fleet.set_gate(None, opened(audit))
        jobs = [job.id for name in NAMES for job in fleet.jobs.all(name)]
        for job in jobs:
            ended = await fleet.jobs.wait(job, 60)
            assert ended is None or ended.ended, ended
        # a job may have left a gate blocked
        await fleet.set_gate(None, opened(audit))
        _, late = await asyncio.wait({client.task for client in clients}, timeout=120)
        assert not late, [client.name for client in clients if not client.task.done()]
        outcomes = Counter(client.outcome for client in clients)
        assert set(outcomes) <= KNOWN and outcomes["completed"] > 0, outcomes
        assert all(client.task.exception() is None for client in clients)
        await eventually(lambda: all(world.admission.view(name).charged == 0 for name in NAMES), 30)
        for name in NAMES:
            view = world.admission.view(name)
            assert (view.queued, view.running, view.cancelling) == (0, 0, 0)
        assert world.admission.broken_rules() == [] and len(done) == 8, done
    finally:
        world.admission.shutdown(ProxyError(ErrorCode.SHUTTING_DOWN, "over"), cut=True)
        await fleet.stop(5)
        world.admission.close()
    await eventually(lambda: not any(map(alive, pids)), 30)
    assert [job for job in fleet.jobs.all() if not job.ended] == []
    assert fleet._state.names("runs") == () and not [
        n for n in os.listdir(tmp_path / "runs") if n.endswith(".json")
    ]
