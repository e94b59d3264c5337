"""Brings one process up: start, find its port, wait for health against exit, verify, ask what it is.

Cleans up after itself: when it raises or is cancelled, no process and no connection is left.
"""

import asyncio
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from proxy.backends import probes
from proxy.backends.client import EngineClient, ProbeError
from proxy.backends.command import HOST, EngineBinary, build, needs_engine
from proxy.backends.hostkeeper import HostKeeper
from proxy.backends.listening import Owner, Reservation, own_port, owner
from proxy.backends.logfeed import LogFeed
from proxy.backends.logtail import LogTail
from proxy.backends.names import Lookup, Resolver
from proxy.backends.process import EngineProcess, describe_exit
from proxy.backends.room import Room
from proxy.backends.runrecord import TOKEN_VARIABLE, RunRecord, recipe_of
from proxy.backends.runs import RunStore
from proxy.backends.slotcache import SlotCache
from proxy.backends.views import EngineResolver, Stage, Verify
from proxy.errors import ErrorCode, ProxyError
from proxy.settings import Engine, Model
from proxy.state import StateDir
from proxy.types import BackendKey, EngineInfo

_T = TypeVar("_T")
PORT_TRIES: Final = 5
FIRST_PROBE_S: Final = 0.02
SLOWEST_PROBE_S: Final = 0.25
_PROPS_TIMEOUT_S: Final = 5.0
_BIND_FAILED: Final = re.compile(r"couldn't bind|address already in use|EADDRINUSE|bind.*fail", re.IGNORECASE)


class _PortTaken(Exception):  # noqa: N818
    """A stranger listens on the port that was meant for the engine."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything a start needs that does not change between generations."""

    name: str
    model: Model
    defaults: Engine
    resolve: EngineResolver
    verify: Verify | None = None
    runs: RunStore = field(default_factory=lambda: RunStore(StateDir.open(None)))
    feed: LogFeed = field(default_factory=LogFeed)
    room: Room | None = None
    slots: SlotCache | None = None
    host: HostKeeper | None = None
    lookup: Lookup = field(default_factory=Resolver)
    granted: Callable[[BackendKey], int] = lambda _key: 0
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    @property
    def keep(self) -> bool:
        """Whether the process may outlive the proxy: wanted, and there is a place to remember it."""
        return self.model.on_proxy_exit == "keep" and self.runs.kept

    @property
    def needs_engine(self) -> bool:
        """Whether a start needs a llama-server of ours."""
        return needs_engine(self.model, self.defaults)

    @property
    def fingerprint(self) -> str:
        """Tells whether the configuration that shapes the process is still the same."""
        return recipe_of(self.model, self.defaults)


@dataclass(frozen=True, slots=True)
class Running:
    """A backend that answers. `process` and `run` are None for a remote one; `address` is that of one behind a name."""

    client: EngineClient
    info: EngineInfo
    process: EngineProcess | None = None
    port: int | None = None
    identity: str = ""
    run: RunRecord | None = None
    address: str = ""


@dataclass(slots=True)
class Progress:
    """What is known while a load is under way."""

    stage: Stage = Stage.ENGINE
    process: EngineProcess | None = None
    port: int | None = None
    on_started: Callable[[], None] = lambda: None
    waits_for: str = ""
    asked: bool = True
    """Whether somebody asked for this load; a restart after a crash is nobody's."""

    def waking(self, words: str) -> None:
        """Note what the load waits for before its host can be used."""
        self.stage, self.waits_for = Stage.WAKING, words

    def waiting(self, words: str) -> None:
        """Note what the load waits for before anything is started."""
        self.stage, self.waits_for = Stage.MEMORY, words

    def started(self, process: EngineProcess | None) -> None:
        """Note that the process runs (tells the state machine once)."""
        self.process, self.stage = process, Stage.LOADING
        tell, self.on_started = self.on_started, lambda: None
        tell()


async def bring_up(recipe: Recipe, progress: Progress) -> Running:
    """Return a process of ours that is healthy, verified and known. Raises `ProxyError`."""
    engine = await recipe.resolve(recipe.model) if recipe.needs_engine else None
    for _ in range(PORT_TRIES):
        try:
            return await _run(recipe, engine, progress)
        except _PortTaken:
            continue
    raise ProxyError(
        ErrorCode.MODEL_LOAD_FAILED,
        f"model {recipe.name!r}: {PORT_TRIES} ports in a row were taken by other programs",
    )


