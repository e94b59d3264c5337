"""Where an engine listens, without a race for the port.

`path` models: llama-server is started with `--port 0`, so the kernel picks a free port in the very call that
binds it; nobody can come in between. Which one it was is read from the child's own sockets, which at the same
time proves that the listener is our child and not a stranger: the engine writes its port into its log only
after the model is loaded, far too late to watch the loading.

`cmd` models need `${PORT}` before they start. `Reservation` binds a port with SO_REUSEADDR and does not listen:
while it is held the kernel gives that port to nobody who asks for "any", nor to outgoing connections, but a
program that binds it by number with SO_REUSEADDR (cpp-httplib, OpenSSH, Go, asyncio all do) can listen on it.
What remains is a program that insists on just this number: the engine's bind then fails and the load is tried
again on another port, and `Owner` tells a stranger who got there first from our own process.
"""

import socket
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import psutil

from proxy.backends.command import HOST

GONE: Final = (psutil.NoSuchProcess, IndexError)
"""What psutil raises for a process that is gone; the second when it goes while its `stat` is read, which is then empty."""
BLIND: Final = (psutil.Error, OSError)
"""Raised when `/proc` cannot be read: out of file descriptors, or hidden from this user. Stopping must go on without."""


class Owner(StrEnum):
    """Who listens on a port, as far as this user may see."""

    OURS = "ours"
    OTHER = "other"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP socket of a process."""

    pid: int
    host: str
    port: int


class Reservation:
    """A local port kept free for a process that is about to listen on it."""

    def __init__(self, host: str = HOST) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, 0))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port up. Idempotent."""
        self._socket.close()


def listeners(pid: int) -> tuple[Listener, ...]:
    """Return the listening TCP sockets of a process, none when it is gone or not ours to see."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except (*GONE, psutil.AccessDenied):
        return ()
    return tuple(
        Listener(pid, conn.laddr.ip, conn.laddr.port)
        for conn in found
        if conn.status == psutil.CONN_LISTEN and conn.laddr
    )


def own_port(pid: int, host: str = HOST) -> int | None:
    """Return the port on which the process listens at `host`, None when it does not (yet)."""
    return next((found.port for found in listeners(pid) if found.host == host), None)


def owner(port: int, pid: int) -> Owner:
    """Tell whether `pid` or one of its descendants listens on a local port.

    `OTHER` also means a listener that this user may not look into (another user's, a container's).
    """
    family = [pid, *descendants(pid)]
    if any(found.port == port for member in family for found in listeners(member)):
        return Owner.OURS
    try:
        taken = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return Owner.NOBODY
    listening = any(c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port for c in taken)
    return Owner.OTHER if listening else Owner.NOBODY


def descendants(pid: int) -> list[int]:
    """Return the process ids below `pid`, none when it is gone or they cannot be seen."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except IndexError:
        # somebody else's process ended under the look at all of them: look at each by itself
        return _below(pid)
    except BLIND:
        return []


def _all() -> list[int]:
    try:
        return psutil.pids()
    except BLIND:
        return []


def _below(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for one in _all():
        with suppress(*GONE, *BLIND):
            children.setdefault(psutil.Process(one).ppid(), []).append(one)
    found, ask = [], [pid]
    while ask:
        below = children.pop(ask.pop(), [])
        found += below
        ask += below
    return found
