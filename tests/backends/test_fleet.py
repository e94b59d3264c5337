"""The fleet with the real engine: loads, failures, crashes, stops."""

import asyncio
import errno
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.backends import attempt
from proxy.backends.bringup import Progress, bring_up
from proxy.backends.gatekeeper import blocked
from proxy.backends.gpu import Device, Gpus
from proxy.errors import ErrorCode, ProxyError
from proxy.state import StateDir
from proxy.types import AdminState, Cause
from proxy.upstream import UpstreamDied
from tests.backends.conftest import ALONE, ENDLESS, Collect, alive, completion, eventually
from tests.support import processes

pytestmark = pytest.mark.engine


async def test_a_load_is_shared_answers_and_unloads(fleets, engine_binary, mid_model):
    """Many callers cause one process; it serves; unload leaves none and bumps the generation."""
    fleet, seen = fleets({"mid": {"path": mid_model}}, engine_binary)
    infos = await asyncio.gather(*(fleet.load("mid", Cause.REQUEST) for _ in range(8)))
    assert {info.slots for info in infos} == {4}
    assert infos[0].build.startswith("b")
    assert infos[0].model_path == str(mid_model)
    key = fleet.key("mid")
    assert key is not None
    status = fleet.status("mid")
    assert status.pid is not None and status.port
    assert seen.states("mid") == ["starting", "loading", "ready"]
    assert len(seen.of("ready")) == 1

    exchange = await fleet.upstream(key).open(completion(5, stream=False))
    assert exchange.head.status == 200
    assert b'"content"' in await exchange.read(1 << 20)
    exchange.close()

    report = await fleet.unload("mid", deadline_s=5)
    assert report.before == "ready" and report.left == () and report.cut == 0
    assert not alive(status.pid)
    assert seen.states("mid")[3:] == ["stopping", "unloaded"]
    assert fleet.status("mid").generation > key.generation
    [(down, error)] = seen.of("down")
    assert down == key and error.code is ErrorCode.MODEL_UNLOADED
    with pytest.raises(UpstreamDied) as died:
        await fleet.upstream(key).open(completion(1))
    assert died.value.before_head
    again = await fleet.unload("mid")
    assert again.before == "unloaded" and again.signals == ()


async def test_nobody_else_may_use_the_engine(fleets, engine_binary, mid_model):
    """The engine refuses callers without the key of this generation, which is nowhere in its command line."""
    from proxy.backends.client import EngineClient

    fleet, _ = fleets({"mid": {"path": mid_model}}, engine_binary)
    await fleet.load("mid")
    status = fleet.status("mid")
    client = EngineClient(f"http://127.0.0.1:{status.port}")
    try:
        assert (await client.get("/slots", 2)).status == 401
    finally:
        await client.close()
    key = Path(f"/proc/{status.pid}/environ").read_bytes().split(b"LLAMA_API_KEY=")[1].split(b"\0")[0]
    assert len(key) >= 32
    assert key not in Path(f"/proc/{status.pid}/cmdline").read_bytes()


async def test_a_dead_child_fails_all_waiters_with_its_words(fleets, engine_binary, tmp_path):
    """A model file that does not exist: every waiter hears the engine's reason long before the load's budget is over, and may retry."""
    model = {"path": tmp_path / "gone.gguf", "budgets": {"load_timeout_s": 600}}
    fleet, seen = fleets({"gone": model}, engine_binary)
    loads = asyncio.gather(*(fleet.load("gone") for _ in range(20)), return_exceptions=True)
    results = await asyncio.wait_for(loads, 60)
    for result in results:
        assert isinstance(result, ProxyError) and result.code is ErrorCode.MODEL_LOAD_FAILED
        assert "exited with code 1" in result.message
        assert "No such file or directory" in result.message and "gone.gguf" in result.message
    assert seen.states("gone") == ["starting", "loading", "failed"]
    assert len(seen.of("load_failed")) == 1
    assert "failed to open GGUF" in "\n".join(fleet.log_tail("gone"))
    assert "No such file" in fleet.status("gone").last_error
    with pytest.raises(ProxyError):
        await fleet.load("gone")
    assert fleet.status("gone").generation == 2


async def test_an_engine_that_cannot_be_executed(fleets, tmp_path, mid_model):
    fleet, _ = fleets({"mid": {"path": mid_model}}, tmp_path / "no-such-server")
    with pytest.raises(ProxyError, match="cannot execute .*no-such-server: No such file or directory"):
        await fleet.load("mid")


