"""Processes: the launcher, draining, stopping, and what a killed parent leaves behind (nothing)."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from proxy.backends.command import Command
from proxy.backends.listening import Owner, Reservation, descendants, own_port, owner
from proxy.backends.logtail import LogTail
from proxy.backends.output import LogFile
from proxy.backends.process import EngineProcess, describe_exit, process_status
from tests.backends.conftest import alive, eventually
from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]


# Whole lines in one write, whatever the surroundings ask of Python.
ENV = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def python(code: str, *args: str) -> Command:
    return Command((sys.executable, "-c", textwrap.dedent(code), *args), ENV)


async def start(command: Command, *, watch: bool = False, **more) -> EngineProcess:
    return await EngineProcess.start(command, watch=watch, tail=more.pop("tail", LogTail()), **more)


async def said(process: EngineProcess, text: str) -> str:
    """Wait until the process printed a line with `text`; return the rest of it."""
    lines = await eventually(lambda: [x for x in process.tail.lines() if text in x])
    return lines[0].split(text, 1)[1].strip()


@pytest.mark.parametrize("watch", [False, True])
async def test_exit_codes_and_output_pass_through(watch):
    """The launcher is invisible: output, exit code and death by signal are the command's."""
    process = await start(
        python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"), watch=watch
    )
    assert await asyncio.wait_for(process.exited(), 10) == 7
    assert sorted(process.tail.lines()) == ["err", "out"]
    killed = await start(python("import os; os.kill(os.getpid(), 9)"), watch=watch)
    assert await asyncio.wait_for(killed.exited(), 10) == -9
    for each in (process, killed):
        report = await each.stop(1)
        assert report.signals == () and report.left == ()


async def test_a_command_that_does_not_exist():
    process = await start(Command(("/no/such/thing",), ENV))
    assert await asyncio.wait_for(process.exited(), 10) == 125
    assert "cannot execute /no/such/thing: No such file or directory" in process.tail.words()
    await process.stop(0)


async def test_exec_keeps_the_pid_and_a_session_of_its_own():
    process = await start(
        python("import os, time; print('pid', os.getpid(), os.getsid(0), flush=True); time.sleep(60)")
    )
    assert await said(process, "pid") == f"{process.pid} {process.pid}"
    assert (await process.stop(5)).code == -signal.SIGTERM


@pytest.mark.parametrize("watch", [False, True])
async def test_a_flood_of_output_is_drained_and_bounded(watch, tmp_path):
    """100 MB in one go: the writer is never held up, memory stays bounded, the last words are there."""
    code = """
        import os
        line = b"x" * 99 + b"\\n"
        for _ in range(1000):
            os.write(1, line * 1000)
        print("that was all", flush=True)
    """
    before = psutil.Process().memory_info().rss
    process = await start(python(code), watch=watch, log_file=LogFile(tmp_path / "log", 8 << 20))
    assert await asyncio.wait_for(process.exited(), 60) == 0
    assert process.tail.lines(1) == ["that was all"]
    assert process.tail.total >= 100_000_000
    assert psutil.Process().memory_info().rss - before < 60 << 20
    assert (tmp_path / "log").stat().st_size <= 8 << 20 and (tmp_path / "log.1").exists()
    await process.stop(0)


async def test_term_then_term_then_kill(monkeypatch):
    """A process that ignores TERM gets a second one near the end of its grace and KILL at its end; it hears both."""
    code = """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"no\\n"))
        print("ready", flush=True)
        while True: time.sleep(1)
    """
    process = await start(python(code))
    await said(process, "ready")
    report = await asyncio.wait_for(process.stop(0.3), 60)
    assert report.signals == ("SIGTERM", "SIGTERM", "SIGKILL") and report.code == -9

    monkeypatch.setattr("proxy.backends.process.SECOND_TERM_S", 300.0)
    process = await start(python(code))
    await said(process, "ready")
    stopping = asyncio.create_task(process.stop(600))
    await eventually(lambda: process.tail.lines() == ["ready", "no"])
    process.hurry(300)
    await eventually(lambda: process.tail.lines() == ["ready", "no", "no"])
    process.hurry(0)
    report = await asyncio.wait_for(stopping, 60)
    assert report.signals == ("SIGTERM", "SIGTERM", "SIGKILL") and report.code == -9
    assert process.tail.lines() == ["ready", "no", "no"]


