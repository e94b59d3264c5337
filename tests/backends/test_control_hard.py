"""Operators' control in hard times: no descriptors, a full disk, orders that meet, engines that will not die."""

# ruff: noqa: F811 - fixtures of another module

import asyncio
import os
import resource
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager, suppress

import pytest

from proxy.backends import caretaker
from proxy.backends.command import Command
from proxy.backends.gatekeeper import blocked, opened
from proxy.backends.jobs import JobKind, JobState
from proxy.backends.logtail import LogTail
from proxy.backends.process import EngineProcess, StopReport
from proxy.backends.views import Then
from proxy.state import StateDir
from proxy.types import AdminState, Audit, Cause
from tests.backends.conftest import alive, eventually
from tests.backends.test_control import ME, worlds  # noqa: F401 - a fixture
from tests.backends.test_fleet_kinds import ROOT

engine = pytest.mark.engine
LONG_S = 60.0
"""For what takes a second on a machine that does nothing else."""
OTHER = Audit("night", "127.0.0.1")


@contextmanager
def no_descriptors():
    """Let no file, pipe or socket be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # 0, 1 and 2 are taken: what is closed meanwhile gives no room
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@engine
async def test_a_force_needs_no_descriptors(worlds, engine_binary, mid_model):
    """A proxy that has opened all the files it may still ends a model, and loads it again later."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    pid, running = fleet.status("m").pid, world.client("running")
    await eventually(lambda: running.sink.parts, LONG_S)
    with no_descriptors():
        report = await asyncio.wait_for(fleet.force("m", audit=ME), LONG_S)
    assert report.clean and fleet.status("m").state == "unloaded" and not alive(pid)
    await asyncio.wait_for(running.task, LONG_S)
    assert running.outcome == "model_unloaded"
    await asyncio.wait_for(fleet.load("m"), LONG_S)


async def test_a_process_that_cannot_be_watched_does_not_run(tmp_path):
    """Out of descriptors between the start of a process and its watch: it is ended, not forgotten."""
    mark = tmp_path / "ran"
    words = f"touch {mark}; sleep 600"
    real = os.pidfd_open
    seen = []

    def refuse(pid, flags=0):
        seen.append(pid)
        raise OSError(24, "Too many open files")

    os.pidfd_open = refuse
    try:
        with pytest.raises(OSError, match="Too many open files"):
            await EngineProcess.start(
                Command(("sh", "-c", words), dict(os.environ)), watch=False, tail=LogTail()
            )
    finally:
        os.pidfd_open = real
    assert len(seen) == 1 and not alive(seen[0])


@engine
async def test_a_stop_that_fails_does_not_stay_stopping(
    worlds, engine_binary, mid_model, monkeypatch, tmp_path
):
    """Whatever goes wrong while a process is stopped: the answer names what is left, and the model can be loaded."""
    state = StateDir.open(tmp_path / "state")
    world = worlds({"m": {"path": mid_model}}, engine_binary, state=state)
    fleet = world.fleet
    await fleet.load("m")
    pid = fleet.status("m").pid

    async def broken(self, grace_s):
        raise RuntimeError("what nobody thought of")

    with monkeypatch.context() as patched:
        patched.setattr(EngineProcess, "stop", broken)
        report = await asyncio.wait_for(fleet.force("m", audit=ME), LONG_S)
    assert report.left == (pid,) and not report.clean and alive(pid)
    assert fleet.status("m").state == "unloaded"
    job = fleet.jobs.get(report.job)
    assert job.state is JobState.FAILED and str(pid) in job.error
    [stray] = (await fleet.reconcile("m")).found
    assert stray.difference.subject == str(pid) and stray.repair == "it was ended"
    await eventually(lambda: not alive(pid))
    await asyncio.wait_for(fleet.load("m"), LONG_S)