async def test_an_unknown_flag_is_said(fleets, engine_binary, mid_model):
    fleet, _ = fleets({"mid": {"path": mid_model, "args": ["--no-such-flag"]}}, engine_binary)
    with pytest.raises(ProxyError, match="invalid argument: --no-such-flag"):
        await fleet.load("mid")


async def test_a_cancelled_caller_does_not_end_the_load(fleets, engine_binary, mid_model):
    fleet, seen = fleets({"mid": {"path": mid_model}}, engine_binary)
    caller = asyncio.create_task(fleet.load("mid"))
    await eventually(lambda: fleet.status("mid").pid)
    caller.cancel()
    await asyncio.wait((caller,))
    assert caller.cancelled()
    await fleet.load("mid")
    assert seen.states("mid") == ["starting", "loading", "ready"]


async def test_an_engine_that_closed_its_port_is_lost(fleets, engine_binary, mid_model):
    """SIGTERM from outside mid-request: the port closes, the process waits for its clients, nothing would ever come."""
    fleet, seen = fleets({"mid": {"path": mid_model}}, engine_binary)
    for _ in range(8):
        await fleet.load("mid")
        key, status = fleet.key("mid"), fleet.status("mid")
        assert key is not None and status.pid is not None and status.port is not None
        exchange = await fleet.upstream(key).open(completion(4000))
        pump = asyncio.create_task(exchange.attach(Collect()))
        os.kill(status.pid, signal.SIGTERM)
        ended, _ = await asyncio.wait({pump}, timeout=0.5)
        if not ended and await _refuses(status.port):
            await asyncio.wait({pump}, timeout=30)
        verdict = pump.exception() if pump.done() else None
        exchange.close()
        await asyncio.wait({pump})
        if isinstance(verdict, UpstreamDied) and "closed its port" in str(verdict):
            break
        # it may also end well, or hang with its port open when its signal handler meets the lock it wants
        pump.exception()
        await fleet.unload("mid", force=True)
    else:
        pytest.fail("no engine was found to have closed its port")
    down, error = seen.of("down")[-1]
    assert down == key and error.code is ErrorCode.UPSTREAM_ERROR
    assert ("mid", "ready", "failed", "crash") in seen.of("state")
    await eventually(lambda: not alive(status.pid))
    await fleet.load("mid")
    assert fleet.status("mid").pid != status.pid


