"""Real engines that hang inside: which of the watchdog's rules finds it, and which waits are none of its business."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxy.errors import ErrorCode
from proxy.metrics import Metrics
from proxy.state import StateDir
from proxy.types import EnginePhase
from proxy.upstream import UpstreamDied
from tests.backends.conftest import Collect, alive, completion, eventually
from tests.backends.test_watch import _through, counted, native_binary  # noqa: F401 - a fixture

pytestmark = pytest.mark.engine
SOON_S = 120.0
"""For what takes a few seconds on an idle machine."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile what lets an engine hang while a file is there."""
    library = tmp_path_factory.mktemp("shim") / "hang.so"
    source = Path(__file__).with_name("hang.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True, timeout=60
    )
    return library


@pytest.fixture
def ready(fleets, native_binary, zoo, shim, tmp_path) -> Callable:  # noqa: F811
    """Load a model of the zoo into an engine that hangs while `hang` exists, with these arguments and settings."""

    async def make(*args: str, model: str = "llama", state: StateDir | None = None, **more):
        hang, metrics = tmp_path / "hang", Metrics()
        env = {"LD_PRELOAD": str(shim), "HANG_FILE": str(hang)}
        fleet, seen = fleets(
            {"m": {"path": zoo(model), "env": env, **more}},
            native_binary,
            engine_args=("-c", "2048", "-np", "2", "-t", "1", "--no-warmup", *args),
            patched=True,
            metrics=metrics,
            state=state,
        )
        await fleet.load("m")
        return SimpleNamespace(
            fleet=fleet, seen=seen, hang=hang, metrics=metrics, key=fleet.key("m"), pid=fleet.status("m").pid
        )

    return make


async def ask(fleet, tokens=3) -> bytes:
    exchange, sink = await fleet.upstream(fleet.key("m")).open(completion(tokens)), Collect()
    try:
        await exchange.attach(sink)
    finally:
        exchange.close()
    return sink.body


async def declared(it, running) -> str:
    """Wait for the verdict, the end of what ran and the next engine; return the words."""
    await eventually(lambda: it.seen.of("down"), SOON_S)
    # not before: one that goes on could still finish its answer
    await eventually(lambda: not alive(it.pid), SOON_S)
    it.hang.unlink()
    [(down, error)] = it.seen.of("down")
    assert down == it.key and error.code is ErrorCode.UPSTREAM_WEDGED
    with pytest.raises(UpstreamDied, match="makes no progress"):
        await asyncio.wait_for(running, SOON_S)
    assert ("m", "ready", "failed", "wedge") in it.seen.of("state")
    await eventually(lambda: it.fleet.status("m").state == "ready", SOON_S)
    assert not alive(it.pid) and it.fleet.key("m").generation > it.key.generation
    assert b'"stop":true' in await asyncio.wait_for(ask(it.fleet), SOON_S)
    assert counted(it.metrics, "wedges") == counted(it.metrics, "restarts") == 1
    return error.message


@pytest.mark.parametrize(
    ("model", "before"), [("llama", 0), ("llama-mid", 300)], ids=["the first call", "a later call"]
)
async def test_a_decode_call_that_never_ends_is_found_while_slots_are_answered(ready, model, before):
    """The device stops answering inside a call: `/slots` says so all the time, and the call's own length is the sign."""
    it = await ready(model=model, wedge_after_s=1)
    if before:
        assert b'"stop":true' in await asyncio.wait_for(ask(it.fleet, before), SOON_S)
        dog = it.fleet._runner("m")._live.sentinel._dog
        await eventually(lambda: dog.longest_s > 0, SOON_S)
    it.hang.write_text("decode")
    running = asyncio.create_task(ask(it.fleet))
    words = await declared(it, running)
    assert "one decode call runs for" in words
    assert ("the longest before took at most" if before else "no other was seen") in words
    ran = [s.decode_running_ms for s in it.seen.snapshots if s.key == it.key]
    assert max(ran) > 1000 and sorted(ran)[-3] > 0, "it was seen to run more than once"


async def test_a_reload_changes_how_long_nothing_may_happen(ready):
    """`wedge_after_s` alone: the engine that serves goes on, and is watched by the new value; off means not watched."""
    it = await ready(wedge_after_s=600)

    def change(value):
        model = it.fleet._catalog.model("m").model_copy(update={"wedge_after_s": value})
        it.fleet._catalog.replace({"m": model})
        assert it.fleet.refits.change("m", model, restart=False) is None

    change(None)
    assert it.fleet._runner("m")._live.sentinel._dog is None
    change(1)
    it.hang.write_text("decode")
    words = await declared(it, asyncio.create_task(ask(it.fleet)))
    assert "one decode call runs for" in words


