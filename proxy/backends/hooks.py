"""Hands and eyes for hosts: runs a hook's command with a deadline, sends a Wake-on-LAN packet, probes."""

import asyncio
import contextlib
import os
import shlex
import socket
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from proxy.backends.client import EngineClient, ProbeError
from proxy.backends.command import Command
from proxy.backends.logtail import LogTail
from proxy.backends.process import EngineProcess, describe_exit

PROBE_S: Final = 2.0
TAIL_BYTES: Final = 4096
_OURS: Final = "LLAMA_PROXY_"
"""Our own settings may hold keys: they are not inherited."""


@dataclass(frozen=True, slots=True)
class HookEnd:
    """How a command ended: empty `trouble` is success; `tail` is the end of what it printed."""

    trouble: str = ""
    tail: str = ""

    @property
    def words(self) -> str:
        """What went wrong, with the command's own last words."""
        return f"{self.trouble}: {self.tail}" if self.tail else self.trouble


async def run(line: str, timeout_s: float) -> HookEnd:
    """Run a command, no shell; ended with everything it started at the deadline, on a cancel, and with the proxy."""
    argv = tuple(shlex.split(line))
    env = {key: value for key, value in os.environ.items() if not key.startswith(_OURS)}
    tail = LogTail(TAIL_BYTES)
    try:
        process = await EngineProcess.start(Command(argv, env), watch=True, tail=tail)
    except OSError as error:
        return HookEnd(f"{argv[0]} could not be started: {error.strerror}")
    trouble = ""
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.exited()
        trouble = "" if code == 0 else f"{argv[0]} {describe_exit(code)}"
    except TimeoutError:
        trouble = f"{argv[0]} did not end within {timeout_s:g} s and was killed"
    finally:
        await process.kill()
    return HookEnd(trouble, tail.words())


def magic_packet(mac: str) -> bytes:
    """Return a Wake-on-LAN packet: six bytes of ones, then the address sixteen times."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "")) * 16


def send_packet(mac: str, broadcast: str, port: int) -> None:
    """Send it. Raises `OSError`, for example without a route to the broadcast address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        out.sendto(magic_packet(mac), (broadcast, port))


async def answers(probe: str) -> bool:
    """Ask once, within `PROBE_S`: `host:port` takes a connection, a URL answers 200. Never raises."""
    if "://" in probe:
        return await _url_answers(probe)
    parts = urlsplit(f"//{probe}")
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def _url_answers(url: str) -> bool:
    parts = urlsplit(url)
    client = EngineClient(f"{parts.scheme}://{parts.netloc}", "")
    try:
        return (await client.get(parts.path or "/", PROBE_S)).status == 200
    except ProbeError:
        return False
    finally:
        await client.close()
