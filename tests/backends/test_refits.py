"""Another configuration for a model at work: what its generation was started from stays its own."""

# ruff: noqa: F811 - fixtures of another module

import asyncio
import os
import shutil
import signal
from pathlib import Path

import orjson
import pytest

from proxy.admission import TicketSpec
from proxy.backends import refits
from proxy.backends.jobs import JobState
from proxy.backends.memory import Pool
from proxy.backends.room import Room
from proxy.errors import ProxyError
from proxy.settings import Engine, Memory, Model
from proxy.state import StateDir
from proxy.types import Cause, ModelState, Outcome
from tests.backends.conftest import ALONE, ENDLESS, SMALL, completion, eventually
from tests.backends.test_control import worlds  # noqa: F401 - a fixture

LONG_S = 120.0
"""For what takes a few seconds on an idle machine."""
PROMPT = "the mill by the river " * 60
engine = pytest.mark.engine


def twin(path: Path, into: Path) -> Path:
    """Make a model of the same shape and size with other weights: its last two blocks of weights change places."""
    raw, block = bytearray(path.read_bytes()), 64 << 10
    raw[-2 * block :] = raw[-block:] + raw[-2 * block : -block]
    into.write_bytes(raw)
    return into


def change(fleet, *, shaped=True, **fields):
    """Give the model `m` other fields, as a reload does."""
    before = fleet._catalog.model("m")
    after = Model.model_validate({**before.model_dump(exclude_unset=True), **fields})
    fleet._catalog.replace({"m": after})
    return fleet.refits.change("m", after, restart=shaped)


async def reloaded(fleet, **fields):
    """Change what shapes the process and wait for the next one."""
    before = fleet.key("m").generation
    assert change(fleet, **fields) is not None
    await eventually(lambda: (key := fleet.key("m")) is not None and key.generation > before, LONG_S)


async def unloaded(fleet):
    job = fleet.begin_unload("m")
    assert (await fleet.jobs.wait(job.id, LONG_S)).state is JobState.DONE


async def ask(fleet):
    """Return how much of the prompt was known already, and the answer."""
    exchange = await fleet.upstream(fleet.key("m")).open(completion(8, stream=False, prompt=PROMPT))
    body = orjson.loads(await exchange.read(1 << 20))
    exchange.close()
    return body["timings"]["cache_n"], body["content"]


@engine
async def test_what_slots_hold_is_never_given_to_another_model(fleets, engine_binary, mid_model, tmp_path):
    """A reload with other weights of the same shape: the old ones' state is not restored into them."""
    other = twin(mid_model, tmp_path / "other.gguf")
    fleet, _ = fleets(
        {"m": {"path": mid_model, "slot_cache": True}}, engine_binary, state=StateDir.open(tmp_path / "state")
    )
    await fleet.load("m")
    cold, first = await ask(fleet)
    await reloaded(fleet, path=other)
    again, text = await ask(fleet)
    assert cold == again == 0 and text != first
    await unloaded(fleet)
    await fleet.load("m")
    warm, same = await ask(fleet)
    assert warm > 200 and same == text


