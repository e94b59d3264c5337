"""One engine process: started by the launcher, drained, watched, stopped as a group, reaped.

Must run on the main thread's event loop: the parent-death signal follows the thread that forks.
The exit is watched by a pidfd, so it is seen at once, exactly once, and never for a recycled pid.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from proxy.backends.command import Command
from proxy.backends.listening import BLIND, GONE, descendants
from proxy.backends.logtail import LogTail
from proxy.backends.output import FileFollower, LogFile, PipeDrain, open_for_engine

LAUNCHER: Final = Path(__file__).with_name("launcher.py")
SECOND_TERM_S: Final = 0.5
"""The last part of a grace, after the second TERM: llama-server exits at once on it, whatever it is doing."""
KILL_S: Final = 1.5
"""For a killed group to be gone and reaped. One in an uninterruptible wait is reported as left over."""
LAST_WORDS_S: Final = 0.2
"""How long to wait for output still in the pipe of a process that has ended."""
LOOK_S: Final = 0.2
"""How often a process that was asked to end is looked at: one that is stopped meanwhile would never hear it."""
UNSEEN: Final = 1 << 16
"""The exit code of a process that is not our child."""
NO_PARENT: Final = 0
"""Tells the launcher to bind the process to nobody's life."""
_FROZEN: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_HOPELESS: Final = (*_FROZEN, psutil.STATUS_DISK_SLEEP)


@dataclass(frozen=True, slots=True)
class StopReport:
    """How a process went. `left` are process ids that outlived a KILL (uninterruptible, or not ours)."""

    code: int | None
    signals: tuple[str, ...]
    left: tuple[int, ...] = ()


