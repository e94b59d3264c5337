"""Operators' orders that meet each other, a disk that hangs, or a client that comes back: nobody is told what is not so."""

# ruff: noqa: F811 - fixtures of another module

import asyncio
import os
import signal

import pytest

from proxy.backends.gatekeeper import Gatekeeper, blocked
from proxy.backends.gates import OPEN, Gate
from proxy.backends.jobs import JobState
from proxy.backends.ports import NoRequests
from proxy.backends.process import EngineProcess, StopReport
from proxy.backends.views import Then
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.state import StateDir
from proxy.types import AdminState, Cause
from tests.backends.conftest import alive, eventually
from tests.backends.test_control import ME, PATIENT_S, worlds  # noqa: F401 - a fixture
from tests.backends.test_control_hard import LONG_S, OTHER, engine


async def at_work(world, name="running"):
    """A client whose answer has begun and does not end by itself."""
    client = world.client(name, n_predict=20000)
    await eventually(lambda: client.sink.parts, LONG_S)
    return client


async def leaves(client):
    client.task.cancel()
    await asyncio.wait({client.task})


# -- force -----------------------------------------------------------------------------------------------------------


@engine
async def test_a_force_answers_though_the_disk_hangs(worlds, engine_binary, mid_model, tmp_path):
    """Where no gate changed there is nothing to wait for; else the answer says what is not written yet."""
    world = worlds({"m": {"path": mid_model}}, engine_binary, state=StateDir.open(tmp_path))
    fleet, state = world.fleet, world.fleet._state
    await fleet.load("m")
    with state._writing:
        report = await asyncio.wait_for(fleet.force("m", audit=ME), LONG_S)
        assert report.clean and report.problem == ""
        report = await asyncio.wait_for(
            fleet.force("m", then=Then.BLOCK, reason="bad disk", audit=ME), LONG_S
        )
        assert report.clean and "gates.json" in report.problem and fleet.gates.gate("m").reason == "bad disk"
    await eventually(
        lambda: (tmp_path / "gates.json").exists() and "bad disk" in (tmp_path / "gates.json").read_text()
    )


@engine
async def test_a_client_that_comes_back_with_its_id_is_not_left_over(worlds, engine_binary, mid_model):
    """It was told of the force and asks again at once: a newcomer that waits, not a request that did not end."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    before = await at_work(world)
    forcing = asyncio.create_task(fleet.force("m", audit=ME))
    await asyncio.sleep(0)
    again = world.client("running", n_predict=3)
    report = await asyncio.wait_for(forcing, LONG_S)
    assert report.names == ("running",) and report.unsettled == () and report.clean
    assert fleet.jobs.get(report.job).state is JobState.DONE
    await asyncio.wait_for(asyncio.gather(before.task, again.task), LONG_S)
    assert (before.outcome, again.outcome) == ("model_unloaded", "completed")


def test_a_model_that_is_no_more_has_no_gate_to_undo():
    """A reload may let a model go while a force of it is under way, and bring it back, too."""
    applied = []
    keeper = Gatekeeper(
        ("m",),
        state=StateDir.open(None),
        requests=NoRequests(),
        apply=lambda model, gate: applied.append((model, gate.state)),
        metrics=Metrics(),
        tell=lambda _: None,
    )
    for back in (False, True):
        keeper.add("m")
        with keeper.draining("m", Gate(AdminState.DRAINING)):
            keeper.forget("m")
            if back:
                keeper.add("m")
        assert keeper.gate("m") is OPEN
    assert keeper.effective("m") is OPEN
    assert applied == [("m", AdminState.DRAINING)] * 2


# -- unload ----------------------------------------------------------------------------------------------------------


@engine
async def test_a_load_during_a_drain_follows_it(worlds, engine_binary, mid_model):
    """Who orders a load while the model is about to go gets one that stays; a force in between makes it void."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    first, running = fleet.key("m"), await at_work(world)
    unload = fleet.begin_unload("m", deadline_s=3000, audit=ME)
    load = fleet.begin_load("m", OTHER)
    assert fleet.begin_load("m", ME).id == load.id and not load.ended
    await leaves(running)
    assert (await fleet.jobs.wait(unload.id, LONG_S)).state is JobState.DONE
    ended = await fleet.jobs.wait(load.id, LONG_S)
    assert (ended.state, ended.audit) == (JobState.DONE, OTHER)
    assert fleet.status("m").state == "ready" and fleet.key("m").generation > first.generation

    running = await at_work(world)
    unload = fleet.begin_unload("m", deadline_s=3000, audit=ME)
    load = fleet.begin_load("m", OTHER)
    assert (await asyncio.wait_for(fleet.force("m", audit=ME), LONG_S)).clean
    ended = await fleet.jobs.wait(load.id, LONG_S)
    assert ended.state is JobState.CANCELLED and "force-unload" in ended.error
    await running.task
    assert fleet.status("m").state == "unloaded"


