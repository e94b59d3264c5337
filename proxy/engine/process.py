"""Run one long external program: output line by line to a log, a deadline, cancellation, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from proxy.engine.errors import CancelledByCallerError, EngineToolError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_TAIL_LINES = 30
_END_GRACE_S = 10.0
_TICK_S = 0.25

# The child asks the kernel to be ended when this process dies, even by SIGKILL; done in a fresh interpreter because
# code between fork and exec is not safe in a process with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class Work:
    """One program to run. ``what`` names it in messages; ``deadline_s`` bounds it."""

    what: str
    argv: Sequence[str]
    cwd: Path
    log: Path
    deadline_s: float
    env: Mapping[str, str] | None = None


def run(
    work: Work,
    *,
    on_line: Callable[[str], None] | None = None,
    on_tick: Callable[[], None] | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Run ``work`` in a process group of its own, appending its output to ``work.log``.

    ``on_line`` gets each output line, ``on_tick`` is called about four times a second. Whatever ends this function
    (failure, deadline, Ctrl-C, the cancel event) also ends the whole group. Raises EngineToolError with the log's tail.
    """
    work.log.parent.mkdir(parents=True, exist_ok=True)
    with work.log.open("ab") as log:
        log.write(f"$ {' '.join(work.argv)}\n".encode())
        log.flush()
        child = _start(work)
        try:
            _pump(work, child, log, on_line=on_line, on_tick=on_tick, cancel=cancel)
            code = child.wait(timeout=_END_GRACE_S)
        except BaseException:
            _end_group(child)
            raise
        finally:
            if child.stdout is not None:
                child.stdout.close()
    if code != 0:
        how = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
        raise EngineToolError(f"{work.what} failed ({how}); the last lines of {work.log}:\n{tail(work.log)}")


def _start(work: Work) -> subprocess.Popen[bytes]:
    argv = list(work.argv)
    if sys.platform == "linux":
        argv = [sys.executable, "-I", "-c", _LAUNCHER, str(os.getpid()), *argv]
    try:
        return subprocess.Popen(
            argv,
            cwd=work.cwd,
            env=None if work.env is None else dict(work.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineToolError(
            f"{work.what}: cannot start {work.argv[0]}: {error.strerror or error}"
        ) from error


def _pump(
    work: Work,
    child: subprocess.Popen[bytes],
    log: IO[bytes],
    *,
    on_line: Callable[[str], None] | None,
    on_tick: Callable[[], None] | None,
    cancel: threading.Event | None,
) -> None:
    stdout = child.stdout
    if stdout is None:
        raise AssertionError("started with a pipe")
    deadline = time.monotonic() + work.deadline_s
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            if selector.select(_TICK_S):
                chunk = os.read(stdout.fileno(), 65536)
                if not chunk:
                    break
                log.write(chunk)
                log.flush()
                *lines, rest = (rest + chunk).split(b"\n")
                if on_line is not None:
                    for line in lines:
                        on_line(line.decode(errors="replace").rstrip("\r"))
            if on_tick is not None:
                on_tick()
            if cancel is not None and cancel.is_set():
                raise CancelledByCallerError(work.what)
            if time.monotonic() > deadline:
                raise EngineToolError(
                    f"{work.what} took more than {work.deadline_s:g} s; the last lines of {work.log}:\n{tail(work.log)}"
                )


def _end_group(child: subprocess.Popen[bytes]) -> None:
    # SIGINT first: ninja then removes half-written outputs and ends its compilers.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signum)
        try:
            child.wait(timeout=_END_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        return


def tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a text file, or a word about why there are none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 32768))
            text = stream.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error.strerror or error})"
    return "\n".join(text.rstrip("\n").split("\n")[-lines:])