@engine
async def test_what_dies_late_takes_its_record_with_it(
    worlds, engine_binary, mid_model, monkeypatch, tmp_path
):
    """A process that outlives its KILL for a while: as soon as it is gone there is nothing left to reconcile."""
    state = StateDir.open(tmp_path / "state")
    world = worlds({"m": {"path": mid_model}}, engine_binary, state=state)
    fleet = world.fleet
    await fleet.load("m")
    pid, stop, late = fleet.status("m").pid, EngineProcess.stop, []

    async def undying(self, grace_s):
        late.append(self)
        return StopReport(None, ("SIGTERM", "SIGKILL"), (self.pid,))

    with monkeypatch.context() as patched:
        patched.setattr(EngineProcess, "stop", undying)
        report = await asyncio.wait_for(fleet.force("m", audit=ME), LONG_S)
    assert report.left == (pid,) and alive(pid)
    [record] = fleet._runs.known("m")
    [file] = (tmp_path / "state" / "runs").iterdir()
    await stop(late[0], 0)
    assert not alive(pid)
    await eventually(lambda: not fleet._runs.known("m"), LONG_S)
    assert record.pid == pid and not file.exists()
    report = await fleet.reconcile("m")
    assert report.clean, report


@engine
async def test_a_load_that_ends_by_itself_while_it_is_given_up_leaves_no_record(
    worlds, engine_binary, mid_model, monkeypatch, tmp_path
):
    """The force comes while the failed load clears its own process away."""
    state = StateDir.open(tmp_path / "state")
    world = worlds({"m": {"path": mid_model}}, engine_binary, state=state)
    fleet, kill, killing, go = world.fleet, EngineProcess.kill, asyncio.Event(), asyncio.Event()

    async def held(self):
        killing.set()
        await go.wait()
        return await kill(self)

    monkeypatch.setattr(EngineProcess, "kill", held)
    loading = asyncio.create_task(fleet.load("m"))
    await eventually(lambda: fleet.status("m").pid, LONG_S)
    os.kill(fleet.status("m").pid, signal.SIGKILL)
    await asyncio.wait_for(killing.wait(), LONG_S)
    forcing = asyncio.create_task(fleet.force("m", audit=ME))
    await eventually(lambda: fleet.status("m").state == "stopping", LONG_S)
    await asyncio.sleep(0)
    go.set()
    assert (await asyncio.wait_for(forcing, LONG_S)).clean
    await asyncio.wait({loading})
    assert loading.exception() is not None
    await eventually(lambda: not fleet._runs.known("m"), LONG_S)


@engine
async def test_an_engine_that_is_being_cleared_away_is_no_stray(
    worlds, engine_binary, mid_model, monkeypatch, tmp_path
):
    """Between the verdict over a wedged engine and the end of its process, reconcile has nothing to say."""
    state = StateDir.open(tmp_path / "state")
    model = {"path": mid_model, "restart": {"first_s": 0}}
    world = worlds({"m": model}, engine_binary, state=state)
    fleet, stop, go = world.fleet, EngineProcess.stop, asyncio.Event()
    await fleet.load("m")
    pid = fleet.status("m").pid

    async def held(self, grace_s):
        await go.wait()
        return await stop(self, grace_s)

    with monkeypatch.context() as patched:
        patched.setattr(EngineProcess, "stop", held)
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: fleet.status("m").state == "failed", LONG_S)
        report = await fleet.reconcile("m")
        assert report.clean and report.state == "failed" and alive(pid), report
        go.set()
        await eventually(lambda: not alive(pid) and not fleet._runner("m").clearing, LONG_S)
    report = await fleet.reconcile("m")
    assert report.clean and not fleet._runs.known("m"), report