async def _run(recipe: Recipe, engine: EngineBinary | None, progress: Progress) -> Running:
    model, progress.stage = recipe.model, Stage.STARTING
    is_cmd = model.cmd is not None
    given = model.upstream_key if is_cmd else None
    key = given.get_secret_value() if given else secrets.token_urlsafe(32)
    reservation = Reservation() if is_cmd else None
    process: EngineProcess | None = None
    client: EngineClient | None = None
    runs, keep = recipe.runs, recipe.runs.output(recipe.name) if recipe.keep else None
    files = await recipe.slots.files() if recipe.slots else ""
    run = await runs.intend(
        recipe.name, keep=keep is not None, recipe=recipe.fingerprint, api_key=key, output=keep, files=files
    )
    try:
        command = build(
            recipe.name,
            model,
            recipe.defaults,
            engine=engine,
            port=reservation.port if reservation else 0,
            key=key,
            cores=recipe.cores,
            inherited=recipe.inherited,
            slots=recipe.slots.folder() if recipe.slots else None,
        )
        command = replace(command, env={**command.env, TOKEN_VARIABLE: run.token})
        keep = keep if run.keep else None
        tail = LogTail(secret=key, feed=recipe.feed)
        try:
            process = await EngineProcess.start(command, watch=is_cmd, tail=tail, keep=keep)
        except OSError as error:
            raise failed(recipe, f"cannot start {command.argv[0]}: {error.strerror}") from None
        progress.started(process)
        run = await runs.started(run, process.pid)
        port = await or_exit(recipe, process, _port(process, reservation))
        progress.port = port
        client = EngineClient(f"http://{HOST}:{port}", key)
        await or_exit(recipe, process, until_healthy(client))
        if is_cmd:
            _not_a_stranger(port, process)
        identity = ""
        if recipe.verify is not None and engine is not None and engine.dir is not None and not is_cmd:
            progress.stage = Stage.VERIFYING
            identity = await or_exit(recipe, process, recipe.verify(process.pid, engine.dir))
        progress.stage = Stage.PROBING
        info = await or_exit(recipe, process, ask_props(recipe, client))
        if recipe.slots is not None:
            await or_exit(recipe, process, recipe.slots.restore(client, info, files))
        run = await runs.ready(run, port=port, build=info.build)
        return Running(client, info, process, port, identity, run)
    except BaseException:
        if client is not None:
            await client.close()
        if process is None or not (await process.kill()).left:
            runs.forget(run)
        raise
    finally:
        if reservation is not None:
            reservation.close()


def _not_a_stranger(port: int, process: EngineProcess) -> None:
    if owner(port, process.pid) is Owner.OTHER:
        raise _PortTaken


async def or_exit(recipe: Recipe, process: EngineProcess, work: Awaitable[_T]) -> _T:
    """Await `work`, unless the process ends first: then fail with its own words."""
    name = f"load:{recipe.name}:{process.pid}"
    doing = asyncio.ensure_future(work)
    ending = asyncio.create_task(process.exited(), name=f"{name}:exit")
    try:
        await asyncio.wait((doing, ending), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            words = process.tail.words()
            if recipe.model.cmd is not None and _BIND_FAILED.search(words):
                raise _PortTaken
            raise failed(
                recipe, f"llama-server {describe_exit(ending.result())}: {words or 'without a word'}"
            )
        return doing.result()
    finally:
        for task in (doing, ending):
            task.cancel()
        await asyncio.wait((doing, ending))
        if not doing.cancelled():
            doing.exception()


async def _port(process: EngineProcess, reservation: Reservation | None) -> int:
    if reservation is not None:
        return reservation.port
    delay = FIRST_PROBE_S
    while True:
        port = own_port(process.pid)
        if port is not None:
            return port
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, SLOWEST_PROBE_S)


async def until_healthy(client: EngineClient) -> None:
    """Wait until the engine says that it serves; give it a deadline."""
    delay = FIRST_PROBE_S
    while await probes.health(client) is not probes.Health.OK:
        await asyncio.sleep(delay)
        delay = min(delay * 1.5, SLOWEST_PROBE_S)


async def ask_props(recipe: Recipe, client: EngineClient) -> EngineInfo:
    """Ask a healthy engine what it is. Raises `ProxyError`."""
    try:
        return await probes.props(client, _PROPS_TIMEOUT_S)
    except ProbeError as error:
        raise failed(recipe, f"the engine is healthy but {error}") from None


def failed(recipe: Recipe, what: str) -> ProxyError:
    """Return the error of a load that cannot be."""
    return ProxyError(ErrorCode.MODEL_LOAD_FAILED, f"model {recipe.name!r} could not be loaded: {what}")
