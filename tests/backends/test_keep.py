"""Engines and the death of their proxy: nothing survives with `stop`, `keep` is taken over, strangers are left alone."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.runrecord import TOKEN_VARIABLE, Fate, RunRecord, Seen, decode, encode, judge, recipe_of
from proxy.backends.runs import RunStore, claim, end_bearers, look
from proxy.clock import boot_id
from proxy.errors import ErrorCode, ProxyError
from proxy.settings import Engine, Model
from proxy.state import StateDir
from tests.backends.conftest import alive, completion, eventually
from tests.support.processes import GONE

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a" * 32
RECORD = RunRecord(
    model="m", token=TOKEN, keep=True, boot="b1", recipe="r", api_key="k", started_wall=1.0,
    pid=10, born=77, port=4000, exe=(1, 2), build="b7", output="/x",
)  # fmt: skip
LIVE = Seen(10, 77, TOKEN, (1, 2))


def judged(record=RECORD, seen=(LIVE,), *, boot="b1", recipe="r", wanted=True):
    return judge(record, {s.pid: s for s in seen}, boot=boot, recipe=recipe, wanted=wanted)


# -- what becomes of a record ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "fate", "reap", "why"),
    [
        ({}, Fate.ADOPT, (10,), "kept"),
        ({"boot": "b2"}, Fate.GONE, (), "anew"),
        ({"seen": ()}, Fate.GONE, (), "has ended"),
        ({"seen": (Seen(10, 99, "", (1, 2)),)}, Fate.GONE, (), "another one now and is left alone"),
        ({"seen": (Seen(10, 99, "z" * 32, (1, 2)),)}, Fate.GONE, (), "left alone"),
        ({"record": replace(RECORD, keep=False)}, Fate.REAP, (10,), "outlived"),
        ({"wanted": False}, Fate.REAP, (10,), "not configured"),
        ({"recipe": None}, Fate.REAP, (10,), "not configured"),
        ({"recipe": "other"}, Fate.REAP, (10,), "configuration has changed"),
        ({"record": replace(RECORD, port=0)}, Fate.REAP, (10,), "before it was ready"),
        ({"record": replace(RECORD, pid=0, born=0)}, Fate.REAP, (10,), "outlived"),
        ({"record": replace(RECORD, pid=0), "seen": ()}, Fate.GONE, (), "has ended"),
        ({"seen": (replace(LIVE, exe=(9, 9)),)}, Fate.REAP, (10,), "another executable"),
        ({"seen": (replace(LIVE, born=78),)}, Fate.REAP, (10,), "before it was ready"),
        # the command ended and left children; its id went to a stranger
        ({"seen": (Seen(10, 99), Seen(11, 5, TOKEN))}, Fate.REAP, (11,), "outlived"),
        ({"seen": (LIVE, Seen(11, 5, TOKEN), Seen(12, 5))}, Fate.ADOPT, (10, 11), "kept"),
    ],
)  # fmt: skip
def test_fates(case, fate, reap, why):
    verdict = judged(**case)
    assert (verdict.fate, verdict.reap) == (fate, reap) and why in verdict.why


_seen = st.builds(
    Seen,
    st.integers(8, 13),
    st.integers(76, 78),
    st.sampled_from(["", TOKEN, "z" * 32]),
    st.sampled_from([None, (1, 2), (9, 9)]),
)


@given(
    st.lists(_seen, max_size=5, unique_by=lambda s: s.pid),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 10]),
    st.sampled_from(["b1", "b2"]),
)
def test_no_stranger_is_ever_ended(seen, keep, wanted, pid, boot):
    """Whatever the table says: only bearers of the record's token, and only of this boot."""
    verdict = judged(replace(RECORD, keep=keep, pid=pid), seen, boot=boot, wanted=wanted)
    bearers = {s.pid for s in seen if s.token == TOKEN}
    assert set(verdict.reap) <= bearers
    assert verdict.fate is not Fate.ADOPT or (keep and wanted and LIVE.pid in bearers)
    assert (verdict.fate is Fate.GONE) == (not verdict.reap)