@engine
async def test_a_load_that_was_to_follow_ends_with_its_model(worlds, engine_binary, mid_model):
    """A reload takes the model out while it drains: the load is no job for ever."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    running = await at_work(world)
    unload = fleet.begin_unload("m", deadline_s=3000, audit=ME)
    gone = asyncio.Event()
    assert fleet.refits.retire("m", lambda _: gone.set(), ME).id == unload.id
    load = fleet.begin_load("m", OTHER)
    await leaves(running)
    assert (await fleet.jobs.wait(load.id, LONG_S)).ended
    await asyncio.wait_for(gone.wait(), LONG_S)
    assert fleet.jobs.get(unload.id).state is JobState.DONE


@engine
async def test_nothing_follows_an_unload_that_a_shutdown_overtakes(worlds, engine_binary, mid_model):
    """A load that was to follow it ends with the proxy: no engine is started on its way down."""
    world = worlds({"m": {"path": mid_model}, "slow": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await asyncio.gather(fleet.load("m"), fleet.load("slow"))
    # an engine with a client that does not leave takes its grace to end
    _, stays = await asyncio.open_connection("127.0.0.1", fleet.status("slow").port)
    stays.write(b"GET /props HTTP/1.1\r\n")
    pid, running = fleet.status("m").pid, await at_work(world)
    unload = fleet.begin_unload("m", deadline_s=600, audit=ME)
    load = fleet.begin_load("m", OTHER)
    assert not load.ended
    world.admission.shutdown(ProxyError(ErrorCode.SHUTTING_DOWN, "over"), cut=True)
    await asyncio.wait_for(fleet.stop(LONG_S), LONG_S)
    await asyncio.wait_for(running.task, LONG_S)
    assert fleet.status("m").state == "unloaded" and not alive(pid)
    assert fleet.jobs.get(unload.id).ended and fleet.jobs.get(load.id).state is JobState.CANCELLED
    stays.close()


async def test_gates_that_are_written_are_written(tmp_path, monkeypatch):
    """Who asks for them to be saved again, without any time, is told that they are; a failed try is repeated."""
    state = StateDir.open(tmp_path)
    gates = Gatekeeper(
        ("m",),
        state=state,
        requests=NoRequests(),
        apply=lambda *_: None,
        metrics=Metrics(),
        tell=lambda _: None,
    )
    gates.set("m", blocked("x"))
    assert await gates.save() == "" and await gates.save(0.0) == ""
    gates.set("m", blocked("y"))
    assert "still being written" in await gates.save(0.0)
    await gates.close()
    assert await gates.save(0.0) == "" and "y" in (tmp_path / "gates.json").read_text()
    gates.set("m", blocked("z"))
    with monkeypatch.context() as patched:
        patched.setattr(state, "write", lambda *_: "no room")
        assert await gates.save() == "no room"
    assert await gates.save() == "" and "z" in (tmp_path / "gates.json").read_text()
    state.close()


@engine
@pytest.mark.parametrize("cause", [Cause.EVICT, Cause.RELOAD])
async def test_who_needs_the_model_gone_does_not_wait_for_an_operators_patience(
    worlds, engine_binary, mid_model, cause
):
    """Another model's load, or a reload, joins a drain that may last a day: its own deadline counts then."""
    model = {"path": mid_model, "stop": {"drain_s": 0.2, "grace_s": 3}}
    world = worlds({"m": model}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    running = await at_work(world)
    unload = fleet.begin_unload("m", deadline_s=86400, audit=ME)
    assert fleet.begin_unload("m", cause=cause).id == unload.id
    ended = await fleet.jobs.wait(unload.id, LONG_S)
    assert ended.state is JobState.DONE and ended.cut == ("running",)
    await running.task


@engine
async def test_what_is_counted_of_an_unload(worlds, engine_binary, mid_model):
    """All of its time, only where something was loaded; and a drain is no blocked gate."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    running = await at_work(world)
    drain_s = 0.5
    unload = fleet.begin_unload("m", deadline_s=drain_s, audit=ME)
    assert (
        fleet.gates.effective("m").state is AdminState.DRAINING
        and world.value("gate_blocked", model="m") == 0
    )
    await fleet.jobs.wait(unload.id, LONG_S)
    await running.task
    assert world.value("unload_seconds_sum", model="m", forced="false") >= drain_s
    again = fleet.begin_unload("m", audit=ME)
    assert (await fleet.jobs.wait(again.id, LONG_S)).state is JobState.DONE
    assert (await fleet.force("m", audit=ME)).clean
    assert world.value("unload_seconds_count", model="m") == 1
    await fleet.set_gate("m", blocked("night", "hold", ME))
    assert world.value("gate_blocked", model="m") == 1


# -- what ended by itself --------------------------------------------------------------------------------------------


@engine
@pytest.mark.parametrize("loading", [False, True])
async def test_an_engine_that_outlives_its_loss_is_named(
    worlds, engine_binary, mid_model, monkeypatch, capsys, loading
):
    """A lost engine whose KILL does nothing: it is said, and who stops the model hears of it, too."""
    model = {"path": mid_model, "restart": {"first_s": 600}, "stop": {"grace_s": PATIENT_S}}
    world = worlds({"m": model}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    pid, held, clearing = fleet.status("m").pid, asyncio.Event(), asyncio.Event()
    kept = []

    async def undying(self, grace_s):
        kept.append(self)
        clearing.set()
        await held.wait()
        return StopReport(None, ("SIGKILL",), (self.pid,))

    with monkeypatch.context() as patched:
        patched.setattr(EngineProcess, "stop", undying)
        live = fleet._runners["m"]._live
        live.sentinel._tell(Cause.WEDGE, ErrorCode.UPSTREAM_WEDGED, "it stands still")
        await asyncio.wait_for(clearing.wait(), LONG_S)
        if loading:
            assert not fleet.begin_load("m", ME).ended
        forcing = asyncio.create_task(fleet.force("m", audit=ME))
        await eventually(lambda: fleet.status("m").state == ("stopping" if loading else "unloaded"))
        held.set()
        report = await asyncio.wait_for(forcing, LONG_S)
    assert alive(pid) and report.left == (pid,)
    assert "processes survived a kill" in capsys.readouterr().out
    os.kill(pid, signal.SIGCONT)
    assert not (await kept[0].kill()).left