@engine
async def test_a_model_file_that_was_replaced_finds_no_old_slots(fleets, engine_binary, mid_model, tmp_path):
    """Other weights at the same path, put there while it was down or while it ran: nothing stale is restored."""
    path, other = tmp_path / "m.gguf", twin(mid_model, tmp_path / "other.gguf")
    shutil.copy(mid_model, path)
    folder = tmp_path / "state" / "slots" / "m"
    fleet, _ = fleets(
        {"m": {"path": path, "slot_cache": True}}, engine_binary, state=StateDir.open(tmp_path / "state")
    )
    await fleet.load("m")
    _, first = await ask(fleet)
    await unloaded(fleet)
    assert list(folder.iterdir())
    stat = path.stat()
    shutil.copy(other, path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    await fleet.load("m")
    again, second = await ask(fleet)
    assert again == 0 and second != first
    assert list(folder.iterdir()) == []

    shutil.copy(mid_model, tmp_path / "next")
    (tmp_path / "next").replace(path)
    await unloaded(fleet)
    assert list(folder.iterdir()) == [], "it belongs to a file that is no more"
    await fleet.load("m")
    assert await ask(fleet) == (0, first)


@engine
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "unloaded"])
async def test_slots_that_nobody_can_use_leave_the_disk(fleets, engine_binary, mid_model, tmp_path, loaded):
    """Other arguments, `slot_cache` off, or the model removed: nothing is saved for that, and what was saved goes."""
    slots = tmp_path / "state" / "slots"
    fleet, _ = fleets(
        {"m": {"path": mid_model, "slot_cache": True}}, engine_binary, state=StateDir.open(tmp_path / "state")
    )

    async def at_work():
        await fleet.load("m")
        await ask(fleet)
        if not loaded:
            await unloaded(fleet)
            assert list(slots.glob("m/*")) and list(slots.glob("*.json"))
        fleet._runner("m").save_slots, saves = counting(fleet._runner("m").save_slots)
        return saves

    async def settled(saves):
        await eventually(lambda: not fleet.refits.busy, LONG_S)
        assert not any(saves) and not list(slots.glob("*/*")) and not list(slots.glob("*.json"))

    saves = await at_work()
    change(fleet, args=["-b", "256"])
    await settled(saves)
    assert (slots / "m").is_dir(), "an engine may have been told to use it"
    saves = await at_work()
    change(fleet, slot_cache=False)
    await settled(saves)
    assert list(slots.iterdir()) == []
    change(fleet, slot_cache=True)
    await eventually(lambda: not fleet.refits.busy, LONG_S)
    await unloaded(fleet)
    saves = await at_work()
    fleet.refits.retire("m", lambda _: None)
    await settled(saves)
    assert list(slots.iterdir()) == []


def counting(save):
    """Return the same, and what it returned."""
    saved = []

    async def counted():
        saved.append(await save())
        return saved[-1]

    return counted, saved


async def test_slots_of_models_that_went_while_no_proxy_ran_leave_the_disk(fleets, tmp_path):
    """What an earlier proxy saved for a model that is no more, or keeps no slots now."""
    slots = tmp_path / "slots"
    for name in ("kept", "off", "gone"):
        (slots / name).mkdir(parents=True)
        (slots / name / "slot-0.bin").write_bytes(b"x")
        (slots / f"{name}.json").write_text("{}")
    models = {
        name: {"path": tmp_path / "none.gguf", "slot_cache": name == "kept"} for name in ("kept", "off")
    }
    fleet, _ = fleets(models, state=StateDir.open(tmp_path))
    await fleet.start()
    assert sorted(path.name for path in slots.iterdir()) == ["kept", "kept.json"]
    assert list(slots.glob("kept/*"))


@engine
async def test_slots_of_an_engine_that_was_taken_over_are_kept_as_well(
    fleets, engine_binary, mid_model, tmp_path
):
    """What its files were is known from the record of its start: replaced since then, nothing is saved."""
    path, state = tmp_path / "m.gguf", tmp_path / "state"
    shutil.copy(mid_model, path)
    models = {"m": {"path": path, "slot_cache": True, "on_proxy_exit": "keep"}}

    async def taken_over(first):
        await ask(first)
        pid = first.status("m").pid
        await first.stop(6)
        second, _ = fleets(models, engine_binary, state=StateDir.open(state))
        await second.start()
        await eventually(lambda: second.key("m") is not None, LONG_S)
        assert second.status("m").pid == pid
        return second

    fleet, _ = fleets(models, engine_binary, state=StateDir.open(state))
    await fleet.load("m")
    fleet = await taken_over(fleet)
    await unloaded(fleet)
    await fleet.load("m")
    assert (await ask(fleet))[0] > 200
    fleet = await taken_over(fleet)
    os.utime(path)
    await unloaded(fleet)
    await fleet.load("m")
    assert (await ask(fleet))[0] == 0
    await fleet.force("m")


