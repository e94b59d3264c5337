"""Operators' control with the real admission and the real engine: force, drain, gates, leases, jobs."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace

import pytest

from proxy.admission import Admission, TicketSpec
from proxy.backends import Fleet
from proxy.backends.gatekeeper import blocked, opened
from proxy.backends.jobs import JobKind, JobState
from proxy.backends.ports import JobChanged, LiveRequests
from proxy.backends.views import Then
from proxy.catalog import Catalog
from proxy.clock import monotonic
from proxy.errors import ErrorCode, ProxyError
from proxy.http.cut import Cut
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.state import StateDir
from proxy.types import AdminState, Audit, Cause, Outcome, TicketState
from proxy.upstream import UpstreamDied
from tests.backends.conftest import Collect, Recorder, alive, completion, eventually
from tests.support import processes

pytestmark = pytest.mark.engine
ME = Audit("ops", "127.0.0.1")
LONG = ("-c", "32768", "-np", "4", "-t", "1", "--no-warmup")
GRACE_S = 3.0
PATIENT_S = 20.0
"""The grace where the promised bound is measured: an engine that ends well leaves nearly all of it to a slow machine."""


class Books:
    """The `Requests` port over admission, as a composition makes it."""

    def __init__(self, world):
        self.world = world

    def live(self, model):
        tickets = [t for t in self.world.admission.tickets() if t.model == model]
        gone = (TicketState.CANCELLING, TicketState.DONE)
        return LiveRequests(
            tuple(t.id for t in tickets if t.state is TicketState.QUEUED),
            tuple(t.id for t in tickets if t.state is not TicketState.QUEUED and t.state not in gone),
            frozenset(t.tag for t in tickets if t.tag),
        )

    def granted(self, key):
        return sum(t.backend == key for t in self.world.admission.tickets())

    def check(self, model):
        return tuple(self.world.admission.broken_rules())

    def end(self, model, error):
        self.world.admission.end_model(model, error)

    def gate(self, model, gate):
        self.world.admission.set_gate(model, gate.state, gate.reason, gate.mode)

    async def settled(self, model, timeout_s):
        return await self.world.admission.drained(model, timeout=timeout_s)


def tagged(request, tag):
    return replace(request, headers=(*request.headers, ("x-request-id", tag)))


class World(Recorder):
    """A fleet and an admission wired to each other, and clients."""

    def __init__(self, models, engine, *, state=None, args=LONG, lookup=None, **admission):
        super().__init__()
        configured = {name: {"stop": {"grace_s": GRACE_S}} | model for name, model in models.items()}
        settings = Settings.model_validate(
            {"models": configured, "engine": {"args": args}, "admission": admission}
        )
        self.metrics = Metrics()
        self.told = []

        async def resolve(_model):
            from proxy.backends import EngineBinary

            return EngineBinary(engine)

        self.fleet = Fleet(
            settings,
            Catalog(settings.models),
            self.metrics,
            monotonic,
            engine_resolver=resolve,
            observer=self,
            requests=Books(self),
            state=state,
            listener=self.told.append,
            lookup=lookup,
        )
        self.admission = Admission(settings, self.metrics, self, clock=monotonic)

    def on_ready(self, key, info):
        super().on_ready(key, info)
        self.admission.backend_ready(key, info)

    def on_down(self, key, error):
        super().on_down(key, error)
        self.admission.backend_down(key, error)

    def on_draining(self, key, draining):
        super().on_draining(key, draining)
        self.admission.backend_draining(key, draining=draining)

    def on_load_failed(self, model, error):
        super().on_load_failed(model, error)
        self.admission.load_failed(model, error)

    def on_snapshot(self, snapshot):
        super().on_snapshot(snapshot)
        self.admission.snapshot(snapshot)

    def request_load(self, model):
        self.fleet.request_load(model, Cause.REQUEST)

    def poke(self, key):
        self.fleet.poke(key)

    def client(self, name, model="m", *, n_predict=8000, stream=True):
        return Client(self, name, model, n_predict, stream)

    def value(self, name, **labels):
        total = 0.0
        for line in self.metrics.render().decode().splitlines():
            if line.startswith(f"llama_proxy_{name}{{") and all(
                f'{k}="{v}"' in line for k, v in labels.items()
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total


@dataclass(eq=False)
class Client:
    """One request from its arrival to its one outcome."""

    world: World
    name: str
    model: str
    n_predict: int
    stream: bool
    sink: Collect = field(default_factory=Collect)
    outcome: str = ""
    message: str = ""

    def __post_init__(self):
        self.task = asyncio.create_task(self.run(), name=f"client:{self.name}")

    async def run(self):
        spec = TicketSpec(
            id=self.name, model=self.model, key="k", priority=0, priority_name="normal", tasks=1,
            stream=self.stream, body_bytes=10, endpoint="/completion",
        )  # fmt: skip
        try:
            ticket = self.world.admission.submit(spec)
        except ProxyError as error:
            self.outcome, self.message = error.code.value, error.message
            return
        try:
            grant = await ticket.granted()
            # as the HTTP layer does: who is ended from elsewhere lets go of its exchange
            async with Cut() as cut:
                ticket.ended.add_done_callback(cut.on_ended)
                await self._through(grant)
            self.outcome = "completed"
        except ProxyError as error:
            self.outcome, self.message = error.code.value, error.message
        except UpstreamDied as died:
            error = await asyncio.wait_for(asyncio.shield(ticket.ended), 20)
            self.outcome, self.message = error.code.value, str(died)
        finally:
            ticket.release(Outcome.COMPLETED if self.outcome == "completed" else Outcome.FAILED)

    async def _through(self, grant):
        exchange = await self.world.fleet.upstream(grant.key).open(
            tagged(completion(self.n_predict, stream=self.stream), grant.tag)
        )
        try:
            if self.stream:
                await exchange.attach(self.sink)
            else:
                self.sink.parts.append(await exchange.read(1 << 24))
        finally:
            exchange.close()


@pytest.fixture
async def worlds():
    made = []

    def make(*args, **kwargs):
        made.append(World(*args, **kwargs))
        return made[-1]

    yield make
    for world in made:
        error = ProxyError(ErrorCode.SHUTTING_DOWN, "over")
        world.admission.shutdown(error, cut=True)
        await world.fleet.stop(6)
        world.admission.close()
    left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    for task in left:
        if task.get_name().startswith("client:"):
            await asyncio.wait({task}, timeout=5)
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


async def contents(client):
    """The text a finished stream brought, without the timings that differ from run to run."""
    import orjson

    lines = [line[6:] for line in client.sink.body.splitlines() if line.startswith(b"data: ")]
    return "".join(orjson.loads(line)["content"] for line in lines)


async def test_force_ends_forty_requests_and_leaves_nothing(worlds, engine_binary, mid_model):
    """4 run and 36 wait: one answer each, in time; nothing is left; another model's streams never notice."""
    # flags under which a token does not depend on what shares its batch
    exact = {"path": mid_model, "args": ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]}
    models = {"m": exact | {"stop": {"grace_s": PATIENT_S}}, "other": exact}
    # all that wait do so in our own queue
    world = worlds(models, engine_binary, native_standby=False)
    fleet = world.fleet
    await asyncio.gather(fleet.load("m"), fleet.load("other"))
    alone = world.client("alone", "other", n_predict=300)
    await alone.task
    pid, key = fleet.status("m").pid, fleet.key("m")
    clients = [world.client(f"r{n}", stream=n % 4 == 0) for n in range(40)]
    await eventually(lambda: fleet.status("m").exchanges == 4)
    others = [world.client(f"o{n}", "other", n_predict=300) for n in range(2)]
    await eventually(lambda: all(client.sink.parts for client in others))
    live = world.admission.view("m")
    assert (live.running, live.queued) == (4, 36)
    assert sum(client.stream for client in clients) == 10

    would = fleet.would_cut("m")
    assert (len(would.waiting), len(would.running), would.pid) == (36, 4, pid) and alive(pid)
    began = time.monotonic()
    report = await fleet.force("m", then=Then.BLOCK, reason="new weights", mode="reject", audit=ME)
    assert time.monotonic() - began < PATIENT_S + 2
    assert (report.queued, report.running, report.clean) == (36, 4, True)
    assert not alive(pid) and fleet.status("m").state == "unloaded"
    await asyncio.wait_for(asyncio.gather(*(client.task for client in clients)), 20)
    assert {client.outcome for client in clients} == {"model_unloaded"}
    assert all("new weights" in client.message for client in clients)
    view = world.admission.view("m")
    assert (view.queued, view.running, view.cancelling, view.charged, view.backends) == (0, 0, 0, 0, ())
    assert world.admission.broken_rules() == []
    for name in ("requests_inflight", "queue_size", "queue_bytes"):
        assert world.value(name, model="m") == 0
    assert world.value("forced_cancels_total", model="m") == 40
    job = fleet.jobs.get(report.job)
    assert job.state is JobState.DONE and set(job.cut) == {client.name for client in clients}
    assert job.audit == ME and job.result["queued"] == 36

    await asyncio.wait_for(asyncio.gather(*(client.task for client in others)), 60)
    for other in others:
        assert other.outcome == "completed" and await contents(other) == await contents(alone)

    refused = world.client("late")
    await refused.task
    assert refused.outcome == "gate_blocked" and "new weights" in refused.message
    assert world.value("gate_blocked", model="m") == 1 and fleet.status("m").state == "unloaded"
    await fleet.set_gate("m", opened(ME))
    again = world.client("again", n_predict=3)
    await asyncio.wait_for(again.task, 30)
    assert again.outcome == "completed" and fleet.key("m").generation > key.generation