@engine
async def test_an_engine_that_will_not_die_does_not_hold_the_shutdown_up(
    worlds, engine_binary, mid_model, monkeypatch
):
    """A process in an uninterruptible wait outlives its KILL: the proxy says so and ends all the same."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    pid, left = fleet.status("m").pid, []

    async def undying(self, grace_s):
        left.append(self)
        return StopReport(None, ("SIGTERM", "SIGKILL"), (self.pid,))

    with monkeypatch.context() as patched:
        patched.setattr(EngineProcess, "stop", undying)
        await asyncio.wait_for(fleet.stop(4), LONG_S)
    assert alive(pid) and left
    assert not (await left[0].kill()).left and not alive(pid)


@engine
async def test_an_unload_drains_before_anybody_else_has_a_turn(worlds, engine_binary, mid_model):
    """No request slips in between the decision that a model is idle and its drain."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    job = fleet.begin_unload("m", cause=Cause.TTL)
    assert fleet.gates.effective("m").state is AdminState.DRAINING
    late = world.client("late", n_predict=3)
    assert (await fleet.jobs.wait(job.id, LONG_S)).cut == ()
    await asyncio.wait_for(late.task, LONG_S)
    assert late.outcome == "completed" and fleet.gates.effective("m").open


@engine
async def test_an_unload_that_is_joined_can_be_hurried_and_blocked(worlds, engine_binary, mid_model):
    """Whoever joins an unload, the timer's own too, is not ignored: a sooner deadline and a block count."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    running = world.client("running", n_predict=20000)
    await eventually(lambda: running.sink.parts, LONG_S)
    first = fleet.begin_unload("m", deadline_s=3000, cause=Cause.TTL)
    again = fleet.begin_unload("m", audit=ME)
    later = fleet.begin_unload("m", deadline_s=6000, audit=ME)
    await asyncio.sleep(0.2)
    assert not fleet.jobs.get(first.id).ended, "neither no deadline nor a later one hurries it"
    joined = fleet.begin_unload(
        "m", deadline_s=0.1, then=Then.BLOCK, reason="bad disk", mode="reject", audit=OTHER
    )
    assert first.id == again.id == later.id == joined.id
    ended = await fleet.jobs.wait(first.id, LONG_S)
    assert ended.state is JobState.DONE and ended.cut == ("running",)
    gate = fleet.gates.gate("m")
    assert (gate.state, gate.reason, gate.audit) == (AdminState.BLOCKED, "bad disk", OTHER)


@engine
async def test_a_block_beats_a_force_that_opens(worlds, engine_binary, mid_model):
    """An unload that was to leave the gate blocked is overtaken by a force: it stays blocked, each time."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    for _ in range(3):
        await fleet.load("m")
        running = world.client("running", n_predict=20000)
        await eventually(lambda: running.sink.parts, LONG_S)
        unload = fleet.begin_unload("m", deadline_s=600, then=Then.BLOCK, reason="bad disk", audit=ME)
        assert (await fleet.force("m", audit=OTHER)).clean
        assert (await fleet.jobs.wait(unload.id, LONG_S)).state is JobState.CANCELLED
        await running.task
        assert fleet.gates.gate("m").reason == "bad disk"
        await fleet.set_gate("m", opened(ME))


@engine
async def test_a_gate_set_during_a_force_is_the_later_wish(worlds, engine_binary, mid_model, tmp_path):
    """What an operator says while a force is under way is not undone at its end."""
    state = StateDir.open(tmp_path)
    world = worlds({"m": {"path": mid_model}}, engine_binary, state=state)
    fleet = world.fleet
    await fleet.load("m")
    forcing = asyncio.create_task(fleet.force("m", audit=ME))
    await asyncio.sleep(0)
    assert fleet.status("m").state == "stopping"
    await fleet.set_gate("m", blocked("found out why", "reject", OTHER))
    assert (await forcing).clean
    assert fleet.gates.gate("m").reason == "found out why"
    # a gate from before it is opened, as ever
    assert (await fleet.force("m", audit=ME)).clean and fleet.gates.gate("m").open