@engine
async def test_memory_is_learnt_for_what_held_it(fleets, engine_binary, mid_model, zoo, tmp_path):
    """A reload to a small model: what the large one took is not taken for its own."""
    small = tmp_path / "small.gguf"
    shutil.copy(zoo("llama"), small)
    fleet, _ = fleets({"m": {"path": mid_model}}, engine_binary)
    await fleet.load("m")
    large = fleet.status("m").pid
    await reloaded(fleet, path=small)
    assert fleet.status("m").pid != large
    assert fleet._room.need("m") == {Pool.RAM: small.stat().st_size}
    [learnt] = fleet._room._peaks
    assert str(mid_model) in learnt


def test_a_resident_counts_with_what_it_was_started_from():
    """While a large model drains for a small one of its name, the memory that it holds is not free."""

    class Tenant:
        settings = Model(path="/large", ram_bytes=70)
        occupancy = (ModelState.READY, None, 0.0, None)

    models = {"m": Model(path="/small", ram_bytes=1), "n": Model(path="/n", ram_bytes=50)}
    room = Room(
        Memory(ram_bytes=100), models, Engine(), state=StateDir.open(None), clock=lambda: 1.0,
        wanted=lambda _: False, evict=lambda _: None, finished=lambda _: True,
    )  # fmt: skip
    room.open({"m": Tenant()})
    [resident] = room._residents()
    assert resident.need == {Pool.RAM: 70} and room.need("m") == {Pool.RAM: 1}


@engine
async def test_what_others_wanted_down_is_not_loaded_again(fleets, engine_binary, mid_model):
    """A reload's unload loads again; not where somebody else began it, joined it, or forced the model out meanwhile."""
    fleet, seen = fleets({"m": {"path": mid_model}}, engine_binary, engine_args=(*SMALL, *ALONE))

    async def drains(begin):
        """Return the job that `begin` sets going while a request runs, and how to let that one go."""
        await fleet.load("m")
        exchange = await fleet.upstream(fleet.key("m")).open(completion(ENDLESS))
        return begin(), exchange.close

    async def over(job, let_go):
        let_go()
        await fleet.jobs.wait(job.id, LONG_S)
        await eventually(lambda: not fleet.refits.busy, LONG_S)

    def operator():
        return fleet.begin_unload("m", deadline_s=LONG_S)

    batch = iter(range(100, 200))

    def reload():
        return change(fleet, args=["-b", str(next(batch))])

    job, let_go = await drains(reload)
    await over(job, let_go)
    await eventually(lambda: fleet.key("m") is not None, LONG_S)
    for first, then in ((operator, reload), (reload, operator)):
        job, let_go = await drains(first)
        assert then().id == job.id
        await over(job, let_go)
        assert fleet.status("m").state == "unloaded"
    job, _ = await drains(reload)
    await fleet.force("m")
    await over(job, lambda: None)
    assert fleet.status("m").state == "unloaded"
    job, let_go = await drains(reload)
    assert operator().id == job.id
    fleet.begin_load("m")
    await over(job, let_go)
    await eventually(lambda: fleet.key("m") is not None and fleet.key("m").generation > 9, LONG_S)
    assert ("m", "unloaded", "starting", "request") not in seen.of("state")