async def test_force_then_open_serves_those_that_come_meanwhile(worlds, engine_binary, mid_model):
    """A request that arrives during a force waits, and its model is loaded afresh for it."""
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    running = world.client("running")
    await eventually(lambda: running.sink.parts)
    forcing = asyncio.create_task(fleet.force("m", audit=ME))
    await asyncio.sleep(0)
    assert fleet.status("m").state == "stopping" and fleet.gates.effective("m").state is AdminState.DRAINING
    late = world.client("late", n_predict=3)
    report = await forcing
    assert report.clean and report.names == ("running",)
    await asyncio.wait_for(late.task, 30)
    assert (running.outcome, late.outcome) == ("model_unloaded", "completed")
    assert fleet.gates.effective("m").open


async def test_force_in_every_state(worlds, engine_binary, mid_model):
    """Not loaded, loading, draining, stopped, dead, and twice at once: a success each time, in time, and nothing left."""
    model = {"path": mid_model, "restart": {"first_s": 0}, "stop": {"grace_s": PATIENT_S}}
    world = worlds({"m": model}, engine_binary)
    fleet = world.fleet

    async def force(**more):
        began = time.monotonic()
        report = await fleet.force("m", audit=ME, **more)
        assert time.monotonic() - began < PATIENT_S + 2
        assert report.clean and fleet.status("m").state == "unloaded", report
        assert fleet.jobs.get(report.job).state is JobState.DONE
        assert not processes.below(os.getpid(), unreaped=True)
        return report

    assert (await force()).before == "unloaded"

    waiter = world.client("waits for the load")
    await eventually(lambda: fleet.status("m").pid)
    assert (await force()).before in {"starting", "loading"}
    await asyncio.wait_for(waiter.task, 20)
    assert waiter.outcome == "model_unloaded"
    [load] = [job for job in fleet.jobs.all("m") if job.kind is JobKind.LOAD]
    assert load.state is JobState.CANCELLED

    await fleet.load("m")
    running = world.client("drained")
    await eventually(lambda: running.sink.parts)
    drain = fleet.begin_unload("m", deadline_s=600, audit=ME)
    await eventually(lambda: fleet.jobs.get(drain.id).progress.requests_left == 1)
    assert (await force()).running == 1
    await asyncio.wait_for(running.task, 20)
    ended = await fleet.jobs.wait(drain.id, 20)
    assert ended.state is JobState.CANCELLED and "force" in ended.error

    await fleet.load("m")
    running = world.client("wedged")
    await eventually(lambda: running.sink.parts)
    pid = fleet.status("m").pid
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: processes.status(pid) == "stopped")
    assert (await force()).signals == ("SIGKILL",)
    await asyncio.wait_for(running.task, 20)

    await fleet.load("m")
    os.kill(fleet.status("m").pid, signal.SIGKILL)
    assert (await force()).left == ()

    await fleet.load("m")
    first, second = await asyncio.gather(
        fleet.force("m", audit=ME), fleet.force("m", then=Then.BLOCK, reason="stay down")
    )
    assert first.job == second.job and first.clean
    assert fleet.gates.gate("m").state is AdminState.BLOCKED
    assert [job.kind for job in fleet.jobs.all("m")].count(JobKind.FORCE) == 6
    await force()
    assert fleet.gates.gate("m").open


