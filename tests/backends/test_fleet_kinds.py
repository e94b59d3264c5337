"""The fleet's other kinds of backend and its edges: commands, remotes, ports, mirrors, a killed proxy."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from proxy.backends import bringup
from proxy.errors import ErrorCode, ProxyError
from proxy.settings import ConfigError
from proxy.types import Cause
from tests.backends.conftest import ALONE, ENDLESS, Collect, alive, completion, eventually, make_fleet
from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.engine


async def test_a_command_runs_the_engine(fleets, engine_binary, mid_model):
    """`cmd` with macros, through a shell: the engine answers with our key, and goes with its shell."""
    command = f"sh -c '${{ENGINE}} -m {mid_model} --host 127.0.0.1 --port ${{PORT}} -c 1024 -np 2 -t 1 --no-warmup; echo over'"
    fleet, seen = fleets({"c": {"cmd": command}}, engine_binary)
    info = await fleet.load("c")
    assert info.slots == 2
    pid = fleet.status("c").pid
    family = [pid, *(child.pid for child in processes.below(pid))]
    assert len(family) == 3
    exchange = await fleet.upstream(fleet.key("c")).open(completion(3, stream=False))
    assert exchange.head.status == 200
    await exchange.read(1 << 20)
    report = await fleet.unload("c", deadline_s=2)
    assert report.left == () and not any(map(alive, family))


async def test_a_crash_below_a_shell_is_seen(fleets, engine_binary, mid_model):
    command = f"sh -c '${{ENGINE}} -m {mid_model} --host 127.0.0.1 --port ${{PORT}} -c 1024 -t 1 --no-warmup; exit 9'"
    fleet, seen = fleets({"c": {"cmd": command}}, engine_binary)
    await fleet.load("c")
    engine = next(
        child for child in processes.below(fleet.status("c").pid) if processes.name(child) == "llama-server"
    )
    os.kill(engine.pid, signal.SIGKILL)
    await eventually(lambda: seen.of("down"), 30)
    assert "exited with code 9" in seen.of("down")[0][1].message


async def test_a_taken_port_is_not_used(fleets, engine_binary, mid_model, monkeypatch):
    """A stranger listens on the first port we reserved: the load goes on with another one."""
    real, stranger, first = bringup.Reservation, socket.socket(), []

    def steal():
        reservation = real()
        if not first:
            first.append(reservation.port)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind(("127.0.0.1", reservation.port))
            stranger.listen()
        return reservation

    monkeypatch.setattr(bringup, "Reservation", steal)
    command = f"${{ENGINE}} -m {mid_model} --host 127.0.0.1 --port ${{PORT}} -c 1024 -t 1 --no-warmup"
    fleet, seen = fleets({"c": {"cmd": command}}, engine_binary)
    with stranger:
        await fleet.load("c")
        assert fleet.status("c").port not in first
        assert seen.states("c") == ["starting", "loading", "ready"]
        exchange = await fleet.upstream(fleet.key("c")).open(completion(3, stream=False))
        assert exchange.head.status == 200
        exchange.close()


async def test_a_healthy_stranger_is_not_taken_for_the_engine(fleets, engine_binary, mid_model, monkeypatch):
    """Even one that answers /health with 200, while the command itself never listens."""

    async def healthy(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    stranger = await asyncio.start_server(healthy, "127.0.0.1", 0)
    port = stranger.sockets[0].getsockname()[1]

    class Same:
        def __init__(self):
            self.port = port

        def close(self):
            pass

    monkeypatch.setattr(bringup, "Reservation", Same)
    fleet, _ = fleets({"c": {"cmd": "sleep 600 ${PORT}"}}, None)
    with pytest.raises(ProxyError, match="ports in a row were taken by other programs"):
        await asyncio.wait_for(fleet.load("c"), 60)
    stranger.close()
    await stranger.wait_closed()


async def test_many_loads_at_once_get_different_ports(fleets, engine_binary, mid_model):
    models = {f"m{n}": {"path": mid_model, "args": ["-c", "512", "-np", "1"]} for n in range(4)}
    fleet, _ = fleets(models, engine_binary)
    await asyncio.gather(*(fleet.load(name) for name in models))
    assert len({fleet.status(name).port for name in models}) == 4


async def test_a_remote_backend(fleets, engine_binary, mid_model):
    """An engine someone else runs: reached with its key, served, mirrored, and noticed when it goes."""
    host, _ = fleets({"mid": {"path": mid_model}}, engine_binary)
    await host.load("mid")
    status = host.status("mid")
    environ = Path(f"/proc/{status.pid}/environ").read_bytes()
    key = environ.split(b"LLAMA_API_KEY=")[1].split(b"\0")[0].decode()
    url = f"http://127.0.0.1:{status.port}"
    fleet, seen = fleets(
        {
            "far": {"url": url, "upstream_key": key},
            "wrong": {"url": url, "upstream_key": "nope"},
            "nobody": {"url": "http://127.0.0.1:9", "budgets": {"load_timeout_s": 0.5}},
        }
    )
    info = await fleet.load("far")
    assert info.slots == 4 and fleet.status("far").pid is None and fleet.key("far").backend == "remote"
    exchange = await fleet.upstream(fleet.key("far")).open(completion(3, stream=False))
    assert exchange.head.status == 200
    await exchange.read(1 << 20)
    await eventually(lambda: fleet.snapshot("far"), 30)
    with pytest.raises(ProxyError, match="answered 401 .the engine does not take the proxy's key"):
        await fleet.load("wrong")
    with pytest.raises(ProxyError) as late:
        await fleet.load("nobody")
    assert late.value.code is ErrorCode.LOAD_TIMEOUT

    await host.unload("mid", force=True)
    fleet.poke(fleet.key("far"))
    await eventually(lambda: seen.of("down"), 30)
    [(key_down, error)] = seen.of("down")
    assert key_down.model == "far" and "does not answer any more" in error.message
    assert ("far", "ready", "failed", "crash") in seen.of("state")


class Gateway:
    """What stands before a remote engine; while `gone`, it answers everything itself, as one that reaches nobody."""

    def __init__(self, port):
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self.gone = self.answered = 0

    async def __call__(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._open |= {writer, back}
        try:
            await asyncio.gather(self._ask(reader, writer, back), self._pump(there, writer))
        except OSError:
            pass
        finally:
            self._open -= {writer, back}
            writer.close()
            back.close()

    async def _ask(self, reader, writer, back):
        while some := await reader.read(65536):
            if self.gone:
                self.answered += 1
                writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            else:
                back.write(some)
        back.close()

    async def _pump(self, there, writer):
        while some := await there.read(65536):
            writer.write(some)

    def end(self):
        for writer in self._open:
            writer.transport.abort()


async def test_a_gateway_that_reaches_nobody_is_no_engine_that_shows_no_slots(
    fleets, engine_binary, mid_model
):
    """Its answers are not the engine's: the model is lost as one that does not answer."""
    host, _ = fleets({"mid": {"cmd": f"${{ENGINE}} -m {mid_model} --port ${{PORT}} -np 1 -c 1024 -t 1", "upstream_key": "k"}}, engine_binary)  # fmt: skip
    await host.load("mid")
    gateway = Gateway(host.status("mid").port)
    server = await asyncio.start_server(gateway, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        fleet, seen = fleets({"far": {"url": f"http://127.0.0.1:{port}", "upstream_key": "k"}})
        await fleet.load("far")
        await eventually(lambda: fleet.snapshot("far"), 30)
        gateway.gone = 1
        fleet.poke(fleet.key("far"))
        await eventually(lambda: seen.of("down"), 30)
        assert "does not answer any more: /slots answered 502" in seen.of("down")[0][1].message
        await fleet.unload("far")
    finally:
        server.close()
        gateway.end()


async def test_the_mirror_follows_a_ready_engine_only(fleets, engine_binary, mid_model):
    """Snapshots of this generation appear while it is ready, show the busy slot, and end with it."""
    fleet, seen = fleets({"mid": {"path": mid_model, "args": ALONE}}, engine_binary)
    assert fleet.snapshot("mid") is None and fleet.status("mid").state == "unloaded"
    await fleet.load("mid")
    key = fleet.key("mid")
    await eventually(lambda: fleet.snapshot("mid"), 30)
    exchange = await fleet.upstream(key).open(completion(ENDLESS))
    sink = Collect()
    pump = asyncio.create_task(exchange.attach(sink))
    await asyncio.wait_for(sink.first.wait(), 60)
    fleet.poke(key)
    busy = await eventually(lambda: next((s for s in seen.snapshots if s.busy), None), 30)
    assert busy.key == key and not busy.native
    assert all(seen_one.key == key for seen_one in seen.snapshots)

    left_at = time.monotonic()
    exchange.close()
    pump.cancel()
    await asyncio.wait((pump,))
    while fleet.snapshot("mid").busy:
        fleet.poke(key)
        await asyncio.sleep(0.05)
        assert time.monotonic() - left_at < 15, "the engine did not notice that its client left"
    await fleet.unload("mid", force=True)
    count = len(seen.snapshots)
    fleet.poke(key)
    await asyncio.sleep(0.3)
    assert len(seen.snapshots) == count and fleet.snapshot("mid") is None


async def test_metrics_tell_the_life(fleets, engine_binary, mid_model, tmp_path):
    from proxy.metrics import Metrics

    metrics = Metrics()
    fleet, _ = fleets(
        {"mid": {"path": mid_model}, "bad": {"path": tmp_path / "x"}}, engine_binary, metrics=metrics
    )
    text = metrics.render().decode()
    assert 'llama_proxy_model_state{model="mid",state="unloaded"} 1.0' in text
    await fleet.load("mid", Cause.REQUEST)
    with pytest.raises(ProxyError):
        await fleet.load("bad")
    await fleet.unload("mid", force=True, cause=Cause.FORCE)
    text = metrics.render().decode()
    assert (
        'llama_proxy_model_transitions_total{cause="request",from="loading",model="mid",to="ready"} 1.0'
        in text
    )
    assert (
        'llama_proxy_model_transitions_total{cause="force",from="ready",model="mid",to="stopping"} 1.0'
        in text
    )
    assert 'llama_proxy_load_seconds_count{model="mid",outcome="ready"} 1.0' in text
    assert 'llama_proxy_load_seconds_count{model="bad",outcome="failed"} 1.0' in text
    assert 'llama_proxy_unload_seconds_count{forced="true",model="mid"} 1.0' in text
    assert 'llama_proxy_model_state{model="bad",state="failed"} 1.0' in text


def test_what_is_not_supported_is_said_before_anything_starts(tmp_path):
    for model, message in (
        ({"dns": "x:1", "on_proxy_exit": "keep"}, r"models\.m\.on_proxy_exit: keep has no meaning with dns"),
        ({"url": "http://x:1", "on_proxy_exit": "keep"}, r"models\.m\.on_proxy_exit: keep has no meaning"),
        ({"path": "x", "args": ["--port", "1"]}, r"models\.m\.args: --port may not be set here"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_fleet({"m": model})
    with pytest.raises(ValueError, match=r"models\.m\.url\n.*expected http://"):
        make_fleet({"m": {"url": "llama:8080"}})
    with pytest.raises(ValueError, match=r"models\.m\.dns\n.*expected host:port"):
        make_fleet({"m": {"dns": "llama.svc"}})


async def test_an_unknown_model(fleets):
    fleet, _ = fleets({"m": {"path": "/x"}})
    with pytest.raises(ProxyError) as unknown:
        await fleet.load("n")
    assert unknown.value.code is ErrorCode.MODEL_NOT_FOUND


PARENT = """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from tests.backends.conftest import make_fleet

    async def main():
        engine, model = sys.argv[2:4]
        cmd = f"sh -c '${{ENGINE}} -m {model} --host 127.0.0.1 --port ${{PORT}} -c 1024 -t 1; true'"
        fleet, _ = make_fleet({"p": {"path": model}, "c": {"cmd": cmd}, "l": {"path": model}}, Path(engine))
        await asyncio.gather(fleet.load("p"), fleet.load("c"))
        fleet.request_load("l")
        while fleet.status("l").pid is None:
            await asyncio.sleep(0)
        print("READY", *(status.pid for status in fleet.statuses()), flush=True)
        await asyncio.sleep(600)

    runner = sys.argv[4]
    if runner == "uvloop":
        import uvloop
        uvloop.run(main())
    else:
        asyncio.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_a_killed_proxy_leaves_no_engine(engine_binary, mid_model, loop):
    """SIGKILL of the process that runs the fleet, one engine ready, one below a shell, one just started."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(ROOT), str(engine_binary), str(mid_model), loop],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        line = ""
        while not line.startswith("READY"):
            line = await asyncio.to_thread(parent.stdout.readline)
            assert line, "the parent ended early"
        family = [p.pid for p in processes.below(parent.pid)]
        assert len(family) >= 5
        parent.kill()
        parent.wait(30)
    await eventually(lambda: not any(map(alive, family)), 30)


async def test_uvloop_runs_a_whole_life(engine_binary, mid_model):
    """The production event loop: load, stream, crash, reload, stop with a stream open."""
    code = """
        import asyncio, os, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        import uvloop
        from proxy.upstream import UpstreamDied
        from tests.backends.conftest import ALONE, ENDLESS, Collect, completion, make_fleet

        async def main():
            fleet, seen = make_fleet({"m": {"path": sys.argv[3], "args": ALONE}}, Path(sys.argv[2]))
            for kill in (True, False):
                await fleet.load("m")
                exchange, sink = await fleet.upstream(fleet.key("m")).open(completion(ENDLESS)), Collect()
                pump = asyncio.create_task(exchange.attach(sink))
                await asyncio.wait_for(sink.first.wait(), 60)
                pid = fleet.status("m").pid
                if kill:
                    os.kill(pid, 9)
                else:
                    await fleet.stop(8)
                try:
                    await asyncio.wait_for(pump, 20)
                except UpstreamDied as died:
                    print("DIED", died)
                while kill and not seen.of("down"):
                    await asyncio.sleep(0.01)
            print("DONE", fleet.status("m").state, os.path.exists(f"/proc/{pid}"))

        uvloop.run(main())
    """
    done = await asyncio.to_thread(
        subprocess.run,
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            textwrap.dedent(code),
            str(ROOT),
            str(engine_binary),
            str(mid_model),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("DIED", "DONE"))]
    assert lines[-1:] == ["DONE unloaded False"] and len(lines) == 3, done.stdout + done.stderr
    assert "shutting down" in lines[1] and done.stderr == ""