@engine
async def test_a_reload_that_mends_a_model_is_tried_at_once(fleets, engine_binary, mid_model, tmp_path):
    """Failures of the old configuration are no reason to make a request of the new one wait."""
    bad = tmp_path / "none.gguf"
    patient = {"first_s": 600, "max_s": 600}
    fleet, _ = fleets({"m": {"path": bad, "restart": patient}}, engine_binary)
    for _ in range(2):
        with pytest.raises(ProxyError):
            await fleet.load("m")
    status = fleet.status("m")
    assert status.strikes == 2 and status.retry_at is not None
    change(fleet, shaped=False, ttl_s=9)
    with pytest.raises(ProxyError, match="600|later|again"):
        await fleet.load("m", Cause.REQUEST)
    assert change(fleet, path=mid_model) is None
    assert fleet.status("m").strikes == 0
    await asyncio.wait_for(fleet.load("m", Cause.REQUEST), LONG_S)

    path = tmp_path / "m.gguf"
    shutil.copy(mid_model, path)
    await reloaded(fleet, path=path)
    pid = fleet.status("m").pid
    path.unlink()
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: fleet.status("m").restart and fleet.status("m").strikes == 2, LONG_S)
    assert change(fleet, path=mid_model) is None
    await eventually(lambda: fleet.status("m").state == "ready", LONG_S)
    assert fleet.status("m").strikes == 0


@engine
async def test_series_of_a_removed_model_end_after_its_last_request(
    worlds, engine_binary, mid_model, monkeypatch
):
    """A request that was cut and still writes to its client is counted before the model's series are dropped."""
    monkeypatch.setattr(refits, "SETTLE_S", LONG_S)
    world = worlds({"m": {"path": mid_model, "stop": {"drain_s": 0}}}, engine_binary)
    fleet, gone = world.fleet, []
    await fleet.load("m")
    ticket = world.admission.submit(
        TicketSpec(
            id="slow", model="m", key="k", priority=0, priority_name="normal", tasks=1, stream=True, body_bytes=10,
            endpoint="/completion",
        )
    )  # fmt: skip
    await ticket.granted()

    def drop(name):
        gone.append(name)
        world.admission.drop_model(name)

    fleet.refits.retire("m", drop)
    await eventually(lambda: gone and not fleet._runners, LONG_S)
    error = await asyncio.wait_for(asyncio.shield(ticket.ended), LONG_S)
    for _ in range(5):
        await asyncio.sleep(0)
    assert fleet.refits.busy, "it did not wait for the request"
    world.metrics.upstream_errors.labels("m", "mid_body").inc()
    ticket.release(Outcome.FAILED, error.code.value)
    await eventually(lambda: not fleet.refits.busy, LONG_S)
    assert 'model="m"' not in world.metrics.text().decode()


@engine
async def test_what_changes_while_a_model_loads_holds_for_it(fleets, engine_binary, mid_model):
    """A field that shapes nothing is no reason to load again, and the load under way was told the old value."""
    fleet, _ = fleets({"m": {"path": mid_model, "wedge_after_s": 300}}, engine_binary)
    fleet.begin_load("m")
    await eventually(lambda: fleet.status("m").pid is not None, LONG_S)
    assert fleet.key("m") is None, "it was loaded too fast: this shows nothing"
    assert change(fleet, shaped=False, wedge_after_s=None) is None
    await eventually(lambda: fleet.key("m") is not None, LONG_S)
    assert fleet._runner("m")._live.sentinel._dog is None
    assert fleet._runner("m").settings.wedge_after_s is None


@engine
async def test_a_change_during_a_force_loads_nothing(fleets, engine_binary, mid_model):
    """Whoever is being forced out stays out, unless somebody asked for it since."""
    fleet, _ = fleets({"m": {"path": mid_model}}, engine_binary)
    for again in (False, True):
        await fleet.load("m")
        forced = asyncio.create_task(fleet.force("m"))
        await eventually(lambda: fleet.status("m").state == "stopping", LONG_S, 0)
        if again:
            fleet.begin_load("m")
        assert change(fleet, args=["-b", "128" if again else "256"]) is None
        assert (await forced).clean
        await eventually(lambda: not fleet.refits.busy, LONG_S)
        if again:
            await eventually(lambda: fleet.key("m") is not None, LONG_S)
        else:
            assert fleet.status("m").state == "unloaded"