async def test_a_drain_lets_running_requests_finish_and_names_those_it_cuts(worlds, engine_binary, mid_model):
    world = worlds({"m": {"path": mid_model}}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    short, long = world.client("short", n_predict=60), world.client("long")
    await eventually(lambda: short.sink.parts and long.sink.parts)
    pid = fleet.status("m").pid
    job = fleet.begin_unload("m", deadline_s=12, reason="maintenance", audit=ME, mode="hold")
    assert fleet.begin_unload("m", deadline_s=600).id == job.id, "joined; a later deadline changes nothing"
    held = world.client("held", n_predict=3)
    await asyncio.wait_for(short.task, 60)
    assert short.outcome == "completed" and alive(pid)
    assert held.outcome == "" and world.admission.view("m").gate is AdminState.DRAINING
    ended = await fleet.jobs.wait(job.id, 30)
    assert ended.state is JobState.DONE and ended.cut == ("long",) and ended.audit == ME
    assert not alive(pid)
    await asyncio.wait_for(long.task, 20)
    assert long.outcome == "model_unloaded" and "maintenance" in long.message
    # what came meanwhile is served by the next generation
    await asyncio.wait_for(held.task, 30)
    assert held.outcome == "completed"
    left = [
        e.job.progress.requests_left for e in world.told if isinstance(e, JobChanged) and e.job.id == job.id
    ]
    # the short one may be done before the first look
    assert 1 in left and left[-1] == 0


async def test_a_drain_can_refuse_newcomers_and_leave_the_gate_blocked(worlds, engine_binary, mid_model):
    model = {"path": mid_model, "stop": {"grace_s": GRACE_S, "new_requests": "reject"}}
    world = worlds({"m": model}, engine_binary)
    fleet = world.fleet
    await fleet.load("m")
    running = world.client("running", n_predict=1500)
    await eventually(lambda: running.sink.parts)
    job = fleet.begin_unload("m", deadline_s=200, then=Then.BLOCK, reason="look into it")
    await asyncio.sleep(0)
    refused = world.client("refused")
    await refused.task
    assert refused.outcome == "model_draining"
    ended = await fleet.jobs.wait(job.id, 200)
    assert ended.state is JobState.DONE and ended.cut == () and running.outcome == "completed"
    gate = fleet.gates.gate("m")
    assert fleet.status("m").state == "unloaded"
    assert (gate.state, gate.reason) == (AdminState.BLOCKED, "look into it")


async def test_a_gate_holds_over_an_unload_and_a_load_and_survives_a_restart(
    worlds, engine_binary, mid_model, tmp_path
):
    models = {"m": {"path": mid_model}}
    world = worlds(models, engine_binary, state=StateDir.open(tmp_path))
    fleet = world.fleet
    await fleet.start()
    await fleet.load("m")
    assert await fleet.set_gate("m", blocked("repairs", "hold", ME)) == ""
    held = world.client("held", n_predict=3)
    await fleet.jobs.wait(fleet.begin_unload("m", deadline_s=5).id, 20)
    assert fleet.status("m").state == "unloaded" and fleet.gates.gate("m").reason == "repairs"
    job = fleet.begin_load("m", ME)
    assert (await fleet.jobs.wait(job.id, 30)).state is JobState.DONE
    assert held.outcome == "" and world.admission.view("m").queued == 1
    world.admission.shutdown(ProxyError(ErrorCode.SHUTTING_DOWN, "over"))
    await asyncio.wait_for(held.task, 20)
    assert held.outcome == "shutting_down"
    await fleet.stop(5)

    after = worlds(models, engine_binary, state=StateDir.open(tmp_path), gate_hold_max_s=0.5)
    await after.fleet.start()
    gate = after.fleet.gates.gate("m")
    assert (gate.state, gate.reason, gate.mode, gate.audit) == (AdminState.BLOCKED, "repairs", "hold", ME)
    waits = after.client("waits too long")
    await asyncio.wait_for(waits.task, 10)
    assert waits.outcome == "gate_hold_timeout" and after.fleet.status("m").state == "unloaded"
    await after.fleet.set_gate("m", blocked("moved away", "reject", ME))
    refused = after.client("refused")
    await refused.task
    assert refused.outcome == "gate_blocked" and "moved away" in refused.message
    await after.fleet.set_gate(None, opened(ME))
    served = after.client("served", n_predict=3)
    await asyncio.wait_for(served.task, 30)
    assert served.outcome == "completed"


async def test_an_idle_model_goes_and_a_lease_holds_it(worlds, engine_binary, mid_model, tmp_path):
    world = worlds({"m": {"path": mid_model, "ttl_s": 1}}, engine_binary, state=StateDir.open(tmp_path))
    fleet = world.fleet
    await fleet.start()
    lease, problem = await fleet.leases.grant(600, "backup", ME)
    assert problem == "" and [found.id for found in fleet.leases.held()] == [lease.id]
    assert world.metrics.registry.get_sample_value("llama_proxy_leases_held") == 1
    await fleet.load("m")
    idle = fleet._runner("m").idle_since
    await eventually(lambda: monotonic() - idle > 2.5)
    assert fleet.status("m").state == "ready"
    assert await fleet.leases.release(lease.id) == (lease, "") and await fleet.leases.release("x") is None
    await eventually(lambda: fleet.status("m").state == "unloaded")
    assert fleet.status("m").cause is Cause.TTL
    [job] = [job for job in fleet.jobs.all("m") if job.kind is JobKind.UNLOAD]
    assert job.cause is Cause.TTL and job.cut == ()
    await fleet.leases.grant(0.2, "short", ME)
    await eventually(lambda: fleet.leases.held() == ())
    with pytest.raises(ProxyError, match="ttl_s"):
        await fleet.leases.grant(-1, "", ME)


async def test_a_busy_model_is_not_idle(worlds, engine_binary, mid_model):
    world = worlds({"m": {"path": mid_model, "ttl_s": 0.3}}, engine_binary)
    await world.fleet.start()
    busy = world.client("busy", n_predict=600)
    await asyncio.wait_for(busy.task, 120)
    assert busy.outcome == "completed" and len(world.of("ready")) == 1
    await eventually(lambda: world.fleet.status("m").state == "unloaded")


async def test_leases_survive_a_restart_and_a_read_only_folder_is_said(
    worlds, engine_binary, mid_model, tmp_path, monkeypatch
):
    world = worlds({"m": {"path": mid_model}}, engine_binary, state=StateDir.open(tmp_path))
    await world.fleet.start()
    lease, _ = await world.fleet.leases.grant(600, "backup", ME)
    await world.fleet.stop(5)
    monkeypatch.setattr("proxy.backends.leasing.wall", lambda: 1.0)
    after = worlds({"m": {"path": mid_model}}, engine_binary, state=StateDir.open(tmp_path))
    await after.fleet.start()
    [found] = after.fleet.leases.held()
    assert (found.id, found.reason, found.audit) == (lease.id, "backup", ME)
    assert 590 < after.fleet.leases.left_s(found) <= 600
    # the folder goes away under a proxy that runs: said to the operator, effective all the same
    for name in tmp_path.iterdir():
        name.unlink()
    tmp_path.rmdir()
    problem = await after.fleet.set_gate("m", blocked("x"))
    assert "gates.json cannot be written" in problem and after.fleet.gates.effective("m").reason == "x"
    _, problem = await after.fleet.leases.grant(9, "y", ME)
    assert "leases.json" in problem and len(after.fleet.leases.held()) == 2


async def test_loads_are_jobs_with_progress(worlds, engine_binary, mid_model, tmp_path):
    world = worlds({"m": {"path": mid_model}, "bad": {"path": tmp_path / "none.gguf"}}, engine_binary)
    fleet = world.fleet
    job = fleet.begin_load("m", ME)
    assert job.state is JobState.RUNNING and fleet.begin_load("m").id == job.id
    ended = await fleet.jobs.wait(job.id, 30)
    assert ended.state is JobState.DONE and ended.result["pid"] == fleet.status("m").pid and ended.audit == ME
    seen = [event.job for event in world.told if isinstance(event, JobChanged) and event.job.id == job.id]
    assert [j.state for j in seen][0] is JobState.RUNNING and seen[-1] == ended
    assert any(j.progress.bytes_total == mid_model.stat().st_size for j in seen)
    assert fleet.begin_load("m", ME).state is JobState.DONE
    bad = await fleet.jobs.wait(fleet.begin_load("bad", ME).id, 30)
    assert bad.state is JobState.FAILED and bad.code == "model_load_failed" and "none.gguf" in bad.error
    by_request = world.client("r", n_predict=3)
    await fleet.unload("m", force=True)
    await asyncio.wait_for(by_request.task, 30)
    loads = [j for j in fleet.jobs.all("m") if j.kind is JobKind.LOAD]
    assert loads[0].cause is Cause.REQUEST and len(loads) == 3


async def test_reconcile_finds_what_does_not_fit_and_drops_nobody(worlds, engine_binary, mid_model, tmp_path):
    """A stray process of ours, a stale record, a stranger's request: named, mended where safe; live streams go on."""
    from tests.backends.test_keep import sleeper

    world = worlds({"m": {"path": mid_model}}, engine_binary, state=StateDir.open(tmp_path))
    fleet = world.fleet
    await fleet.start()
    assert (await fleet.reconcile("m")).clean
    await fleet.load("m")
    running = world.client("running", n_predict=600)
    await eventually(lambda: running.sink.parts)
    report = await fleet.reconcile("m")
    assert report.clean and set(report.checked) == {"books", "processes", "records", "sockets", "slots"}, (
        report
    )

    runs = fleet._runs
    stray_run = await runs.intend("m", keep=False, recipe="", api_key="", output=None)
    await runs.intend("m", keep=False, recipe="", api_key="", output=None)
    status = fleet.status("m")
    with sleeper(stray_run.token) as stray:
        stray.stdout.readline()
        code = "import socket, sys, time; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))"
        code += "; print('up', flush=True); time.sleep(600)"
        command = [sys.executable, "-c", code, str(status.port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as foreign:
            foreign.stdout.readline()
            report = await fleet.reconcile("m")
            foreign.kill()
        assert stray.wait(5) is not None
    found = {one.difference.odd.value: one.repair for one in report.found}
    assert found == {
        "stray_process": "it was ended",
        "stale_record": "the record was removed",
        "foreign_connection": "",
    }, report
    assert world.value("mirror_mismatch_total", model="m") == 1
    await eventually(lambda: len(fleet._runner("m")._live.mirror.latest.slots) == 4)
    await asyncio.wait_for(running.task, 200)
    assert running.outcome == "completed"
    assert alive(status.pid)


async def test_what_slots_hold_survives_an_unload(worlds, engine_binary, mid_model, tmp_path):
    """Saved after the drain and restored at the next load: the same prompt is not read again. A force keeps nothing."""
    import orjson

    world = worlds(
        {"m": {"path": mid_model, "slot_cache": True}}, engine_binary, state=StateDir.open(tmp_path)
    )
    fleet = world.fleet

    async def ask():
        request = completion(4, stream=False, prompt="the mill by the river " * 60)
        exchange = await fleet.upstream(fleet.key("m")).open(request)
        body = orjson.loads(await exchange.read(1 << 20))
        exchange.close()
        return body["timings"]["cache_n"], body["content"]

    await fleet.load("m")
    cold, text = await ask()
    assert cold == 0
    job = fleet.begin_unload("m", deadline_s=10)
    assert (await fleet.jobs.wait(job.id, 60)).state is JobState.DONE
    await fleet.load("m")
    warm, again = await ask()
    assert warm > 200 and again == text
    assert not list((tmp_path / "slots").glob("*/*")) and not list((tmp_path / "slots").glob("*.json"))
    await fleet.force("m")
    await fleet.load("m")
    assert (await ask())[0] == 0