class EngineProcess:
    """A running process group. Create with `start`; `stop` or `exited` ends its life."""

    def __init__(self, pid: int, pidfd: int, tail: LogTail, popen: "subprocess.Popen[bytes] | None") -> None:
        """Watch a process by its pidfd, which this object owns from now on. `popen` is None for no child of ours."""
        self._popen = popen
        self.pid: Final = pid
        self.tail: Final = tail
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._pidfd: int | None = pidfd
        self._loop.add_reader(pidfd, self._on_exit)
        self._drain: PipeDrain | None = None
        self._follower: FileFollower | None = None
        self._file: LogFile | None = None
        self._stopping: asyncio.Task[StopReport] | None = None
        self._term_until = float("inf")

    @classmethod
    async def start(
        cls,
        command: Command,
        *,
        watch: bool,
        tail: LogTail,
        log_file: LogFile | None = None,
        keep: Path | None = None,
    ) -> "EngineProcess":
        """Start a command in a session of its own.

        `watch` keeps a parent that also ends the command's children (see the launcher). `keep` is the file that
        takes the output of a process that may outlive us; without it the process ends when we do. Raises `OSError`
        when the launcher cannot run, for example when the machine is out of processes.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("engines are started from the main thread: the parent-death signal follows it")
        read, write = os.pipe() if keep is None else (None, open_for_engine(keep))
        parent = os.getpid() if keep is None else NO_PARENT
        mode = "watch" if watch else "exec"
        try:
            popen = subprocess.Popen(  # noqa: ASYNC220 - returns at exec, a few ms; asyncio's is the same call
                [sys.executable, "-I", "-S", str(LAUNCHER), mode, str(parent), *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                env=dict(command.env),
                cwd=command.cwd,
                start_new_session=True,
            )
        except BaseException:
            if read is not None:
                os.close(read)
            raise
        finally:
            os.close(write)
        try:
            pidfd = os.pidfd_open(popen.pid)
        except OSError:
            # out of descriptors: what cannot be watched may not run
            if read is not None:
                os.close(read)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(popen.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(KILL_S)
            raise
        process = cls(popen.pid, pidfd, tail, popen)
        process._file = log_file
        if read is None:
            if keep is not None:
                process._follow(keep)
            return process
        try:
            process._drain = PipeDrain(read, tail, log_file)
        except BaseException:
            os.close(read)
            await process.stop(grace_s=0)
            raise
        return process

    @classmethod
    def adopt(cls, pid: int, pidfd: int, tail: LogTail, output: Path) -> "EngineProcess":
        """Take over a process that an earlier proxy left running, by a pidfd of it that the caller has checked.

        How it ends cannot be learnt: its exit code is `UNSEEN`.
        """
        process = cls(pid, pidfd, tail, None)
        process._follow(output)
        return process

    def _follow(self, output: Path) -> None:
        self._follower = FileFollower(output, self.tail)
        self._follower.start()

    async def detach(self) -> None:
        """Let the process run on without us: for one that was started to be kept."""
        if self._follower is not None:
            await self._follower.stop()
        self._close_pidfd()
        if not self._exit.done():
            # whoever still waits for its end shall not wait for us
            self._exit.set_result(UNSEEN)
        if self._popen is not None and self._popen.returncode is None:
            # it is the next proxy's now: subprocess would complain that it was not waited for
            self._popen.returncode = 0

    @property
    def child(self) -> bool:
        """Whether we started it; one that was taken over is nobody's child."""
        return self._popen is not None

    @property
    def code(self) -> int | None:
        """Exit code (negative: the signal), None while it runs."""
        return self._exit.result() if self._exit.done() else None

    async def exited(self) -> int:
        """Wait for the end and for the last output; return the exit code."""
        code = await asyncio.shield(self._exit)
        await self._last_words()
        return code

    async def stop(self, grace_s: float) -> StopReport:
        """TERM, TERM near the end of `grace_s`, KILL at its end, to the group; reap; verify that all are gone.

        A stopped, traced or uninterruptible process is killed at once. Twice at once is one. Takes at
        most `grace_s` + 1.7 s. Shielded: a cancelled caller does not leave a process behind.
        """
        if self._stopping is None:
            self._term_until = self._loop.time() + grace_s
            self._stopping = self._loop.create_task(self._stop(grace_s), name=f"stop-process:{self.pid}")
        return await asyncio.shield(self._stopping)

    def hurry(self, grace_s: float) -> None:
        """Shorten the grace of a stop under way; does nothing when none is, or when less is left."""
        until = self._loop.time() + grace_s
        if self._stopping is not None and until < self._term_until:
            self._term_until = until

    async def kill(self) -> StopReport:
        """As `stop`, without asking first."""
        return await self.stop(0)

    async def _stop(self, grace_s: float) -> StopReport:
        sent: list[str] = []
        left: tuple[int, ...] = ()
        if not self._exit.done():
            family = {pid: _born(pid) for pid in descendants(self.pid)}
            if grace_s > 0 and not self._in(_HOPELESS):
                last = min(SECOND_TERM_S, grace_s / 2)
                self._signal(signal.SIGTERM, sent)
                await self._wait_term(last)
                if not self._exit.done() and not self._in(_FROZEN):
                    self._signal(signal.SIGTERM, sent)
                    await self._wait_term(0)
            family = {pid: _born(pid) for pid in descendants(self.pid)} | family
            deadline = self._loop.time() + KILL_S
            if not self._exit.done():
                self._signal(signal.SIGKILL, sent)
                await self._wait(KILL_S)
            left = await self._sweep(family, deadline)
        await self._last_words()
        if self._follower is not None:
            await self._follower.stop()
        if self._drain is not None:
            self._drain.close()
        if self._file is not None:
            self._file.close()
        code = None if self.code == UNSEEN else self.code
        return StopReport(code, tuple(sent), left)

    async def _sweep(self, family: dict[int, float | None], deadline: float) -> tuple[int, ...]:
        """Kill descendants that left the group, and wait until the group and they are gone."""
        while True:
            alive = {pid for pid, born in family.items() if born is not None and _born(pid) == born}
            for pid in alive:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            alive |= self._group()
            if not self._exit.done():
                alive.add(self.pid)
            if not alive or self._loop.time() >= deadline:
                return tuple(sorted(alive))
            await asyncio.sleep(0.01)

    async def _wait_term(self, less_s: float) -> None:
        """Wait for the exit until `less_s` before the grace is over, which may be brought forward meanwhile."""
        while not self._exit.done() and (left := self._term_until - less_s - self._loop.time()) > 0:
            await self._wait(min(left, LOOK_S))
            if self._in(_FROZEN):
                return

    async def _wait(self, timeout_s: float) -> None:
        await asyncio.wait((self._exit,), timeout=timeout_s)

    async def _last_words(self) -> None:
        if self._follower is not None:
            self._follower.read()
        if self._drain is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._drain.ended.wait()

    def _signal(self, number: signal.Signals, sent: list[str]) -> None:
        # not permitted where the command became another user: `left` tells of it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
            sent.append(number.name)

    def _group(self) -> set[int]:
        """Who of the group still runs; zombies wait for whoever adopted them, not for us."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return set()
        except PermissionError:
            pass
        try:
            pids = psutil.pids()
        except BLIND:
            return {self.pid}
        return {pid for pid in pids if _group(pid) == self.pid and _born(pid) is not None}

    def _in(self, statuses: tuple[str, ...]) -> bool:
        return any(process_status(pid) in statuses for pid in (self.pid, *descendants(self.pid)))

    def _close_pidfd(self) -> None:
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def _on_exit(self) -> None:
        self._close_pidfd()
        if self._popen is not None:
            # Before the reap: until then nobody else can be given this process group's id.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            code = self._popen.wait()
        else:
            for pid in self._group():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            code = UNSEEN
        if not self._exit.done():
            self._exit.set_result(code)


def describe_exit(code: int) -> str:
    """Return an exit code as words, for example `was killed by SIGSEGV` or `exited with code 1`."""
    if code == UNSEEN:
        return "ended"
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def process_status(pid: int) -> str:
    """Return what the kernel says of a process: `dead` when there is none, nothing when it cannot be asked."""
    try:
        return psutil.Process(pid).status()
    except GONE:
        return psutil.STATUS_DEAD
    except BLIND:
        return ""


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return 0


def _born(pid: int) -> float | None:
    """Creation time: the same pid with another one is another process. None for none or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except (*GONE, *BLIND):
        return None
