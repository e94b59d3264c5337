"""Random lives: seeded operator actions, kills and traffic against the real engine; nothing may hang or leak."""

import asyncio
import contextlib
import os
import random
import signal

import pytest

from proxy.backends.gatekeeper import blocked, opened
from proxy.backends.lifecycle import TABLE
from proxy.errors import ErrorCode, ProxyError
from proxy.types import Cause, ModelState
from proxy.upstream import UpstreamDied
from tests.backends.conftest import Collect, alive, completion, eventually

pytestmark = pytest.mark.engine
NAMES = ("a", "b", "bad")
EDGES = {(before, after) for before, row in TABLE.items() for after in row.values() if before is not after}


@pytest.mark.parametrize("seed", range(2))
async def test_random_lives(fleets, engine_binary, mid_model, tmp_path, seed):
    """Every load and unload ends, states only move along the table, downs follow readies, no process is left."""
    rng = random.Random(seed)
    # a SIGSTOP may hit one that is loading: its budget ends it
    common = {"stop": {"grace_s": 1}, "budgets": {"load_timeout_s": 5}}
    small = common | {"args": ["-c", "512", "-np", "2"]}
    models = {
        "a": small | {"path": mid_model},
        "b": small | {"path": mid_model},
        "bad": common | {"path": tmp_path / "none"},
    }
    fleet, seen = fleets(models, engine_binary)
    pids: set[int] = set()
    outcomes: list[str] = []

    async def load(name):
        try:
            await fleet.load(name, rng.choice([Cause.REQUEST, Cause.OPERATOR]))
            outcomes.append("loaded")
        except ProxyError as error:
            outcomes.append(error.code.value)

    async def unload(name):
        report = await fleet.unload(
            name, force=rng.random() < 0.7, deadline_s=rng.random() / 2, cause=Cause.FORCE
        )
        # a busy kernel may take longer to clear a killed process away: said, and true soon
        await eventually(lambda: not any(map(alive, report.left)), 30)
        outcomes.append("unloaded")

    async def stream(name):
        key = fleet.key(name)
        if key is None:
            return
        with contextlib.suppress(UpstreamDied, TimeoutError):
            # the client's patience: a stopped engine accepts and never answers
            async with asyncio.timeout(rng.random()):
                exchange = await fleet.upstream(key).open(completion(rng.choice([3, 4000])))
                try:
                    await exchange.attach(Collect())
                finally:
                    exchange.close()
        outcomes.append("streamed")

    async def kill(name):
        pid = fleet.status(name).pid
        if pid is not None and rng.random() < 0.5:
            os.kill(pid, rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]))

    async def gate(name):
        await fleet.set_gate(name, blocked("chaos"))
        await asyncio.sleep(rng.random() / 10)
        await fleet.set_gate(name, opened())

    async def one(action, name):
        await asyncio.sleep(rng.random() * 6)
        await action(name)
        pids.update(status.pid for status in fleet.statuses() if status.pid)

    actions = [load, load, load, unload, stream, stream, kill, gate]
    async with asyncio.timeout(180):
        async with asyncio.TaskGroup() as group:
            for _ in range(120):
                group.create_task(one(rng.choice(actions), rng.choice(NAMES)))
        for name in NAMES:
            # one may be ready and asleep
            await fleet.unload(name, force=True)
        try:
            await fleet.load("a")
        except ProxyError as error:
            # the short budget is for the stopped ones: a machine that stands still may need it, too
            assert error.code is ErrorCode.LOAD_TIMEOUT
            await fleet.load("a")
        await fleet.stop(5)

    await eventually(lambda: not any(map(alive, pids)), 30)
    assert {"loaded", "unloaded"} <= set(outcomes)
    for name in NAMES:
        assert fleet.status(name).state == "unloaded"
        moves = [(ModelState(b), ModelState(a)) for n, b, a, _ in seen.of("state") if n == name]
        assert set(moves) <= EDGES
        assert all(first[1] is second[0] for first, second in zip(moves, moves[1:], strict=False))
    for name in ("a", "b"):
        told = [
            (kind, value[0].generation)
            for kind, value, _ in seen.calls
            if kind in {"ready", "down"} and value[0].model == name
        ]
        assert [kind for kind, _ in told] == ["ready", "down"] * (len(told) // 2)
        assert all(told[i][1] == told[i + 1][1] for i in range(0, len(told), 2))
        generations = [generation for kind, generation in told if kind == "ready"]
        assert generations == sorted(set(generations))