@engine
@pytest.mark.parametrize("then", Then)
async def test_a_gate_outlives_the_caller_of_a_force(worlds, engine_binary, mid_model, tmp_path, then):
    """Ctrl-C on the operator's side during a force: what it did to the gate still survives the proxy."""
    state = StateDir.open(tmp_path)
    world = worlds({"m": {"path": mid_model}}, engine_binary, state=state)
    fleet = world.fleet
    await fleet.load("m")
    if then is Then.OPEN:
        assert await fleet.set_gate("m", blocked("former", "reject", ME)) == ""
    calling = asyncio.create_task(fleet.force("m", then=then, reason="bad disk", audit=ME))
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait({calling})
    job = next(job for job in fleet.jobs.all("m") if job.kind is JobKind.FORCE)
    assert (await fleet.jobs.wait(job.id, LONG_S)).state is JobState.DONE
    written = tmp_path / "gates.json"
    kept = "bad disk" if then is Then.BLOCK else '"data": {}'
    await eventually(lambda: written.exists() and kept in written.read_text())
    assert fleet.gates.gate("m").open is (then is Then.OPEN)


@engine
async def test_a_force_that_cannot_begin_is_an_ended_job(worlds, engine_binary, mid_model, monkeypatch):
    """A fault in its first step is told, leaves no drain behind, and the next force works."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")

    def broken(model, error):
        raise RuntimeError("what nobody thought of")

    with monkeypatch.context() as patched:
        patched.setattr(world.admission, "end_model", broken)
        with pytest.raises(RuntimeError):
            await fleet.force("m", audit=ME)
    [job] = [job for job in fleet.jobs.all("m") if job.kind is JobKind.FORCE]
    assert job.state is JobState.FAILED and "nobody thought of" in job.error
    assert fleet.gates.effective("m").open
    assert (await asyncio.wait_for(fleet.force("m", audit=ME), LONG_S)).clean
    assert fleet.status("m").state == "unloaded"


@engine
@pytest.mark.parametrize("trouble", ["runs", "logs/m.log"])
async def test_an_engine_that_nobody_would_find_again_is_not_kept(
    worlds,
    engine_binary,
    mid_model,
    tmp_path,
    trouble,
):
    """`keep` on a disk that takes no record or no output: it loads, and ends with its proxy instead of for ever."""
    state = StateDir.open(tmp_path)
    (tmp_path / trouble).parent.mkdir(exist_ok=True)
    if trouble == "runs":
        (tmp_path / trouble).write_text("in the way")
    else:
        (tmp_path / trouble).mkdir()
    world = worlds({"m": {"path": mid_model, "on_proxy_exit": "keep"}}, engine_binary, state=state)
    await asyncio.wait_for(world.fleet.load("m"), LONG_S)
    pid = world.fleet.status("m").pid
    assert not [record for record in world.fleet._runs.known("m") if record.keep]
    await world.fleet.stop(6)
    assert not alive(pid)


@engine
async def test_a_slot_cache_that_cannot_be_noted_takes_no_room(worlds, engine_binary, mid_model, tmp_path):
    """On a full disk nothing of it stays: neither what was saved without a note of it, nor what a kill left."""
    state = StateDir.open(tmp_path)
    world = worlds({"m": {"path": mid_model, "slot_cache": True}}, engine_binary, state=state)
    fleet, index, folder = world.fleet, tmp_path / "slots" / "m.json", tmp_path / "slots" / "m"
    await fleet.load("m")
    client = world.client("warms", n_predict=5)
    await client.task
    index.mkdir()
    job = fleet.begin_unload("m", deadline_s=10)
    assert (await fleet.jobs.wait(job.id, LONG_S)).state is JobState.DONE
    assert list(folder.iterdir()) == []
    index.rmdir()
    (folder / "slot-0.bin").write_bytes(b"x" * 1000)
    await fleet.load("m")
    assert list(folder.iterdir()) == []


@engine
async def test_a_blocked_model_stays_down_over_a_restart(worlds, engine_binary, mid_model, tmp_path):
    """`preload` does not load what an operator keeps down."""
    models = {"m": {"path": mid_model, "preload": True}, "n": {"path": mid_model, "preload": True}}
    first = worlds(models, engine_binary, state=StateDir.open(tmp_path))
    await first.fleet.start()
    await eventually(lambda: first.fleet.status("m").state == "ready", LONG_S)
    assert (await first.fleet.force("m", then=Then.BLOCK, reason="bad memory", audit=ME)).clean
    await first.fleet.stop(6)
    second = worlds(models, engine_binary, state=StateDir.open(tmp_path))
    await second.fleet.start()
    await eventually(lambda: second.fleet.status("n").state == "ready", LONG_S)
    assert (
        second.fleet.status("m").state == "unloaded" and second.fleet.gates.gate("m").reason == "bad memory"
    )
    assert not second.fleet.jobs.all("m")


UNKILLABLE = """
    import asyncio, ctypes, os, sys
    sys.path.insert(0, sys.argv[1])
    from proxy.backends.command import Command
    from proxy.backends.logtail import LogTail
    from proxy.backends.process import EngineProcess, StopReport

    BECOME = "import os, time; os.setresuid(65534, 65534, 65534); time.sleep(600)"
    CAP_KILL = 5

    def give_up_the_right_to_kill():
        libc = ctypes.CDLL(None, use_errno=True)
        head, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(head, sets) == 0
        for at in range(3):
            sets[at] &= ~(1 << CAP_KILL)
        assert libc.capset(head, sets) == 0

    async def main():
        command = Command((sys.executable, "-c", BECOME), dict(os.environ))
        process = await EngineProcess.start(command, watch=False, tail=LogTail())
        give_up_the_right_to_kill()
        while True:
            with open(f"/proc/{process.pid}/status") as status:
                if "Uid:\\t65534" in status.read():
                    break
            await asyncio.sleep(0.01)
        report = await process.stop(0.2)
        print("LEFT", process.pid, *report.left, flush=True)

    asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a program that becomes another user")
