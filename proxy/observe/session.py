"""One observation: samplers and log followers on one clock, until told to stop."""

import asyncio
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from proxy import __version__
from proxy.backends.client import EngineClient
from proxy.clock import Clock, monotonic
from proxy.observe.ask import Asker
from proxy.observe.logfile import LogFollower
from proxy.observe.records import End, Header, Record
from proxy.observe.sampler import Sampler
from proxy.observe.target import Target

TIMEOUT_S: Final = 2.0
INTERVAL_S: Final = 0.25
MIN_INTERVAL_S: Final = 0.02


def begin(targets: Sequence[Target], logs: Sequence[Path], interval_s: float) -> Header:
    """Return the header of an observation that begins now."""
    return Header(
        started_s=monotonic(),
        started_unix_s=time.time(),
        interval_s=interval_s,
        servers=tuple(target.name for target in targets),
        logs=tuple(str(path) for path in logs),
        llama_proxy=__version__,
        python=platform.python_version(),
    )


async def observe(
    header: Header,
    targets: Sequence[Target],
    logs: Sequence[Path],
    emit: Callable[[Record], None],
    stop: asyncio.Event,
    *,
    api_key: str = "",
    counters: bool = True,
    for_s: float | None = None,
    timeout_s: float = TIMEOUT_S,
    clock: Clock = monotonic,
) -> None:
    """Observe until `stop` is set or `for_s` seconds are over; tell `emit` every record but the header, `End` last.

    What `emit` raises ends the observation and passes through. No task and no connection is left behind.
    """
    async with AsyncExitStack() as stack:
        work: list[asyncio.Task[None]] = []
        for server, target in enumerate(targets):
            client = EngineClient(target.base, api_key)
            stack.push_async_callback(client.close, "the observation ended")
            sampler = Sampler(
                server,
                Asker(target, client, clock, timeout_s),
                clock=clock,
                started_s=header.started_s,
                interval_s=header.interval_s,
                # behind a proxy `/metrics` is the proxy's own
                counters=counters and target.model is None,
                emit=emit,
            )
            work.append(asyncio.create_task(sampler.run(), name=f"sample:{target.name}"))
        for log, path in enumerate(logs):
            follower = LogFollower(log, path, clock, emit)
            work.append(
                asyncio.create_task(follower.run(min(header.interval_s, INTERVAL_S)), name=f"log:{path}")
            )
        stack.push_async_callback(_end, work)
        stopped = asyncio.create_task(stop.wait(), name="stop")
        stack.push_async_callback(_end, [stopped])
        done, _ = await asyncio.wait((stopped, *work), timeout=for_s, return_when=asyncio.FIRST_COMPLETED)
        await _end(work)
        for task in done:
            # nothing but `stop` ends by itself: this raises what went wrong
            task.result()
        emit(End(clock(), "stopped" if stopped in done else "time"))


async def _end(tasks: Sequence[asyncio.Task[None]] | Sequence[asyncio.Task[bool]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
