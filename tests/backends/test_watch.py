"""Watching real engines: slow is not wedged, stopped is; crashes are counted and restarted with a back-off."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxy.backends import probes
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.types import Cause
from proxy.upstream import UpstreamDied
from tests.backends.conftest import Collect, alive, completion, eventually

pytestmark = pytest.mark.engine
BATCH = 8192
"""The most that one decode call takes, which is all the model's context."""
SIZES = ((3, 500), (3, 1000), (3, 1500), (1, 1500))
"""`wedge_after_s`, and how often the first prompt says its five words: more of it where the machine is too fast to
show anything, and in the end a shorter limit."""


@pytest.fixture(scope="module")
def native_binary() -> Path:
    if not os.environ.get("LLAMA_SERVER_BIN"):
        pytest.skip("needs LLAMA_SERVER_BIN, a phase-aware llama-server")
    return Path(os.environ["LLAMA_SERVER_BIN"])


def counted(metrics: Metrics, name: str, model: str = "m") -> float:
    line = next(
        line
        for line in metrics.render().decode().splitlines()
        if line.startswith(f'llama_proxy_{name}_total{{model="{model}"')
    )
    return float(line.rsplit(" ", 1)[1])


async def test_a_long_first_batch_is_no_wedge_and_a_stop_inside_it_is(fleets, native_binary, demo_model):
    """wedge_after_s 3: a first decode call of 6 s and more is left alone; SIGSTOP within the next one is found in time."""
    args = ("-c", str(BATCH), "-t", "1", "-np", "1", "-b", str(BATCH), "-ub", str(BATCH), "--no-warmup")
    for limit_s, count in SIZES:
        metrics = Metrics()
        fleet, seen = fleets(
            {"m": {"path": demo_model, "wedge_after_s": limit_s}},
            native_binary,
            engine_args=args,
            patched=True,
            metrics=metrics,
        )
        await fleet.load("m")
        key, pid = fleet.key("m"), fleet.status("m").pid
        took_ms = await _first_batch(fleet, seen, count)
        longest_ms = max(snapshot.decode_running_ms for snapshot in seen.snapshots)
        assert fleet.key("m") == key and counted(metrics, "wedges") == 0
        # a machine that stood still may not have looked at it while it ran
        if took_ms >= 2000 * limit_s and longest_ms > 1000 * limit_s:
            break
        await fleet.unload("m", force=True)
    else:
        pytest.fail(f"the longest batch took only {took_ms} ms: too short to show anything")

    request = completion(2, prompt="another story of the sea " * 1500)
    running = asyncio.create_task(_through(fleet.upstream(key), request))
    await eventually(lambda: seen.snapshots[-1].decode_running_ms > 1000 * limit_s + 500, 60)
    os.kill(pid, signal.SIGSTOP)
    async with standstills() as still:
        stopped = time.monotonic()
        await eventually(lambda: seen.of("down"), 60)
    took = next(at for name, _, at in seen.calls if name == "down") - stopped
    # a poll that comes late because this process stood still does not count as silence: then there is one more
    again = probes.TIMEOUT_S if still.seconds > 0.1 else 0
    assert took < 3 * probes.TIMEOUT_S + 1 + still.seconds + again
    [(down, error)] = seen.of("down")
    assert (
        down == key and error.code is ErrorCode.UPSTREAM_WEDGED and "/slots gave no answer" in error.message
    )
    with pytest.raises(UpstreamDied, match="makes no progress"):
        await running
    assert ("m", "ready", "failed", "wedge") in seen.of("state")
    await eventually(lambda: fleet.status("m").state == "ready", 60)
    assert ("m", "failed", "starting", "wedge") in seen.of("state")
    assert not alive(pid) and fleet.key("m").generation > key.generation
    assert counted(metrics, "wedges") == counted(metrics, "restarts") == 1
    assert counted(metrics, "crashes") == 0


async def _first_batch(fleet, seen, count):
    """Have one prompt read in one decode call; return how many ms that took by the engine's own clock."""

    def events():
        return {event.event: event for snapshot in seen.snapshots for event in snapshot.events}

    request = completion(2, prompt="the mill by the river " * count)
    await asyncio.wait_for(_through(fleet.upstream(fleet.key("m")), request), 200)
    ends = await eventually(lambda: events() if "ready" in events() else None)
    assert 4 * count < ends["ready"].tokens < BATCH
    return (ends["ready"].t_us - ends["admit"].t_us) / 1000


@contextlib.asynccontextmanager
async def standstills():
    """Add up how long this process could not run meanwhile."""
    found = SimpleNamespace(seconds=0.0)

    async def look():
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.02)
            late = time.monotonic() - began - 0.02
            found.seconds += late if late > 0.02 else 0.0

    looking = asyncio.create_task(look())
    try:
        yield found
    finally:
        looking.cancel()
        await asyncio.wait({looking})


