"""Hosts that sleep: the machine and the idle decision alone, then hooks, probes and loads for real."""

import asyncio
import shlex
import socket
import sys

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends import hooks
from proxy.backends.hostkeeper import HostKeeper
from proxy.backends.hosts import (
    TABLE,
    Host,
    HostCause,
    HostEvent,
    HostState,
    IllegalHostEvent,
    Moved,
    Retire,
    Sleep,
    Stay,
    Use,
    due,
    step,
    used,
)
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.settings import Host as HostSettings
from proxy.types import NOBODY, Cause
from tests.backends.conftest import Collect, completion, eventually

S, E = HostState, HostEvent


# -- the machine alone ---------------------------------------------------------------------------------------


@given(st.sampled_from(S), st.lists(st.tuples(st.sampled_from(E), st.floats(0, 50)), max_size=30))
def test_any_history_stays_in_the_table(state, history):
    """A move changes state and time together; an event without a place raises and changes nothing."""
    host, now = Host(state=state), 0.0
    for event, gap in history:
        now += gap
        if event not in TABLE[host.state]:
            with pytest.raises(IllegalHostEvent, match=f"{event.value} in state {host.state.value}"):
                step(host, event, now, cause=HostCause.PROBE)
            continue
        after, moved = step(host, event, now, cause=HostCause.PROBE, settle_s=10, error="words")
        if moved is None:
            assert after.state is host.state and after.since == host.since
        else:
            assert moved == Moved(host.state, after.state, HostCause.PROBE) and after.since == now
        host = after


def go(host, event, now, **more):
    return step(host, event, now, cause=HostCause.PROBE, **more)[0]


def test_a_host_that_goes_to_sleep_still_answers_for_a_while():
    host = go(go(Host(), E.IDLE_BEGUN, 1), E.IDLE_DONE, 2, settle_s=10)
    assert host.state is S.ASLEEP
    assert go(host, E.ANSWERED, 11).state is S.ASLEEP
    woken = go(host, E.ANSWERED, 12)
    assert woken.state is S.AWAKE and woken.used_at == 12, "whoever woke it has a whole idle time"


def test_failures_are_kept_until_a_hook_goes_well():
    failed = go(go(Host(), E.WAKE_BEGUN, 1), E.WAKE_FAILED, 2, error="no outlet")
    assert (failed.state, failed.error) == (S.ASLEEP, "no outlet")
    assert go(failed, E.SILENT, 3).error == "no outlet"
    assert go(go(failed, E.WAKE_BEGUN, 4), E.ANSWERED, 5).error == ""
    again = go(go(Host(), E.IDLE_BEGUN, 7), E.IDLE_FAILED, 8, error="busy")
    assert (again.state, again.error, again.used_at) == (S.AWAKE, "busy", 8)


@pytest.mark.parametrize(
    ("use", "now", "after_s", "what"),
    [
        (Use(), 99, 100, Stay()),
        (Use(), 100, 100, Sleep()),
        (Use(), 1e9, None, Stay()),
        (Use(loaded=("a", "b"), idle_since=0), 100, 100, Retire(("a", "b"))),
        (Use(loaded=("a",), idle_since=50), 149, 100, Stay()),
        (Use(loaded=("a",), idle_since=50), 150, 100, Retire(("a",))),
        (Use(leased=True), 1e6, 100, Stay()),
        (Use(wanted=True, loaded=("a",)), 1e6, 100, Stay()),
    ],
)
def test_when_the_idle_command_is_due(use, now, after_s, what):
    assert due(used(Host(S.AWAKE), use, now), use, now, after_s) == what


@pytest.mark.parametrize("state", [S.WAKING, S.IDLING, S.ASLEEP])
def test_nothing_is_due_while_a_hook_runs_or_the_host_sleeps(state):
    assert due(Host(state), Use(), 1e6, 100) == Stay()


