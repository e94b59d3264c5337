"""One attempt to get a backend ready: take over what was left running, else wake its host and bring one up.

All failures are in words.
"""

import asyncio

from proxy import logs
from proxy.backends.bringup import Progress, Recipe, Running, bring_up
from proxy.backends.reach import reach
from proxy.backends.runrecord import RunRecord
from proxy.backends.takeover import take_over
from proxy.backends.views import Stage
from proxy.errors import ErrorCode, ProxyError

_log = logs.get("backends")


async def attempt(recipe: Recipe, progress: Progress, left: RunRecord | None) -> Running:
    """Return a ready backend within the model's `load_timeout_s`. Raises `ProxyError`, whatever went wrong."""
    limit = recipe.model.budgets.load_timeout_s
    try:
        async with asyncio.timeout(limit):
            running = await _taken_over(recipe, progress, left) if left is not None else None
            if running is None and recipe.host is not None:
                await recipe.host.ensure(recipe.name, asked=progress.asked, told=progress.waking)
            if running is not None:
                return running
            if recipe.model.url is not None or recipe.model.dns is not None:
                return await reach(recipe, progress)
            if recipe.room is None:
                return await bring_up(recipe, progress)
            async with recipe.room.reserved(recipe.name, progress.waiting):
                progress.stage = Stage.ENGINE
                return await bring_up(recipe, progress)
    except ProxyError:
        raise
    except TimeoutError:
        words = progress.process.tail.words() if progress.process else progress.waits_for
        raise ProxyError(
            ErrorCode.LOAD_TIMEOUT,
            f"model {recipe.name!r} was not ready within load_timeout_s = {limit:g} s"
            f" (stage {progress.stage.value}){': ' + words if words else ''}",
        ) from None
    except Exception as failed:
        _log.exception("load failed", model=recipe.name)
        text = f"model {recipe.name!r} could not be loaded: {failed}"
        raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, text) from failed


async def _taken_over(recipe: Recipe, progress: Progress, record: RunRecord) -> Running | None:
    try:
        running = await take_over(recipe, record, progress)
    except ProxyError as error:
        _log.warning("engine not taken over", model=recipe.name, pid=record.pid, error=error.message)
        progress.process, progress.port = None, None
        return None
    _log.info("engine taken over", model=recipe.name, pid=record.pid, port=record.port)
    return running