async def _through(upstream, request):
    exchange = await upstream.open(request)
    try:
        await exchange.attach(Collect())
    finally:
        exchange.close()


async def test_an_idle_engine_that_is_stopped_is_found_too(fleets, engine_binary, mid_model):
    metrics = Metrics()
    fleet, seen = fleets({"m": {"path": mid_model}}, engine_binary, metrics=metrics)
    await fleet.load("m")
    os.kill(fleet.status("m").pid, signal.SIGSTOP)
    await eventually(lambda: seen.of("down"), 60)
    assert seen.of("down")[0][1].code is ErrorCode.UPSTREAM_WEDGED
    await eventually(lambda: fleet.status("m").state == "ready", 60)
    assert counted(metrics, "wedges") == 1


async def test_a_switched_off_watchdog_lets_a_stopped_engine_be(fleets, engine_binary, mid_model):
    fleet, seen = fleets({"m": {"path": mid_model, "wedge_after_s": 0}}, engine_binary)
    await fleet.load("m")
    os.kill(fleet.status("m").pid, signal.SIGSTOP)
    mirror = fleet._runner("m")._live.mirror
    await eventually(lambda: mirror.silent_polls >= 4, 60)
    assert not seen.of("down") and fleet.status("m").state == "ready"
    report = await fleet.unload("m", force=True)
    assert report.signals == ("SIGKILL",)


async def test_crashes_back_off_and_say_when_the_next_try_is(fleets, engine_binary, mid_model):
    """The first restart comes at once, the second waits; requests join it, an operator does not wait."""
    metrics = Metrics()
    model = {"path": mid_model, "restart": {"first_s": 30}}
    fleet, seen = fleets({"m": model}, engine_binary, metrics=metrics)
    await fleet.load("m", Cause.REQUEST)
    os.kill(fleet.status("m").pid, signal.SIGKILL)
    await eventually(lambda: counted(metrics, "restarts") == 1 and fleet.status("m").state == "ready")
    os.kill(fleet.status("m").pid, signal.SIGKILL)
    await eventually(lambda: fleet.status("m").state == "failed")
    status = fleet.status("m")
    assert status.restart and status.strikes == 2 and status.cause is Cause.CRASH
    assert 20 < status.retry_at - time.monotonic() <= 30
    assert "was killed by SIGKILL" in status.last_error
    waiting = asyncio.create_task(fleet.load("m", Cause.REQUEST))
    await asyncio.sleep(0)
    assert fleet.status("m").state == "failed" and not waiting.done()
    await fleet.load("m", Cause.OPERATOR)
    assert (await waiting).slots == 4
    assert counted(metrics, "crashes") == 2 and counted(metrics, "restarts") == 1


async def test_a_stop_ends_a_planned_restart(fleets, engine_binary, mid_model):
    fleet, seen = fleets({"m": {"path": mid_model, "restart": {"first_s": 30}}}, engine_binary)
    for _ in range(2):
        await fleet.load("m", Cause.OPERATOR)
        os.kill(fleet.status("m").pid, signal.SIGKILL)
        await eventually(lambda: seen.of("down"))
        await eventually(lambda: fleet.status("m").state in {"failed", "ready"})
    await eventually(lambda: fleet.status("m").state == "failed" or fleet.status("m").pid)
    waiting = asyncio.create_task(fleet.load("m", Cause.REQUEST))
    await asyncio.sleep(0)
    await fleet.unload("m", force=True)
    assert fleet.status("m").state == "unloaded" and not fleet.status("m").restart
    await asyncio.wait({waiting}, timeout=5)
    assert waiting.done()


async def test_requests_are_told_when_to_come_back(fleets, engine_binary, tmp_path):
    """After the second failed attempt in a row a request gets the same error at once, with the time of the next try."""
    model = {"path": tmp_path / "gone.gguf", "restart": {"first_s": 30}}
    fleet, seen = fleets({"m": model}, engine_binary)
    for _ in range(2):
        with pytest.raises(ProxyError) as failed:
            await fleet.load("m", Cause.REQUEST)
        assert failed.value.retry_after_s is None
    with pytest.raises(ProxyError, match=r"gone.gguf.*2 times in a row.*again in \d+ s") as soon:
        await fleet.load("m", Cause.REQUEST)
    assert soon.value.code is ErrorCode.MODEL_LOAD_FAILED and 20 < soon.value.retry_after_s <= 30
    assert len(seen.of("load_failed")) == 3 and fleet.status("m").generation == 2
