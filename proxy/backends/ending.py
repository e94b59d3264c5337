"""How the backend of one model goes: what served is put down, what was loading is given up, what is kept is let go of.

Sockets are closed first: llama-server does not end while a client stays connected to it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from proxy import logs
from proxy.backends.bringup import Progress, Recipe, Running
from proxy.backends.live import end
from proxy.backends.process import EngineProcess, StopReport
from proxy.backends.runrecord import RunRecord
from proxy.backends.serving import Serving
from proxy.errors import ProxyError

_log = logs.get("backends")


@dataclass(frozen=True, slots=True)
class Remains:
    """What a stop finds: a backend that served, or an attempt to load and how far it is.

    `left` is the record of a process of an earlier proxy that may not have been taken over yet.
    """

    live: Serving | None
    trying: "asyncio.Task[Running | None] | None"
    progress: Progress | None
    left: RunRecord | None

    @property
    def process(self) -> EngineProcess | None:
        """The process, where there is one."""
        if self.live is not None:
            return self.live.running.process
        return self.progress.process if self.progress is not None else None


async def end_all(
    recipe: Recipe, there: Remains, error: ProxyError, *, grace_s: Callable[[], float], shutdown: bool
) -> StopReport | None:
    """End what is there; `error` is for whoever still has a connection. Never raises: the report says what is left.

    `shutdown` leaves a kept backend running. `grace_s` is asked when it is needed: it may have been shortened.
    """
    try:
        if there.live is not None:
            return await _put_down(recipe, there.live, error, grace_s, shutdown=shutdown)
        report = None
        if there.trying is not None:
            report = await _give_up(recipe, there.trying, there.progress, error)
        left = await recipe.runs.reap_unclaimed(there.left)
        return report if left is None else StopReport(None, (), left)
    except Exception:
        # whatever it was: a model that stays in `stopping` could never be loaded or unloaded again
        process = there.process
        left = (process.pid,) if process is not None and process.code is None else ()
        _log.exception("a stop failed", model=recipe.name, left=left)
        return StopReport(None, (), left)


def both(report: StopReport | None, before: "asyncio.Task[StopReport | None]") -> StopReport | None:
    """Return a stop's report with what an earlier one, which it waited for, had to leave."""
    earlier = None if before.cancelled() or before.exception() else before.result()
    if earlier is None or not earlier.left:
        return report
    return replace(report or StopReport(None, ()), left=(*(report.left if report else ()), *earlier.left))


async def reported(stopper: "asyncio.Task[StopReport | None] | None") -> StopReport:
    """Wait for the end of a stop, whoever else waits for it as well."""
    report = None if stopper is None else await asyncio.shield(stopper)
    return report or StopReport(None, ())


async def _put_down(
    recipe: Recipe, live: Serving, error: ProxyError, grace_s: Callable[[], float], *, shutdown: bool
) -> StopReport | None:
    """End a backend that served, or let go of one that is kept."""
    try:
        await live.let_go(error)
    except Exception:
        # it is the process that matters
        _log.exception("connections were not closed", model=recipe.name)
    if shutdown and live.kept:
        await live.detach()
        return None
    return await end(recipe, live.running, grace_s())


async def _give_up(
    recipe: Recipe, trying: "asyncio.Task[Running | None]", progress: Progress | None, error: ProxyError
) -> StopReport | None:
    """End an attempt to load, and whatever it had started."""
    trying.cancel()
    await asyncio.wait((trying,))
    late = None if trying.cancelled() or trying.exception() else trying.result()
    if late is not None:
        await late.client.close(error.message)
        return await end(recipe, late, 0)
    if progress is not None and progress.process is not None:
        return await progress.process.kill()
    return None