async def _refuses(port: int, within_s: float = 2.0) -> bool:
    """Whether nobody listens at a port within a time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return True
        writer.transport.abort()
        await asyncio.sleep(0.05)
    return False


async def test_a_killed_engine_is_reported_at_once_and_reloads(fleets, engine_binary, mid_model):
    """SIGKILL mid-stream: the exchange ends with `UpstreamDied`, `on_down` says why, the next load is a new generation."""
    fleet, seen = fleets({"mid": {"path": mid_model, "args": ALONE}}, engine_binary)
    await fleet.load("mid")
    key, pid = fleet.key("mid"), fleet.status("mid").pid
    sink = Collect()
    exchange = await fleet.upstream(key).open(completion(ENDLESS))
    pump = asyncio.create_task(exchange.attach(sink))
    await asyncio.wait_for(sink.first.wait(), 60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UpstreamDied) as died:
        await asyncio.wait_for(pump, 20)
    assert not died.value.before_head
    await eventually(lambda: seen.of("down"))
    [(down, error)] = seen.of("down")
    assert down == key and error.code is ErrorCode.UPSTREAM_ERROR and "was killed by SIGKILL" in error.message
    assert ("mid", "ready", "failed", "crash") in seen.of("state")
    await fleet.load("mid")
    assert fleet.key("mid").generation > key.generation
    exchange.close()


async def test_stop_with_an_open_stream_leaves_no_process(fleets, engine_binary, mid_model):
    """F1: an engine with a connected client does not end on TERM, so sockets close first."""
    model = {"path": mid_model, "args": ALONE, "stop": {"grace_s": 20}}
    fleet, seen = fleets({"mid": model}, engine_binary)
    await fleet.load("mid")
    key, pid = fleet.key("mid"), fleet.status("mid").pid
    sink = Collect()
    exchange = await fleet.upstream(key).open(completion(ENDLESS))
    pump = asyncio.create_task(exchange.attach(sink))
    await asyncio.wait_for(sink.first.wait(), 60)
    report = await fleet.unload("mid", force=True, cause=Cause.FORCE)
    # the engine's own handler may lock up on a TERM that interrupts its queue: then the second TERM ends it
    assert report.signals in {("SIGTERM",), ("SIGTERM", "SIGTERM")}
    assert report.cut == 1 and report.code in {0, 1} and report.left == ()
    assert not alive(pid)
    with pytest.raises(UpstreamDied, match="was unloaded"):
        await pump
    assert seen.of("down")[0][1].code is ErrorCode.MODEL_UNLOADED


async def test_a_stopped_engine_is_killed_at_once(fleets, engine_binary, mid_model):
    """SIGSTOP: TERM would wait for ever; the group is killed without a grace."""
    fleet, _ = fleets({"mid": {"path": mid_model, "stop": {"grace_s": 30}}}, engine_binary)
    await fleet.load("mid")
    pid = fleet.status("mid").pid
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: processes.status(pid) == "stopped")
    began = time.monotonic()
    report = await fleet.unload("mid", force=True, cause=Cause.FORCE)
    assert time.monotonic() - began < 25
    assert report.signals == ("SIGKILL",) and not alive(pid)


async def test_unload_while_loading(fleets, engine_binary, mid_model):
    """A force-unload in the middle of a load: waiters are told, nothing is left, a new load works."""
    fleet, seen = fleets({"mid": {"path": mid_model}}, engine_binary)
    waiter = asyncio.create_task(fleet.load("mid"))
    pid = await eventually(lambda: fleet.status("mid").pid)
    report = await fleet.unload("mid", force=True, cause=Cause.FORCE)
    assert report.before in {"starting", "loading"} and not alive(pid)
    with pytest.raises(ProxyError) as failed:
        await waiter
    assert failed.value.code is ErrorCode.MODEL_UNLOADED
    assert seen.states("mid")[-1] == "unloaded" and seen.of("ready") == []
    await fleet.load("mid")


async def test_a_load_asked_while_stopping_comes_after(fleets, engine_binary, mid_model):
    fleet, seen = fleets({"mid": {"path": mid_model}}, engine_binary)
    await fleet.load("mid")
    unload = asyncio.create_task(fleet.unload("mid", force=True, cause=Cause.FORCE))
    await asyncio.sleep(0)
    assert fleet.status("mid").state == "stopping"  # the stop is decided before it first awaits
    info = await fleet.load("mid", Cause.REQUEST)
    await unload
    assert info.slots == 4
    expected = ["starting", "loading", "ready", "stopping", "unloaded", "starting", "loading", "ready"]
    assert seen.states("mid") == expected


async def test_twice_at_once_is_one_unload(fleets, engine_binary, mid_model):
    fleet, seen = fleets({"mid": {"path": mid_model, "stop": {"grace_s": 30}}}, engine_binary)
    await fleet.load("mid")
    reports = await asyncio.gather(*(fleet.unload("mid", force=True) for _ in range(3)))
    # 1 where the engine's handler locked up on the first TERM
    assert {report.code for report in reports} in ({0}, {1})
    assert seen.states("mid").count("stopping") == 1


async def test_drain_waits_for_the_running_exchange(fleets, engine_binary, mid_model):
    """Not forced: the stream ends whole, loads by requests are refused meanwhile."""
    fleet, seen = fleets({"mid": {"path": mid_model}}, engine_binary)
    await fleet.load("mid")
    sink = Collect()
    exchange = await fleet.upstream(fleet.key("mid")).open(completion(400))
    pump = asyncio.create_task(exchange.attach(sink))
    await asyncio.wait_for(sink.first.wait(), 60)
    unload = asyncio.create_task(fleet.unload("mid", deadline_s=30))
    await eventually(lambda: fleet.status("mid").admin is AdminState.DRAINING)
    await asyncio.wait_for(pump, 60)
    report = await unload
    assert report.cut == 0 and b'"stop":true' in sink.body
    assert fleet.status("mid").admin is AdminState.ENABLED and fleet.status("mid").state == "unloaded"


async def test_a_gate_refuses_loads_by_requests_only(fleets, engine_binary, mid_model):
    fleet, seen = fleets({"mid": {"path": mid_model}}, engine_binary)
    await fleet.set_gate("mid", blocked("repairs"))
    with pytest.raises(ProxyError, match="blocked: repairs") as refused:
        await fleet.load("mid", Cause.REQUEST)
    assert refused.value.code is ErrorCode.GATE_BLOCKED
    assert len(seen.of("load_failed")) == 1
    await fleet.load("mid", Cause.OPERATOR)


async def test_a_system_call_that_times_out_is_no_late_load(fleets, engine_binary, mid_model):
    """A file on a server that does not answer (ETIMEDOUT), and a load without a deadline: it fails with its words."""
    fleet, _ = fleets({"m": {"path": mid_model, "budgets": {"load_timeout_s": 0}}}, engine_binary)
    runner = fleet._runners["m"]

    async def far(_model):
        raise OSError(errno.ETIMEDOUT, "Connection timed out", "/nfs/llama-server")

    runner._recipe = replace(runner._recipe, resolve=far)
    with pytest.raises(ProxyError, match="/nfs/llama-server") as failed:
        await asyncio.wait_for(fleet.load("m"), 20)
    assert failed.value.code is ErrorCode.MODEL_LOAD_FAILED and fleet.status("m").state == "failed"


class HeldGpus(Gpus):
    """A driver that answers at once when a load begins, and after one only when it is let."""

    present = True

    def __init__(self):
        super().__init__(lambda: None)
        self.asked_again, self.go, self._count = asyncio.Event(), asyncio.Event(), 0

    async def devices(self):
        self._count += 1
        if self._count > 1:
            self.asked_again.set()
            await self.go.wait()
        return (Device(0, "GPU-1", 1 << 40, 1 << 39),)


async def test_a_model_that_is_ready_in_time_is_not_late_for_what_is_measured_then(
    fleets, engine_binary, mid_model, monkeypatch
):
    gpus = HeldGpus()
    model = {"path": mid_model, "vram_bytes": 1, "budgets": {"load_timeout_s": 0.1}}
    fleet, _ = fleets({"m": model}, engine_binary, gpus=gpus)
    recipe = fleet._runners["m"]._recipe
    running = await bring_up(recipe, Progress())

    async def at_once(*_):
        return running

    monkeypatch.setattr(attempt, "bring_up", at_once)
    began = asyncio.get_running_loop().time()
    trying = asyncio.create_task(attempt.attempt(recipe, Progress(), None))
    await asyncio.wait_for(gpus.asked_again.wait(), 20)
    await eventually(lambda: asyncio.get_running_loop().time() > began + 0.2)
    gpus.go.set()
    assert await trying is running
    await running.client.close()
    assert (await running.process.kill()).left == ()


async def test_a_force_in_the_last_moment_of_a_load_leaves_nothing(
    fleets, engine_binary, mid_model, tmp_path
):
    """Its engine is ready, and what it took is being measured."""
    gpus, state = HeldGpus(), StateDir.open(tmp_path)
    fleet, _ = fleets({"m": {"path": mid_model, "vram_bytes": 1}}, engine_binary, gpus=gpus, state=state)
    fleet.request_load("m")
    await asyncio.wait_for(gpus.asked_again.wait(), 60)
    pid = fleet.status("m").pid
    assert alive(pid) and len(state.names("runs")) == 1
    report = await fleet.force("m")
    assert report.clean and not alive(pid) and state.names("runs") == ()


async def test_load_timeout(fleets, engine_binary, mid_model):
    """A budget that runs out names itself and leaves no process."""
    command = {
        "cmd": "sh -c 'echo still reading; sleep 600 # $0' ${PORT}",
        "budgets": {"load_timeout_s": 4},
    }
    fleet, seen = fleets({"slow": command}, engine_binary)
    waiter = asyncio.create_task(fleet.load("slow"))
    pid = await eventually(lambda: fleet.status("slow").pid)
    with pytest.raises(ProxyError, match="load_timeout_s = 4 s.*still reading") as failed:
        await waiter
    assert failed.value.code is ErrorCode.LOAD_TIMEOUT
    assert not alive(pid) and seen.states("slow")[-1] == "failed"


async def test_fleet_stop_refuses_and_leaves_nothing(fleets, engine_binary, mid_model):
    fleet, seen = fleets({"a": {"path": mid_model}, "b": {"path": mid_model}}, engine_binary)
    await fleet.load("a")
    loading = asyncio.create_task(fleet.load("b"))
    await eventually(lambda: fleet.status("b").pid)
    pids = [fleet.status(name).pid for name in "ab"]
    await fleet.stop(8)
    assert not any(map(alive, pids))
    with pytest.raises(ProxyError) as ended:
        await loading
    assert ended.value.code is ErrorCode.SHUTTING_DOWN
    with pytest.raises(ProxyError) as refused:
        await fleet.load("a")
    assert refused.value.code is ErrorCode.SHUTTING_DOWN
    fleet.request_load("a")
    assert seen.of("load_failed")[-1][1].code is ErrorCode.SHUTTING_DOWN


STUBBORN = (
    "import http.server, signal, sys\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "class H(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        body = b'[]' if self.path.startswith('/slots') else "
    'b\'{"total_slots": 1, "default_generation_settings": {"n_ctx": 8}}\'\n'
    "        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()\n"
    "        self.wfile.write(body)\n"
    "    def log_message(self, *args): pass\n"
    "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
)


async def test_shutdown_hurries_an_unload_that_waits(fleets, tmp_path):
    """A process that ignores TERM, an unload with a long grace under way: the proxy's own deadline wins."""
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    model = {"cmd": f"{sys.executable} {script} ${{PORT}}", "stop": {"grace_s": 600}}
    fleet, _ = fleets({"s": model})
    await fleet.load("s")
    pid = fleet.status("s").pid
    unload = asyncio.create_task(fleet.unload("s", force=True))
    await eventually(lambda: fleet.status("s").state == "stopping")
    await asyncio.wait_for(fleet.stop(2.5), 60)
    assert not alive(pid)
    assert (await unload).signals == ("SIGTERM", "SIGTERM", "SIGKILL")