def test_a_process_that_may_not_be_killed_is_named():
    """An engine that became another user (sudo) cannot be signalled: the stop ends in time and says who is left."""
    command = [sys.executable, "-c", textwrap.dedent(UNKILLABLE), str(ROOT)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    words = [line.split() for line in child.stdout.splitlines() if line.startswith("LEFT")]
    assert child.returncode == 0 and len(words) == 1, child.stderr
    _, pid, *left = words[0]
    with suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)
    assert left == [pid]


@engine
async def test_gates_and_leases_are_written_when_the_disk_takes_them_again(
    worlds, engine_binary, tmp_path, monkeypatch
):
    """What was ordered while the disk was full is not lost because nobody orders it again."""
    monkeypatch.setattr(caretaker, "CATCH_UP_S", 0.1)
    monkeypatch.setattr(caretaker, "LOOK_S", 0.05)
    state = StateDir.open(tmp_path)
    for name in ("gates.json", "leases.json"):
        (tmp_path / name / "in the way").mkdir(parents=True)
    world = worlds({"m": {"path": tmp_path / "none.gguf"}}, engine_binary, state=state)
    fleet = world.fleet
    await fleet.start()
    # the restore sets what cannot be read aside
    for name in ("gates.json", "leases.json"):
        (tmp_path / name / "in the way").mkdir(parents=True, exist_ok=True)
    assert "cannot be written" in await fleet.set_gate("m", blocked("bad disk", "reject", ME))
    _, problem = await fleet.leases.grant(600, "night run", ME)
    assert "cannot be written" in problem and "cannot be written" in fleet.state_problem
    for name in ("gates.json", "leases.json"):
        (tmp_path / name / "in the way").rmdir()
        (tmp_path / name).rmdir()
    await eventually(lambda: not fleet.state_problem)
    assert "bad disk" in (tmp_path / "gates.json").read_text()
    assert "night run" in (tmp_path / "leases.json").read_text()
