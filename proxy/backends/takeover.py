"""Takes over an engine that an earlier proxy left running, after checking that it is that one and still good.

As `bringup`: when it raises or is cancelled, no process and no connection is left, except that one that was not
claimed yet is the caller's to end (its record is still known then).
"""

import asyncio
from pathlib import Path
from typing import Final

from proxy.backends.bringup import Progress, Recipe, Running, ask_props, failed, or_exit, until_healthy
from proxy.backends.client import EngineClient
from proxy.backends.command import HOST, EngineBinary
from proxy.backends.listening import Owner, owner
from proxy.backends.logtail import LogTail
from proxy.backends.process import EngineProcess
from proxy.backends.runrecord import RunRecord
from proxy.backends.runs import claim
from proxy.backends.views import Stage

ANSWER_S: Final = 10.0
"""How long an engine that was left running may take to answer its new proxy."""


async def take_over(recipe: Recipe, record: RunRecord, progress: Progress) -> Running:
    """Return the backend of the recorded process, checked anew. Raises `ProxyError`.

    Record, process and configuration agree already; here the executable must be the model's engine, and it must
    answer within `ANSWER_S` with the recorded key, port and build, and pass the identity check. Else it is ended.
    """
    engine = await recipe.resolve(recipe.model) if recipe.needs_engine else None
    pidfd = claim(record)
    if pidfd is None:
        raise failed(recipe, f"process {record.pid} is not the engine that was left running")
    tail = LogTail(secret=record.api_key, feed=recipe.feed)
    process = EngineProcess.adopt(record.pid, pidfd, tail, Path(record.output))
    client = EngineClient(f"http://{HOST}:{record.port}", record.api_key)
    try:
        progress.started(process)
        progress.port = record.port
        return await _checked(recipe, record, progress, process, client, engine)
    except BaseException as error:
        await client.close()
        if not (await process.stop(recipe.model.stop.grace_s)).left:
            recipe.runs.forget(record)
        if isinstance(error, TimeoutError):
            raise failed(recipe, f"it did not answer within {ANSWER_S:g} s") from None
        raise


async def _checked(
    recipe: Recipe,
    record: RunRecord,
    progress: Progress,
    process: EngineProcess,
    client: EngineClient,
    engine: EngineBinary | None,
) -> Running:
    is_cmd = recipe.model.cmd is not None
    if not is_cmd and engine is not None and record.exe != _file(engine.path):
        raise failed(recipe, f"it runs another file than {engine.path}")
    if owner(record.port, record.pid) is Owner.OTHER:
        raise failed(recipe, f"another program listens on its port {record.port}")
    async with asyncio.timeout(ANSWER_S):
        await or_exit(recipe, process, until_healthy(client))
    identity = ""
    if recipe.verify is not None and engine is not None and engine.dir is not None and not is_cmd:
        progress.stage = Stage.VERIFYING
        identity = await or_exit(recipe, process, recipe.verify(process.pid, engine.dir))
    progress.stage = Stage.PROBING
    info = await or_exit(recipe, process, ask_props(recipe, client))
    if info.build != record.build:
        raise failed(recipe, f"it says it is {info.build}, not {record.build}")
    return Running(client, info, process, record.port, identity, record)


def _file(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