async def test_an_engine_that_never_begins_is_found(ready):
    """Its clock stands still while it waits for companions: a slot is busy, nothing decodes, and that for too long."""
    it = await ready("--phase-admit-ms", "1000", wedge_after_s=1)
    it.hang.write_text("clock")
    began = time.monotonic()
    running = asyncio.create_task(ask(it.fleet))
    words = await declared(it, running)
    down = next(at for name, _, at in it.seen.calls if name == "down")
    assert down - began > 2.0, "the window of 1 s comes on top of wedge_after_s"
    assert "1 of its slots are busy and it decoded nothing for" in words
    assert {s.decode_running_ms for s in it.seen.snapshots if s.key == it.key} == {0.0}


async def test_an_engine_that_waits_for_companions_is_left_alone(ready):
    """A window three times wedge_after_s: the lone request is answered, and no wedge is declared."""
    it = await ready("--phase-admit-ms", "6000", wedge_after_s=2)
    began = time.monotonic()
    assert b'"stop":true' in await asyncio.wait_for(ask(it.fleet), SOON_S)
    assert time.monotonic() - began >= 6
    assert any(s.busy and s.phase is EnginePhase.IDLE for s in it.seen.snapshots), "it was not seen waiting"

    def at_us(name):
        found = [e.t_us for s in it.seen.snapshots for e in s.events if e.event == name]
        return found[0] if found else None

    sealed = await eventually(lambda: at_us("seal"), SOON_S)
    assert sealed - at_us("admit") > 5_000_000, "by its own clock it did not wait: this shows nothing"
    assert not it.seen.of("down") and it.fleet.key("m") == it.key
    assert counted(it.metrics, "wedges") == 0


async def test_answers_that_pause_while_others_read_are_left_alone(ready):
    """Yield: an answer pauses for longer than wedge_after_s while a long prompt is read, another waits at the barrier."""
    # both late ones come within the time that the answer may run on, and so into one cohort
    more = ["--phase-policy", "yield", "--phase-yield-ms", "2000", "-c", "98304", "-np", "3", "-b", "128"]
    it = await ready(*more, model="llama-mid", wedge_after_s=3)
    upstream = it.fleet.upstream(it.key)
    first = asyncio.create_task(ask(it.fleet, 30_000))
    await eventually(
        lambda: any(slot.decoded_tokens for snapshot in it.seen.snapshots for slot in snapshot.slots), SOON_S
    )
    # the longer ones are for machines that read the first too fast
    for count in (900, 1800, 3000):
        late = [
            asyncio.create_task(
                _through(upstream, completion(2, prompt=f"{n} " + "the mill by the river " * n))
            )
            for n in (count, 1)
        ]
        await asyncio.wait_for(asyncio.gather(*late), 250)
        paused = max(slot.paused_ms for snapshot in it.seen.snapshots for slot in snapshot.slots)
        ready_ms = max(slot.wait_ms for snapshot in it.seen.snapshots for slot in snapshot.slots)
        if paused > 4000 and ready_ms > 3000:
            break
    assert paused > 4000 and ready_ms > 3000, "the prompts were read too fast: this shows nothing"
    assert not it.seen.of("down") and it.fleet.key("m") == it.key and counted(it.metrics, "wedges") == 0
    first.cancel()
    await asyncio.wait({first})


async def test_a_slow_disk_is_no_wedge_while_slots_are_saved(ready, tmp_path):
    """Saving a slot blocks the engine's answers for longer than three probes; the slots are kept all the same."""
    it = await ready(wedge_after_s=1, slot_cache=True, state=StateDir.open(tmp_path / "state"))
    assert b'"stop":true' in await asyncio.wait_for(ask(it.fleet), SOON_S)
    await eventually(lambda: it.fleet.snapshot("m").busy == 0, SOON_S)
    it.hang.write_text("disk")
    job = it.fleet.begin_unload("m")
    mirror = it.fleet._runner("m")._live.mirror
    await eventually(lambda: mirror.silent_polls >= 4, SOON_S)
    assert it.fleet.jobs.get(job.id).progress.stage == "saving"
    report = await it.fleet.reconcile("m")
    assert report.clean, "the proxy's own order is no request that was lost"
    assert it.fleet.would_cut("m").exchanges == 0
    it.hang.unlink()
    assert (await it.fleet.jobs.wait(job.id, SOON_S)).state == "done"
    assert counted(it.metrics, "wedges") == 0 and ("m", "ready", "failed", "wedge") not in it.seen.of("state")
    [index] = (tmp_path / "state" / "slots").glob("*.json")
    assert '"slots":{}' not in index.read_text().replace(" ", ""), "nothing was saved"