@pytest.mark.parametrize("watch", [False, True])
async def test_a_stopped_process_is_killed_at_once(watch):
    process = await start(
        python("import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"), watch=watch
    )
    pid = int(await said(process, "pid"))
    os.kill(pid, signal.SIGSTOP)
    await eventually(lambda: processes.status(pid) == "stopped")
    began = time.monotonic()
    report = await process.stop(60)
    assert time.monotonic() - began < 30 and report.signals == ("SIGKILL",) and report.left == ()
    assert not alive(pid) and not alive(process.pid)


async def test_one_that_is_stopped_after_the_term_is_killed_soon():
    """It would never hear the TERM: noticed while waiting, not at the end of a long grace."""
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    )
    process = await start(python(code))
    await said(process, "ready")
    stopping = asyncio.create_task(process.stop(60))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGSTOP)
    report = await stopping
    assert time.monotonic() - began < 30 and report.signals == ("SIGTERM", "SIGKILL")


FAMILY = """
    import os, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
    away = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"], start_new_session=True)
    print("pids", os.getpid(), child.pid, away.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("watch", [False, True])
async def test_children_go_too(watch):
    """Children that ignore TERM, in the group or in a session of their own, do not outlive a stop."""
    process = await start(python(FAMILY), watch=watch)
    pids = [int(pid) for pid in (await said(process, "pids")).split()]
    report = await process.stop(0.5)
    assert report.left == ()
    assert not any(map(alive, pids))


async def test_orphans_of_a_command_that_ended_are_killed():
    """In watch mode also what left the group: the launcher adopts it."""
    process = await start(python(FAMILY.removesuffix("time.sleep(600)\n") + "os._exit(3)\n"), watch=True)
    pids = [int(pid) for pid in (await said(process, "pids")).split()]
    assert await asyncio.wait_for(process.exited(), 10) == 3
    assert not any(map(alive, pids))
    await process.stop(0)


PARENT = """
    import asyncio, os, sys
    sys.path.insert(0, sys.argv[1])
    from proxy.backends.command import Command
    from proxy.backends.logtail import LogTail
    from proxy.backends.process import EngineProcess

    async def main():
        process = await EngineProcess.start(
            Command(tuple(sys.argv[3:]), dict(os.environ)), watch=sys.argv[2] == "watch", tail=LogTail())
        while not process.tail.lines():
            await asyncio.sleep(0.01)
        print(process.pid, *process.tail.lines(), flush=True)
        await asyncio.sleep(600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["exec", "watch"])
async def test_a_killed_parent_leaves_nothing(mode):
    """SIGKILL of the parent: the process goes with it; in watch mode its children do too."""
    code = textwrap.dedent(
        FAMILY
        if mode == "watch"
        else "import os,time; print('pids', os.getpid(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(ROOT), mode, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=ENV,
    ) as parent:
        pids = [
            int(word) for word in (await asyncio.to_thread(parent.stdout.readline)).split() if word.isdigit()
        ]
        assert len(pids) >= 2 and all(map(alive, pids))
        parent.kill()
        parent.wait(30)
    await eventually(lambda: not any(map(alive, pids)), 30)


async def test_engines_start_on_the_main_thread_only():
    """The parent-death signal follows the forking thread, so another thread is refused."""

    def elsewhere() -> None:
        asyncio.run(start(python("pass")))

    with pytest.raises(RuntimeError, match="main thread"):
        await asyncio.to_thread(elsewhere)


def test_describe_exit():
    assert describe_exit(1) == "exited with code 1"
    assert describe_exit(-11) == "was killed by SIGSEGV"


# -- ports ---------------------------------------------------------------------------------------------------


def test_a_reserved_port_is_given_to_nobody_but_who_asks_for_it():
    """Held, not listening: 'any port' never yields it, a listener by number may have it."""
    with closing(Reservation()) as reservation:
        for _ in range(300):
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", 0))
                assert other.getsockname()[1] != reservation.port
        with socket.socket() as engine:
            engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            engine.bind(("127.0.0.1", reservation.port))
            engine.listen()
            assert own_port(os.getpid()) is not None
            with socket.create_connection(("127.0.0.1", reservation.port), 2):
                pass
            reservation.close()
            reservation.close()