@given(
    st.lists(
        st.builds(
            Use,
            st.booleans(),
            st.booleans(),
            st.sampled_from([(), ("a",), ("a", "b")]),
            st.none() | st.floats(0, 2000),
        ),
        max_size=60,
    )
)
def test_the_command_never_runs_beside_a_lease_a_request_or_a_loaded_model(history):
    """One look a second; N seconds without leases or requests must lie before each command."""
    host, needed = Host(S.AWAKE), 0.0
    for second, use in enumerate(history):
        now = float(second)
        host = used(host, use, now)
        if use.leased or use.wanted:
            needed = now
        match due(host, use, now, 5.0):
            case Sleep():
                assert not use.leased and not use.wanted and not use.loaded and now - needed >= 5
            case Retire(models):
                assert models == use.loaded and not use.leased and not use.wanted and now - needed >= 5
            case Stay():
                pass


# -- hooks and probes ----------------------------------------------------------------------------------------


class Machine:
    """What a probe meets: a port that nobody listens on while it sleeps. The port is ours all the time."""

    def __init__(self):
        self.hold = self._bound(0)
        self.port = self.hold.getsockname()[1]
        self.probe = f"127.0.0.1:{self.port}"
        self.up = None

    def _bound(self, port):
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("127.0.0.1", port))
        return made

    def wake(self):
        self.up = self._bound(self.port)
        self.up.listen()

    def sleep(self):
        up, self.up = self.up, None
        if up is not None:
            up.close()

    def close(self):
        self.sleep()
        self.hold.close()


@pytest.fixture
def machine():
    made = Machine()
    yield made
    made.close()


def python(*lines: str) -> str:
    """Return a command that runs Python lines."""
    return shlex.join([sys.executable, "-c", "\n".join(("import os, sys, time", *lines))])


async def test_a_command_that_goes_well_says_nothing():
    assert (await hooks.run(python("print('hello')"), 30)).trouble == ""


async def test_a_command_that_fails_is_quoted():
    end = await hooks.run(python("print('warming up')", "sys.exit('error: no such outlet')"), 30)
    assert "exited with code 1: error: no such outlet" in end.words
    assert "cannot execute" in (await hooks.run("/no/such/program now", 30)).words


