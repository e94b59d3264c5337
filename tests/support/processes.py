"""Processes as tests look at them: any of them may end while it is looked at.

The kernel's answer for a process that goes in that moment is empty, which psutil reports as an `IndexError`; its look
at all processes fails so for one that has nothing to do with the test.
"""

import contextlib
from collections.abc import Iterable

import psutil

GONE = (psutil.NoSuchProcess, IndexError)
TRIES = 50
END_S = 10.0


def alive(process: int | psutil.Process) -> bool:
    """Whether there is such a process, and it is more than an entry in a table."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return bool(found.is_running() and found.status() != psutil.STATUS_ZOMBIE)
    except GONE:
        return False


def status(pid: int) -> str:
    """Return what the kernel says of a process, `dead` when there is none."""
    try:
        return str(psutil.Process(pid).status())
    except GONE:
        return str(psutil.STATUS_DEAD)


def name(process: psutil.Process) -> str:
    """Return the program's name, empty when the process is gone."""
    try:
        return str(process.name())
    except GONE:
        return ""


def below(pid: int, *, unreaped: bool = False) -> list[psutil.Process]:
    """Return the living descendants (and with `unreaped` the zombies), none when there is no such process."""
    for _ in range(TRIES):
        try:
            found = psutil.Process(pid).children(recursive=True)
            return [one for one in found if unreaped or alive(one)]
        except psutil.NoSuchProcess:
            return []
        except IndexError:
            continue
    raise AssertionError(f"no whole look at all processes within {TRIES} tries")


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill those that are still there, and wait until they are gone."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(*GONE):
            process.kill()
    with contextlib.suppress(IndexError):
        psutil.wait_procs(processes, END_S)