async def test_a_cancelled_drain_opens_the_gate_again(fleets, engine_binary, mid_model):
    fleet, _ = fleets({"mid": {"path": mid_model}}, engine_binary)
    await fleet.load("mid")
    exchange = await fleet.upstream(fleet.key("mid")).open(completion(4000))
    unload = asyncio.create_task(fleet.unload("mid", deadline_s=600))
    await eventually(lambda: fleet.status("mid").admin is AdminState.DRAINING)
    unload.cancel()
    await asyncio.wait((unload,))
    assert fleet.status("mid").admin is AdminState.ENABLED and fleet.status("mid").state == "ready"
    exchange.close()


async def test_an_observer_that_fails_or_calls_back_does_no_harm(fleets, engine_binary, mid_model):
    """Raising from every call, and asking for a load from within one: the life goes on in order."""
    fleet, seen = fleets({"mid": {"path": mid_model}}, engine_binary)
    states = []

    def on_state(model, before, after, cause):
        states.append(after.value)
        if after.value == "stopping":
            fleet.request_load("mid")
        raise RuntimeError("observer")

    seen.on_state = on_state
    seen.on_ready = lambda key, info: 1 / 0
    await fleet.load("mid")
    await fleet.unload("mid", force=True)
    await eventually(lambda: fleet.status("mid").state == "ready")
    assert states == ["starting", "loading", "ready", "stopping", "unloaded", "starting", "loading", "ready"]


