"""One attempt to get a backend ready: take over what was left running, else wake its host and bring one up.

All failures are in words. When it raises, nothing runs that it had started or was to take over; when it is cancelled,
only a process of an earlier proxy that was not claimed yet is left to whoever cancelled it.
"""

import asyncio

from proxy import logs
from proxy.backends.bringup import Progress, Recipe, Running, bring_up
from proxy.backends.live import end
from proxy.backends.reach import reach
from proxy.backends.room import Room
from proxy.backends.runrecord import RunRecord
from proxy.backends.takeover import take_over
from proxy.backends.views import Stage
from proxy.errors import ErrorCode, ProxyError

_log = logs.get("backends")


async def attempt(recipe: Recipe, progress: Progress, left: RunRecord | None) -> Running:
    """Return a ready backend within the model's `load_timeout_s`. Raises `ProxyError`, whatever went wrong."""
    limit = asyncio.timeout(recipe.model.budgets.load_timeout_s)
    try:
        async with limit:
            running = await _taken_over(recipe, progress, left) if left is not None else None
            if running is None and recipe.host is not None:
                await recipe.host.ensure(recipe.name, asked=progress.asked, told=progress.waking)
            if running is not None:
                return running
            if recipe.model.url is not None or recipe.model.dns is not None:
                return await reach(recipe, progress)
            if recipe.room is None:
                return await bring_up(recipe, progress)
            return await _in_room(recipe, recipe.room, progress, limit)
    except ProxyError:
        raise
    except Exception as failed:
        try:
            await recipe.runs.reap_unclaimed(left)
        except Exception:
            # its record stays: a reconcile finds it
            _log.exception("a process of an earlier proxy was not ended", model=recipe.name)
        if limit.expired():
            raise _late(recipe, progress) from None
        # a system call's own ETIMEDOUT is a `TimeoutError`, too
        _log.exception("load failed", model=recipe.name)
        text = f"model {recipe.name!r} could not be loaded: {failed}"
        raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, text) from failed


async def _in_room(recipe: Recipe, room: Room, progress: Progress, limit: asyncio.Timeout) -> Running:
    """Bring a process up when there is room for it."""
    running: Running | None = None
    try:
        async with room.reserved(recipe.name, progress.waiting):
            progress.stage = Stage.ENGINE
            running = await bring_up(recipe, progress)
            # it is ready in time: what is measured now is no part of the load
            limit.reschedule(None)
    except BaseException:
        if running is not None:
            await running.client.close()
            await end(recipe, running, 0)
        raise
    return running


async def _taken_over(recipe: Recipe, progress: Progress, record: RunRecord) -> Running | None:
    try:
        running = await take_over(recipe, record, progress)
    except ProxyError as error:
        _log.warning("engine not taken over", model=recipe.name, pid=record.pid, error=error.message)
        progress.process, progress.port = None, None
        # nobody would look at it again
        await recipe.runs.reap_unclaimed(record)
        return None
    _log.info("engine taken over", model=recipe.name, pid=record.pid, port=record.port)
    return running


def _late(recipe: Recipe, progress: Progress) -> ProxyError:
    words = progress.process.tail.words() if progress.process else progress.waits_for
    return ProxyError(
        ErrorCode.LOAD_TIMEOUT,
        f"model {recipe.name!r} was not ready within load_timeout_s = {recipe.model.budgets.load_timeout_s or 0:g} s"
        f" (stage {progress.stage.value}){': ' + words if words else ''}",
    )