async def test_who_listens_is_known():
    """A listener below our process is ours, anyone else's is not."""
    code = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('port', s.getsockname()[1], flush=True); time.sleep(600)"
    ours, theirs = [await start(python(code), watch=True) for _ in range(2)]
    port = int(await said(ours, "port"))
    assert owner(port, ours.pid) is Owner.OURS
    assert owner(port, theirs.pid) is Owner.OTHER
    for process in (ours, theirs):
        await process.stop(2)
    assert owner(port, ours.pid) is Owner.NOBODY


# -- the log tail ---------------------------------------------------------------------------------------------


def test_the_tail_is_bounded_and_whole_lines():
    tail = LogTail(1000)
    for n in range(10_000):
        tail.add(f"line {n}\n".encode())
    lines = tail.lines(1000)
    assert lines[-1] == "line 9999" and 50 < len(lines) < 200
    assert all(line.startswith("line ") for line in lines)
    tail.add(b"y" * 5_000_000)
    assert tail.lines() == [] or set(tail.lines()[-1]) == {"y"}


def test_a_secret_is_never_shown():
    tail = LogTail(secret="s3cret")
    tail.add(b"key is s3c")
    tail.add(b"ret!\n")
    assert tail.lines() == ["key is ***!"]


def test_the_words_name_the_cause():
    """llama-server's own log of a missing file: each reason once, no time stamps, no farewell."""
    tail = LogTail()
    tail.add(
        b"0.00.003.433 I srv    load_model: loading model '/nope.gguf'\n"
        b"0.00.003.727 E gguf_init_from_file: failed to open GGUF file '/nope.gguf' (No such file or directory)\n"
        b"0.00.003.848 E llama_model_load_from_file_impl: failed to load model\n"
        b"0.00.003.911 E gguf_init_from_file: failed to open GGUF file '/nope.gguf' (No such file or directory)\n"
        b"0.00.003.970 I srv    operator(): operator(): cleaning up before exit...\n"
        b"0.00.004.261 E srv  llama_server: exiting due to model loading error\n"
    )
    assert tail.words() == (
        "E gguf_init_from_file: failed to open GGUF file '/nope.gguf' (No such file or directory); "
        "E llama_model_load_from_file_impl: failed to load model"
    )
    plain = LogTail()
    plain.add(b"hello\nworld\n")
    assert plain.words() == "hello; world"


def test_descendants_are_found_while_others_vanish(monkeypatch):
    """A process that ends while all of them are looked at costs the answer nothing."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); sys.stdin.read(); p.kill()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        child = int(parent.stdout.readline())

        def torn(*_args, **_kwargs):
            raise IndexError("list index out of range")

        monkeypatch.setattr("psutil.Process.children", torn)
        assert child in descendants(parent.pid) and child in descendants(os.getpid())
        assert parent.pid in descendants(os.getpid())
        parent.stdin.close()
    monkeypatch.setattr("psutil.Process.status", torn)
    assert process_status(os.getpid()) == "dead"


def test_a_drained_pipe_is_closed_once():
    """On the loop of production, while threads open files: none of them loses a descriptor that it was just given."""
    code = """
        import asyncio, os, threading, uvloop
        from proxy.backends.logtail import LogTail
        from proxy.backends.output import PipeDrain

        lost, over = [], threading.Event()

        def opens():
            while not over.is_set():
                try:
                    mine = os.open("/proc/self/stat", os.O_RDONLY)
                    for _ in range(3):
                        os.fstat(mine)
                    os.close(mine)
                except OSError as error:
                    lost.append(str(error))

        async def main():
            for number in range(3000):
                read, write = os.pipe()
                drain = PipeDrain(read, LogTail(), None)
                if number % 2:
                    os.close(write)
                    await asyncio.wait_for(drain.ended.wait(), 60)
                drain.close()
                await asyncio.sleep(0)
                if not number % 2:
                    os.close(write)

        threads = [threading.Thread(target=opens) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            uvloop.run(main())
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not lost, lost[:3]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