async def test_a_command_that_is_given_up_ends_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    line = python(
        "child = os.fork()",
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')",
        "print('still trying', flush=True)",
        "time.sleep(3600)",
    )
    running = asyncio.create_task(hooks.run(line, 3600))
    await eventually(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    for pid in map(int, pids.read_text().split()):
        await eventually(lambda pid=pid: not psutil.pid_exists(pid))


async def test_hooks_do_not_inherit_our_settings(monkeypatch):
    monkeypatch.setenv("LLAMA_PROXY_SERVER__METRICS_KEY", "secret")
    monkeypatch.setenv("SOMETHING", "else")
    line = python(
        "sys.exit(3 if 'LLAMA_PROXY_SERVER__METRICS_KEY' in os.environ else 'SOMETHING' not in os.environ)"
    )
    assert (await hooks.run(line, 30)).trouble == ""


async def test_a_magic_packet_arrives():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(10)
        hooks.send_packet("52:54:00:ab:cd:ef", "127.0.0.1", listener.getsockname()[1])
        packet = await asyncio.to_thread(listener.recv, 1000)
    assert packet == b"\xff" * 6 + bytes.fromhex("525400abcdef") * 16 and len(packet) == 102


async def test_probes(machine):
    assert not await hooks.answers(machine.probe)
    machine.wake()
    assert await hooks.answers(machine.probe)
    machine.sleep()
    assert not await hooks.answers(machine.probe)
    statuses = iter((b"200 OK", b"503 Busy"))

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n" % next(statuses))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/up"
        assert await hooks.answers(url)
        assert not await hooks.answers(url)
    assert not await hooks.answers(url)


# -- one host ------------------------------------------------------------------------------------------------


class Scene:
    """A keeper with a clock of ours and a use that the test sets; its watch is the test."""

    def __init__(self, **settings):
        self.now, self.use, self.unloaded, self.metrics = 1000.0, Use(), [], Metrics()
        self.wanted = False
        self.keeper = HostKeeper(
            "gpu1", HostSettings.model_validate(settings), use=lambda _: self.use, unload=self.unloaded.append,
            wanted=lambda _: self.wanted, metrics=self.metrics, clock=lambda: self.now,
        )  # fmt: skip

    def sample(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"llama_proxy_{name}", {"host": "gpu1", **labels})

    @property
    def state(self):
        return self.keeper.status().state


async def test_an_idle_host_sleeps_after_its_models_and_never_while_a_lease_is_held(tmp_path):
    ran = tmp_path / "ran"
    line = python(f"open({str(ran)!r}, 'a').write('x')")
    s = Scene(idle={"after_s": 60, "command": line, "settle_s": 10})
    s.use = Use(leased=True, loaded=("a",), idle_since=900.0)
    for _ in range(5):
        s.now += 100
        await s.keeper.look()
    assert not s.unloaded and not ran.exists()
    s.use = Use(loaded=("a",), idle_since=900.0)
    s.now += 59
    await s.keeper.look()
    assert not s.unloaded and s.keeper.status().idle_in_s == 1, "the lease held the idle time back as well"
    s.now += 1
    await s.keeper.look()
    assert s.unloaded == ["a"] and not ran.exists()
    s.use = Use()
    await s.keeper.look()
    assert ran.read_text() == "x" and s.state is S.ASLEEP and s.keeper.status().idle_in_s is None
    s.now += 1000
    await s.keeper.look()
    assert ran.read_text() == "x", "once is enough"
    assert s.sample("host_transitions_total", **{"from": "unknown", "to": "idling", "cause": "idle"}) == 1
    await s.keeper.ensure("a", asked=True, told=print)
    assert s.state is S.AWAKE
    s.now += 60
    await s.keeper.look()
    assert ran.read_text() == "xx", "it was used in between"


async def test_an_idle_command_that_fails_is_said_and_tried_again_later():
    s = Scene(idle={"after_s": 60, "command": python("sys.exit('error: somebody is logged in')")})
    s.now += 60
    await s.keeper.look()
    status = s.keeper.status()
    assert status.state is S.AWAKE and "somebody is logged in" in status.error and status.idle_in_s == 60
    assert s.sample("host_hook_failures_total", hook="idle") == 1
    await s.keeper.look()
    assert s.sample("host_hook_failures_total", hook="idle") == 1
    s.now += 60
    await s.keeper.look()
    assert s.sample("host_hook_failures_total", hook="idle") == 2


async def test_what_sleeps_already_is_not_put_to_sleep(machine, tmp_path):
    ran = tmp_path / "ran"
    line = python(f"open({str(ran)!r}, 'a').write('x')")
    s = Scene(
        wake={"command": "true", "probe": machine.probe}, idle={"after_s": 60, "command": line}
    )  # fmt: skip
    s.now += 60
    await s.keeper.look()
    assert s.state is S.ASLEEP and not ran.exists() and s.sample("host_awake") == 0
    machine.wake()
    s.now += 60
    await s.keeper.look()
    assert s.state is S.AWAKE and s.sample("host_awake") == 1


async def test_one_waking_serves_all_and_survives_whoever_leaves(machine, tmp_path):
    """Four loads, one of them cancelled: the command runs once, everybody is told what is waited for, all go on."""
    ran, told = tmp_path / "ran", []
    line = python(f"open({str(ran)!r}, 'a').write('x')")
    s = Scene(wake={"command": line, "probe": machine.probe, "timeout_s": 60})
    first = asyncio.create_task(s.keeper.ensure("a", asked=True, told=told.append))
    await eventually(lambda: s.state is S.WAKING)
    others = [asyncio.create_task(s.keeper.ensure(name, asked=False, told=told.append)) for name in "bcd"]
    await eventually(ran.exists)
    await eventually(lambda: len(told) == 4)
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled() and set(told) == {"host gpu1 is being woken"}
    machine.wake()
    await asyncio.wait_for(asyncio.gather(*others), 30)
    assert ran.read_text() == "x" and s.state is S.AWAKE
    await s.keeper.ensure("a", asked=False, told=told.append)
    assert len(told) == 4, "an awake host is not waited for"
    await s.keeper.stop()


async def test_a_packet_is_sent_until_the_host_answers(machine, monkeypatch):
    monkeypatch.setattr("proxy.backends.hostkeeper.RESEND_S", 0.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(10)
        port = listener.getsockname()[1]
        wake = {"mac": "52-54-00-AB-CD-EF", "broadcast": "127.0.0.1", "port": port, "probe": machine.probe}
        s = Scene(wake=wake)
        waiting = asyncio.create_task(s.keeper.ensure("a", asked=True, told=print))
        for _ in range(2):
            packet = await asyncio.to_thread(listener.recv, 1000)
            assert packet == hooks.magic_packet("52:54:00:ab:cd:ef")
        machine.wake()
        await asyncio.wait_for(waiting, 30)
    assert s.state is S.AWAKE


@pytest.mark.parametrize(
    ("lines", "timeout_s", "words"),
    [
        (["sys.exit('error: no such outlet')"], 60, "exited with code 1: error: no such outlet"),
        (["print('sent')"], 5, "it did not answer at 127.0.0.1:PORT within 5 s: sent"),
        (["print('trying', flush=True)", "time.sleep(3600)"], 5, "did not end within 5 s and was killed: trying"),
    ],
)  # fmt: skip
async def test_a_host_that_does_not_wake(machine, lines, timeout_s, words):
    """Everybody who waits gets the same clear error, within the deadline; it is shown and counted once."""
    s = Scene(wake={"command": python(*lines), "probe": machine.probe, "timeout_s": timeout_s})
    waiting = [s.keeper.ensure(name, asked=True, told=print) for name in "abc"]
    errors = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
    words = words.replace("127.0.0.1:PORT", machine.probe)
    assert {(type(e), e.code) for e in errors} == {(ProxyError, ErrorCode.WAKE_FAILED)}
    assert all("host 'gpu1' was not woken: " in e.message and words in e.message for e in errors)
    status = s.keeper.status()
    assert status.state is S.ASLEEP and words in status.error
    assert s.sample("host_hook_failures_total", hook="wake") == 1


async def test_a_restart_wakes_nobody_unless_a_request_wants_it(machine, tmp_path):
    ran = tmp_path / "ran"
    line = python(f"open({str(ran)!r}, 'a').write('x')")
    s = Scene(wake={"command": line, "probe": machine.probe, "timeout_s": 60})
    with pytest.raises(ProxyError, match=f"does not answer at {machine.probe}") as error:
        await s.keeper.ensure("a", asked=False, told=print)
    assert error.value.code is ErrorCode.WAKE_FAILED and not ran.exists() and s.state is S.ASLEEP
    s.wanted = True
    waiting = asyncio.create_task(s.keeper.ensure("a", asked=False, told=print))
    await eventually(ran.exists)
    machine.wake()
    await asyncio.wait_for(waiting, 30)


async def test_who_comes_while_the_host_goes_to_sleep_waits_and_wakes_it(machine, tmp_path):
    """The command runs, then its effect settles while the host still answers: only after that it is woken."""
    go_on, ran, told = tmp_path / "go", tmp_path / "ran", []
    machine.wake()
    s = Scene(
        wake={"command": python(f"open({str(ran)!r}, 'a').write('x')"), "probe": machine.probe, "timeout_s": 60},
        idle={
            "after_s": 60, "settle_s": 0.3,
            "command": python(f"while not os.path.exists({str(go_on)!r}): time.sleep(0.01)"),
        },
    )  # fmt: skip
    await s.keeper.look()
    s.now += 60
    looking = asyncio.create_task(s.keeper.look())
    await eventually(lambda: s.state is S.IDLING)
    waiting = asyncio.create_task(s.keeper.ensure("a", asked=True, told=told.append))
    await eventually(lambda: told == ["the idle command of host gpu1 runs"])
    go_on.touch()
    await asyncio.wait_for(looking, 30)
    await eventually(lambda: told[-1] == "host gpu1 goes to sleep; it is woken after that")
    assert await hooks.answers(machine.probe) and s.state is S.ASLEEP and not ran.exists()
    machine.sleep()
    s.now += 0.3
    await eventually(ran.exists)
    machine.wake()
    await asyncio.wait_for(waiting, 30)
    assert s.state is S.AWAKE


async def test_a_stop_ends_hooks_and_tells_who_waits(machine, tmp_path):
    pid = tmp_path / "pid"
    line = python(f"open({str(pid)!r}, 'w').write(str(os.getpid()))", "time.sleep(3600)")
    s = Scene(wake={"command": line, "probe": machine.probe})
    waiting = asyncio.create_task(s.keeper.ensure("a", asked=True, told=print))
    await eventually(lambda: pid.exists() and pid.read_text())
    await s.keeper.stop()
    with pytest.raises(ProxyError, match="shutting down"):
        await asyncio.wait_for(waiting, 10)
    await eventually(lambda: not psutil.pid_exists(int(pid.read_text())))
    with pytest.raises(ProxyError, match="shutting down"):
        await s.keeper.ensure("a", asked=True, told=print)
    await s.keeper.stop()


# -- a fleet with a real engine ------------------------------------------------------------------------------


@pytest.mark.engine
async def test_a_load_wakes_its_host_and_an_idle_one_lets_its_models_go(
    fleets, engine_binary, mid_model, machine, tmp_path
):
    """Load: probe, wake, wait, load. A running request and a lease keep the host; then unload, idle command, and anew."""
    woken, slept = tmp_path / "woken", tmp_path / "slept"
    metrics = Metrics()
    fleet, seen = fleets(
        {"m": {"path": mid_model, "host": "gpu1"}},
        engine_binary,
        metrics=metrics,
        hosts={
            "gpu1": {
                "wake": {"command": python(f"open({str(woken)!r}, 'a').write('x')"), "probe": machine.probe},
                "idle": {
                    "after_s": 0.5, "settle_s": 0, "command": python(f"open({str(slept)!r}, 'a').write('x')"),
                },
            }
        },
    )  # fmt: skip
    await fleet.start()
    job = fleet.begin_load("m")
    await eventually(woken.exists)
    await eventually(lambda: fleet.jobs.get(job.id).progress.stage == "waking")
    assert fleet.status("m").waits_for == "host gpu1 is being woken" and fleet.status("m").pid is None
    assert fleet.host("m").state is S.WAKING
    machine.wake()
    assert (await fleet.jobs.wait(job.id, 60)).state == "done"
    lease, _ = await fleet.leases.grant(600, "night run", NOBODY)
    exchange, sink = await fleet.upstream(fleet.key("m")).open(completion(100)), Collect()
    await asyncio.wait_for(exchange.attach(sink), 120)
    idle_since = fleet._runner("m").idle_since
    await eventually(lambda: fleet._runner("m")._clock() - idle_since > 1.5)
    assert fleet.status("m").state == "ready" and not slept.exists(), "the lease holds"
    await fleet.leases.release(lease.id)
    await eventually(slept.exists, 60)
    await eventually(lambda: fleet.host("m").state is S.ASLEEP, 30)
    assert fleet.status("m").state == "unloaded" and ("m", "ready", "stopping", "ttl") in seen.of("state")
    machine.sleep()
    loading = asyncio.create_task(fleet.load("m", Cause.REQUEST))
    await eventually(lambda: woken.read_text() == "xx", 30)
    machine.wake()
    await asyncio.wait_for(loading, 60)
    assert slept.read_text() == "x" and fleet.host("m").state is S.AWAKE


@pytest.mark.engine
async def test_a_load_whose_host_does_not_wake_fails_with_its_words(
    fleets, engine_binary, mid_model, machine
):
    """Nothing is started; the error says which host, and what the command said."""
    fleet, seen = fleets(
        {"m": {"path": mid_model, "host": "gpu1"}},
        engine_binary,
        hosts={
            "gpu1": {"wake": {"command": python("sys.exit('error: no such outlet')"), "probe": machine.probe}}
        },
    )
    await fleet.start()
    with pytest.raises(ProxyError, match="host 'gpu1' was not woken.*no such outlet") as error:
        await asyncio.wait_for(fleet.load("m", Cause.REQUEST), 60)
    assert error.value.code is ErrorCode.WAKE_FAILED
    assert seen.states("m") == ["starting", "failed"]
    assert "no such outlet" in fleet.status("m").last_error