async def test_an_identity_check_can_refuse(fleets, engine_binary, mid_model):
    """The hook gets the running pid; its refusal is the waiters' error and ends the process."""
    pids = []

    async def verify(pid: int, folder: Path) -> str:
        pids.append(pid)
        raise ProxyError(ErrorCode.IDENTITY_MISMATCH, f"{folder}: not the binary of the manifest")

    from proxy.backends import EngineBinary, Fleet
    from proxy.catalog import Catalog
    from proxy.metrics import Metrics
    from proxy.settings import Settings
    from tests.backends.conftest import SMALL, Recorder

    settings = Settings.model_validate({"models": {"mid": {"path": mid_model}}, "engine": {"args": SMALL}})
    metrics = Metrics()

    async def resolve(_model) -> EngineBinary:
        return EngineBinary(engine_binary, dir=engine_binary.parent)

    fleet = Fleet(
        settings,
        Catalog(settings.models),
        metrics,
        engine_resolver=resolve,
        observer=Recorder(),
        verify=verify,
    )
    with pytest.raises(ProxyError, match="not the binary") as refused:
        await fleet.load("mid")
    assert refused.value.code is ErrorCode.IDENTITY_MISMATCH
    assert not alive(pids[0])
    assert b'identity_mismatch_total{model="mid"} 1.0' in metrics.render()
    await fleet.stop(5)
