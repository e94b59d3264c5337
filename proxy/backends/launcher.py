"""Ties an engine's life to the proxy's, then becomes the engine. Run as a script, never imported.

    python -I -S launcher.py exec  PARENT_PID COMMAND ARGUMENT…
    python -I -S launcher.py watch PARENT_PID COMMAND ARGUMENT…

Linux kills a process with PR_SET_PDEATHSIG when the *thread* that forked it ends, so the proxy forks from
its main thread only; a parent that died before the call is noticed by asking for the parent again. PARENT_PID 0:
nobody's life, the process is to outlive who started it.

`exec`: SIGKILL with the parent, then exec: the process id is the engine's.
`watch`: for commands that may have children of their own (shells, ssh, wrappers), which the signal does not
reach: stays as the parent of the command, adopts its orphans (child subreaper), kills all of them when the
proxy dies or the command ends, and ends the way the command did. SIGTERM and SIGINT are the command's to
handle: it is in the same process group.

Exit code 125: the command could not be started (the reason is on standard error). Standard library only,
no site packages: it starts in about 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CANNOT_START = 125


def main() -> int:
    """Run the mode given on the command line; only returns when nothing was executed."""
    mode, parent, argv = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if mode == "exec":
        _die_with(parent, signal.SIGKILL)
        return _execute(argv)
    return _watch(parent, argv)


def _prctl(option: int, value: int) -> None:
    rest = [ctypes.c_ulong(n) for n in (value, 0, 0, 0)]
    if ctypes.CDLL(None, use_errno=True).prctl(option, *rest) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _die_with(parent: int, number: int) -> None:
    if parent == 0:
        return
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(CANNOT_START)


def _execute(argv: list[str]) -> int:
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the whole point, and no shell
    except OSError as error:
        print(f"error: cannot execute {argv[0]}: {error.strerror}", file=sys.stderr)  # noqa: T201
    return CANNOT_START


def _watch(parent: int, argv: list[str]) -> int:
    # blocked, not handled: sigwait below takes them one at a time, so there is no handler to race with
    signals = {signal.SIGCHLD, signal.SIGUSR1}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _die_with(parent, signal.SIGUSR1)
    own = os.getpid()
    child = os.fork()
    if child == 0:
        for restored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(restored, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        _die_with(own, signal.SIGKILL)
        os._exit(_execute(argv))
    status = None
    while status is None and signal.sigwait(signals) == signal.SIGCHLD:
        status = _reap(child)
    _kill_descendants()
    if status is None:
        return CANNOT_START
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(own, -code)
    return code


def _reap(child: int) -> int | None:
    """Collect whatever ended; return the command's wait status once it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def _kill_descendants() -> None:
    """Kill and reap children until none is left: orphans of a killed child become ours."""
    while True:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    own = os.getpid()
    with open(f"/proc/{own}/task/{own}/children", encoding="ascii") as file:  # noqa: PTH123 - no pathlib at start
        return [int(pid) for pid in file.read().split()]


if __name__ == "__main__":
    sys.exit(main())