def test_records_survive_the_disk():
    assert decode(json.loads(json.dumps(encode(RECORD)))) == RECORD
    for bad in ({}, [], {**encode(RECORD), "token": ""}, {**encode(RECORD), "pid": "x"}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            decode(bad)


def test_the_recipe_is_what_shapes_the_process():
    base = Model(path="/a", args=("-c", "1"))
    assert recipe_of(base, Engine()) == recipe_of(Model(path="/a", args=("-c", "1"), ttl_s=9), Engine())
    for other in (Model(path="/b"), Model(path="/a"), Model(path="/a", args=("-c", "1"), env={"A": "1"})):
        assert recipe_of(other, Engine()) != recipe_of(base, Engine())
    assert recipe_of(base, Engine(args=("-ngl", "9"))) != recipe_of(base, Engine())


# -- processes and records -----------------------------------------------------------------------------------------


def sleeper(token=""):
    env = dict(os.environ) | ({TOKEN_VARIABLE: token} if token else {})
    return subprocess.Popen(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
        env=env,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


async def test_only_the_bearer_of_the_token_is_ended():
    ours, theirs = sleeper(TOKEN), sleeper()
    with ours, theirs:
        for process in (ours, theirs):
            process.stdout.readline()
        assert look(ours.pid).token == TOKEN and look(theirs.pid).token == ""
        assert await end_bearers(TOKEN, [ours.pid, theirs.pid, 2**22 - 1]) == ()
        assert ours.wait(5) == -signal.SIGTERM and theirs.poll() is None
        theirs.kill()
    assert look(ours.pid) is None


async def test_a_claim_needs_everything_to_agree():
    with sleeper(TOKEN) as process:
        process.stdout.readline()
        seen = look(process.pid)
        record = replace(RECORD, pid=process.pid, born=seen.born, exe=seen.exe, boot=boot_id())
        pidfd = claim(record)
        assert pidfd is not None
        os.close(pidfd)
        for wrong in ({"born": 1}, {"token": "z" * 32}, {"exe": (0, 0)}, {"boot": "x"}, {"pid": os.getpid()}):
            assert claim(replace(record, **wrong)) is None
        process.kill()


async def test_a_foreign_process_on_the_recorded_pid_is_left_alone(tmp_path):
    """Same id, another start: the record goes, the process stays."""
    state = StateDir.open(tmp_path)
    runs = RunStore(state)
    with sleeper() as stranger:
        stranger.stdout.readline()
        record = await runs.intend("m", keep=True, recipe="r", api_key="k", output=tmp_path / "log")
        record = await runs.started(record, stranger.pid)
        await runs.ready(record, port=1, build="b")
        [(found, verdict)] = await RunStore(state).survey(lambda _: "r", lambda _: True)
        assert found.pid == stranger.pid and "left alone" in verdict.why and verdict.reap == ()
        await runs.reap(found, verdict.reap)
        assert state.names("runs") == () and stranger.poll() is None
        stranger.kill()
    state.close()


# -- the whole of it, with real engines ------------------------------------------------------------------------------

PARENT = """
    import asyncio, os, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from proxy.state import StateDir
    from tests.backends.conftest import Collect, completion, eventually, make_fleet
    from tests.backends.test_keep import models

    async def main():
        engine, model, folder, mode, moment = sys.argv[2:7]
        fleet, seen = make_fleet(models(model, mode), Path(engine), state=StateDir.open(Path(folder)))
        await fleet.start()
        if moment == "intended":
            # the process is there, its id is not written down yet
            from proxy.backends import runs
            async def hang(self, record, pid):
                print("PID", pid, flush=True)
                await asyncio.sleep(600)
            runs.RunStore.started = hang
            fleet.request_load("m")
        elif moment == "starting":
            seen.on_state = lambda name, before, after, cause: os.kill(os.getpid(), 9) if after.value == "loading" else None
            fleet.request_load("m")
        elif moment == "loading":
            from proxy.backends import probes
            async def never(client, timeout_s=2.0):
                return probes.Health.LOADING
            probes.health = never
            fleet.request_load("m")
            await eventually(lambda: fleet.status("m").state.value == "loading" and fleet.status("m").port)
        else:
            await fleet.load("m")
            if moment in ("busy", "stopping"):
                exchange, sink = await fleet.upstream(fleet.key("m")).open(completion(4000)), Collect()
                pump = asyncio.create_task(exchange.attach(sink))
                await sink.first.wait()
            if moment == "stopping":
                asyncio.create_task(fleet.force("m"))
                await asyncio.sleep(0)
                assert fleet.status("m").state.value == "stopping"
            if moment == "failed":
                for count in (1, 2):
                    await eventually(lambda: fleet.status("m").state.value == "ready")
                    os.kill(fleet.status("m").pid, 9)
                    await eventually(lambda: len(seen.of("down")) == count)
                await eventually(lambda: fleet.status("m").state.value == "failed")
            if moment == "left":
                print("PID", fleet.status("m").pid, flush=True)
                await fleet.stop(8)
                return
        print("PID", fleet.status("m").pid, flush=True)
        if moment in ("stopping", "loading"):
            os.kill(os.getpid(), 9)
        await asyncio.sleep(600)

    asyncio.run(main())
"""
MOMENTS = ["intended", "starting", "loading", "ready", "busy", "stopping", "failed"]


def models(model, mode):
    args = ["-c", "1024", "-np", "2", "-t", "1", "--no-warmup"]
    found = {"path": str(model), "args": args, "restart": {"first_s": 30}}
    if mode.startswith("cmd"):
        words = f"${{ENGINE}} -m {model} --host 127.0.0.1 --port ${{PORT}} {' '.join(args)}"
        found = {"cmd": f"sh -c '{words}; true'", "restart": {"first_s": 30}}
    return {"m": found | {"on_proxy_exit": mode.removeprefix("cmd-")}}


def bearers(model):
    """Everything that runs for this model's file (or is about to), whoever its parent is."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(*GONE, psutil.AccessDenied):
            words = psutil.Process(pid).cmdline()
            names_it = "-c" not in words[1:2] and any(str(model) in word for word in words)
            if names_it and alive(pid):
                found.append(pid)
    return found


@pytest.fixture
def own_model(mid_model, tmp_path):
    """A name of this test's own for the model, so that its processes can be told from others'."""
    link = tmp_path / "own.gguf"
    os.link(mid_model, link)
    yield link
    for pid in bearers(link):
        # only after a test that failed
        os.kill(pid, signal.SIGKILL)


async def killed_proxy(engine, model, folder, mode, moment):
    """Run a proxy until the moment, kill it; return the engine's process id where there was one."""
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(PARENT),
        *map(str, (ROOT, engine, model, folder, mode, moment)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = None
        while line := await asyncio.to_thread(parent.stdout.readline):
            if line.startswith("PID"):
                word = line.split()[1]
                pid = int(word) if word.isdecimal() else None
                break
        try:
            if moment == "left":
                assert await asyncio.to_thread(parent.wait, 30) == 0
        finally:
            parent.kill()
        if moment != "left":
            assert parent.wait(10) == -signal.SIGKILL
    return pid


@pytest.mark.engine
@pytest.mark.parametrize(
    ("mode", "moment"), [*(("stop", m) for m in MOMENTS), ("cmd-stop", "starting"), ("cmd-stop", "busy")]
)
async def test_with_stop_nothing_survives(fleets, engine_binary, own_model, tmp_path, mode, moment):
    """SIGKILL of the proxy in each state of its model's life: its engines go with it, the next one starts clean."""
    await killed_proxy(engine_binary, own_model, tmp_path / "state", mode, moment)
    await eventually(lambda: not bearers(own_model), 10)
    state = StateDir.open(tmp_path / "state")
    fleet, _ = fleets(models(own_model, mode), engine_binary, state=state)
    await fleet.start()
    assert state.names("runs") == () and fleet.status("m").state == "unloaded"
    await fleet.load("m")
    assert len(state.names("runs")) == 1


@pytest.mark.engine
@pytest.mark.parametrize(
    ("mode", "moment"),
    [*(("keep", m) for m in (*MOMENTS, "left")), ("cmd-keep", "loading"), ("cmd-keep", "ready")],
)
async def test_with_keep_a_ready_engine_is_taken_over_and_serves(
    fleets, engine_binary, own_model, tmp_path, mode, moment
):
    """Ready ones run on and serve the next proxy, anything half done is ended, and in the end nothing is left."""
    pid = await killed_proxy(engine_binary, own_model, tmp_path / "state", mode, moment)
    state = StateDir.open(tmp_path / "state")
    fleet, seen = fleets(models(own_model, mode), engine_binary, state=state)
    if moment in ("ready", "busy", "left"):
        assert alive(pid)
        await fleet.start()
        await eventually(lambda: fleet.status("m").state == "ready")
        assert fleet.status("m").pid == pid and len(state.names("runs")) == 1
        exchange = await fleet.upstream(fleet.key("m")).open(completion(3, stream=False))
        assert exchange.head.status == 200
        await exchange.read(1 << 20)
        await eventually(lambda: fleet.snapshot("m"), 5)
        assert any("listening" in line for line in fleet.log_tail("m"))
    else:
        await fleet.start()
        await eventually(lambda: not bearers(own_model), 10)
        assert fleet.status("m").state == "unloaded" and state.names("runs") == ()
        await fleet.load("m")
        pid = fleet.status("m").pid
    report = await fleet.unload("m", force=True)
    assert report.left == () and not alive(pid) and not bearers(own_model)
    assert state.names("runs") == ()


@pytest.mark.engine
async def test_an_engine_that_is_about_to_be_taken_over_can_be_forced(
    fleets, engine_binary, own_model, tmp_path
):
    """Before the new proxy has even claimed it, while its binary is being looked at: a force ends it all the same."""
    pid = await killed_proxy(engine_binary, own_model, tmp_path / "state", "keep", "ready")
    state = StateDir.open(tmp_path / "state")
    fleet, _ = fleets(models(own_model, "keep"), engine_binary, state=state)
    runner, looked_at = fleet._runners["m"], asyncio.Event()

    async def endless(_model):
        looked_at.set()
        await asyncio.sleep(600)

    runner._recipe = replace(runner._recipe, resolve=endless)
    await fleet.start()
    await asyncio.wait_for(looked_at.wait(), 10)
    assert alive(pid)
    report = await asyncio.wait_for(fleet.force("m"), 10)
    assert report.clean and not alive(pid) and state.names("runs") == ()
    await fleet.stop(5)


@pytest.mark.engine
@pytest.mark.parametrize("trouble", ["refused", "broken", "late"])
async def test_an_engine_that_cannot_be_looked_at_does_not_stay_beside_the_next(
    fleets, engine_binary, own_model, tmp_path, trouble
):
    """What fails before the process was claimed ends it, too: an error, an accident, or the load's own deadline."""
    pid = await killed_proxy(engine_binary, own_model, tmp_path / "state", "keep", "ready")
    state = StateDir.open(tmp_path / "state")
    wanted = models(own_model, "keep")
    if trouble == "late":
        wanted["m"]["budgets"] = {"load_timeout_s": 0.5}
    fleet, seen = fleets(wanted, engine_binary, state=state)
    runner, asked = fleet._runners["m"], []
    resolve = runner._recipe.resolve

    async def troubled(model):
        asked.append(model)
        if len(asked) > 1:
            return await resolve(model)
        if trouble == "late":
            await asyncio.sleep(600)
        if trouble == "broken":
            raise OSError("a disk error")
        raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, "llama-server --help does not answer")

    runner._recipe = replace(runner._recipe, resolve=troubled)
    await fleet.start()
    await eventually(lambda: fleet.status("m").state in ("ready", "failed"), 60)
    assert not alive(pid) and pid not in bearers(own_model)
    assert len(state.names("runs")) == len(bearers(own_model)) == (fleet.status("m").state == "ready")
    await fleet.unload("m", force=True)
    assert not bearers(own_model) and state.names("runs") == ()


@pytest.mark.engine
async def test_an_adopted_engine_that_dies_is_noticed_and_restarted(
    fleets, engine_binary, own_model, tmp_path
):
    pid = await killed_proxy(engine_binary, own_model, tmp_path / "state", "keep", "ready")
    fleet, seen = fleets(models(own_model, "keep"), engine_binary, state=StateDir.open(tmp_path / "state"))
    await fleet.start()
    await eventually(lambda: fleet.status("m").state == "ready")
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: seen.of("down"))
    assert "ended unexpectedly" in seen.of("down")[0][1].message
    await eventually(lambda: fleet.status("m").state == "ready" and fleet.status("m").pid != pid)
    await fleet.unload("m", force=True)


@pytest.mark.engine
@pytest.mark.parametrize("change", ["stop", "args", "none", "stopped"])
async def test_a_kept_engine_that_does_not_fit_any_more_is_ended(
    fleets, engine_binary, own_model, tmp_path, change
):
    """Another configuration, no such model, or one that does not answer: ended, and a load starts afresh."""
    pid = await killed_proxy(engine_binary, own_model, tmp_path / "state", "keep", "ready")
    wanted = models(own_model, "stop" if change == "stop" else "keep")
    if change == "args":
        wanted["m"]["args"] = ["-c", "512"]
    if change == "none":
        wanted = {"other": wanted["m"]}
    if change == "stopped":
        os.kill(pid, signal.SIGSTOP)
    fleet, _ = fleets(wanted, engine_binary, state=StateDir.open(tmp_path / "state"))
    await fleet.start()
    if change == "stopped":
        await eventually(lambda: fleet.status("m").state == "ready", 30)
        assert fleet.status("m").pid != pid
    await eventually(lambda: not alive(pid), 10)
    await fleet.load(*wanted)
    for name in wanted:
        await fleet.unload(name, force=True)
    assert not bearers(own_model)


@pytest.mark.engine
async def test_without_a_state_folder_keep_falls_back_to_stop(fleets, engine_binary, own_model, tmp_path):
    """An engine that could not be found again must not outlive its proxy."""
    (tmp_path / "state").write_text("not a folder")
    await killed_proxy(engine_binary, own_model, tmp_path / "state", "keep", "ready")
    await eventually(lambda: not bearers(own_model), 10)
