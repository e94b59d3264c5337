"""The mirror on a phase-aware engine: what it says of slots, tags, phases and cohorts comes through exactly."""

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.metrics import Metrics
from proxy.types import EnginePhase, MemberState, PhasePolicy
from tests.backends.conftest import Collect, completion, eventually

pytestmark = pytest.mark.engine
ARGS = ("-c", "8192", "-np", "2", "-t", "1", "-b", "128", "--no-warmup")
LONG = 1500
"""Tokens of an answer that still runs when another request comes, after whatever stall."""


@pytest.fixture(scope="module")
def native_binary() -> Path:
    if not os.environ.get("LLAMA_SERVER_BIN"):
        pytest.skip("needs LLAMA_SERVER_BIN, a phase-aware llama-server")
    return Path(os.environ["LLAMA_SERVER_BIN"])


async def stream(upstream, tag, n_predict, prompt="once upon a time"):
    request = completion(n_predict, prompt=prompt)
    exchange = await upstream.open(replace(request, headers=(*request.headers, ("x-request-id", tag))))
    sink = Collect()
    return asyncio.create_task(exchange.attach(sink)), sink


async def test_a_drained_cohort_as_the_mirror_sees_it(fleets, native_binary, mid_model):
    """A latecomer waits on its slot (`queued`, tagged), then makes the next cohort; metrics count both."""
    metrics = Metrics()
    models = {"mid": {"path": mid_model, "phase_policy": "drain"}}
    fleet, seen = fleets(models, native_binary, engine_args=ARGS, patched=True, metrics=metrics)
    info = await fleet.load("mid")
    assert info.policy is PhasePolicy.DRAIN
    upstream, key = fleet.upstream(fleet.key("mid")), fleet.key("mid")
    first, sink = await stream(upstream, "first.1", LONG)
    await asyncio.wait_for(sink.first.wait(), 60)
    opening = asyncio.create_task(stream(upstream, "late.1", 5, "the mill by the river " * 200))
    fleet.poke(key)
    both = await eventually(
        lambda: next(
            (
                {slot.tag: slot.member for slot in snap.slots if slot.busy}
                for snap in seen.snapshots
                if snap.busy == 2
            ),
            None,
        )
    )
    assert both == {"first.1": MemberState.GENERATE, "late.1": MemberState.QUEUED}
    await asyncio.wait_for(first, 200)
    late, _ = await opening
    await asyncio.wait_for(late, 200)
    fleet.poke(key)
    # a slot may be let go of a moment before the engine says that it is idle
    await eventually(lambda: (s := seen.snapshots[-1]).busy == 0 and s.phase is EnginePhase.IDLE)
    assert seen.snapshots[-1].native and seen.snapshots[-1].lost == 0
    events = [event for snap in seen.snapshots for event in snap.events]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.event for event in events if event.event in {"seal", "open"}] == ["seal", "open"] * 2
    named = [(event.event, event.request, event.cohort > 0) for event in events]
    queued, began = named.index(("admit", "late.1", False)), named.index(("admit", "late.1", True))
    assert queued < named.index(("release", "first.1", True)) < began

    text = metrics.render().decode()

    def value(name, **labels):
        for line in text.splitlines():
            if line.startswith(f"llama_proxy_{name}{{") and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(name)

    assert value("cohorts_total", model="mid") == 2
    assert value("cohort_size_sum", model="mid") == 2
    assert value("barrier_wait_seconds_count", model="mid") == 2
    assert value("native_queue_seconds_count", model="mid") == 2
    generating = value("engine_phase_seconds_total", phase="generate")
    prefilling = sum(value("engine_phase_seconds_total", phase=p) for p in ("prefill_open", "prefill_sealed"))
    waited = value("native_queue_seconds_sum", model="mid")
    assert generating > waited > 0.05 and prefilling > 0.05
    assert re.search(r'cohort_duration_seconds_count\{model="mid",phase="generate"\} 2\.0', text)


async def test_a_yield_shows_paused_members(fleets, native_binary, mid_model):
    models = {"mid": {"path": mid_model, "phase_policy": "yield", "phase_yield_ms": 50}}
    fleet, seen = fleets(models, native_binary, engine_args=ARGS, patched=True)
    assert (await fleet.load("mid")).policy is PhasePolicy.YIELD
    upstream = fleet.upstream(fleet.key("mid"))
    first, sink = await stream(upstream, "first.1", LONG)
    await asyncio.wait_for(sink.first.wait(), 60)

    def paused():
        return [s for snap in seen.snapshots for s in snap.slots if s.member is MemberState.PAUSED]

    for number in range(1, 6):
        # a quick prompt may be read between two looks
        prompt = f"{number} " + "the mill by the river " * 200
        late, _ = await stream(upstream, f"late.{number}", 5, prompt)
        await asyncio.wait_for(late, 200)
        if paused() and EnginePhase.YIELD_PREFILL in {snap.phase for snap in seen.snapshots}:
            break
    await asyncio.wait_for(first, 200)
    await eventually(lambda: seen.snapshots[-1].busy == 0)
    events = [event for snap in seen.snapshots for event in snap.events]
    moved = [(event.event, event.request) for event in events if event.event in {"pause", "resume"}]
    assert moved == [("pause", "first.1"), ("resume", "first.1")] * number
    assert max(s.paused_ms for snap in seen.snapshots for s in snap.slots if s.tag == "first.1") > 0
    assert EnginePhase.YIELD_PREFILL in {snap.phase for snap in seen.snapshots}
    assert paused() and all(slot.tag == "first.1" for slot in paused())
