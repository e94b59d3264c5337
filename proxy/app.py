"""Composition: the only place that knows admission, backends, engine and the HTTP surface together."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from proxy import __version__, logs
from proxy.admission import Admission
from proxy.backends import EngineBinary, Fleet
from proxy.catalog import Catalog
from proxy.clock import Clock, monotonic
from proxy.engine import EngineToolError, HashCache, verify_process
from proxy.errors import ErrorCode, ProxyError
from proxy.http.ports import HttpContext
from proxy.http.routes import make_http
from proxy.http.server import ProxyRunner
from proxy.metrics import Metrics
from proxy.settings import Model, Settings
from proxy.types import BackendKey, Cause, EngineInfo, ModelState, PhasePolicy, Snapshot, TicketState

STOP_MARGIN_S: Final = 3.0
"""After the drain deadline: time for error events to reach their clients before sockets close."""
PROBE_TIMEOUT_S: Final = 10.0

_log = logs.get("app")


class Engines:
    """Finds the llama-server of a model, and whether it carries our patch.

    `default` serves every model that names no engine of its own. What a binary says of itself
    (`--help`) is asked once per file.
    """

    def __init__(self, settings: Settings, default: EngineBinary | None) -> None:
        self._default = default
        self._settings = settings
        self._known: dict[Path, EngineBinary] = {}

    async def __call__(self, model: Model) -> EngineBinary:
        """Return the engine of `model`; `ProxyError` (`model_load_failed`) when there is none."""
        if model.engine is not None:
            return await self._named(model.engine, "engine")
        if self._settings.engine.dir != "auto":
            return await self._named(self._settings.engine.dir, "engine.dir")
        if self._default is None:
            text = "no engine: run `llama-proxy engine build`, or set engine.dir to a llama-server"
            raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, text)
        return self._default

    async def _named(self, text: str, field: str) -> EngineBinary:
        server = server_at(text)
        if server is None:
            raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, f"{field}: there is no llama-server at {text}")
        if server not in self._known:
            self._known[server] = await inspect_engine(server)
        return self._known[server]


def server_at(text: str) -> Path | None:
    """Return the llama-server that a file or folder name stands for, None where there is none."""
    path = Path(text).expanduser()
    places = (path, path / "llama-server", path / "bin" / "llama-server")
    return next((place for place in places if place.is_file() and os.access(place, os.X_OK)), None)


async def inspect_engine(server: Path) -> EngineBinary:
    """Ask a llama-server which flags it knows; `ProxyError` with its own words when it does not run."""
    try:
        process = await asyncio.create_subprocess_exec(
            str(server), "--help", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, f"{server} cannot be run: {error.strerror}") from None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            out, _ = await process.communicate()
    except TimeoutError:
        raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, f"{server} --help does not answer") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        words = out.decode(errors="replace").strip()[-300:]
        raise ProxyError(
            ErrorCode.MODEL_LOAD_FAILED, f"{server} --help ended with {process.returncode}: {words}"
        )
    manifest = server.parent if (server.parent / "manifest.json").is_file() else None
    return EngineBinary(path=server, patched=b"--phase-policy" in out, dir=manifest)


class IdentityCheck:
    """Checks a started process against its engine's manifest, off the event loop."""

    def __init__(self) -> None:
        self._hashes = HashCache()

    async def __call__(self, pid: int, folder: Path) -> str:
        """Return `verified`; `ProxyError` (`identity_mismatch`) naming file and identities otherwise."""
        try:
            wrong = await asyncio.to_thread(partial(verify_process, pid, folder, cache=self._hashes))
        except EngineToolError as error:
            raise ProxyError(ErrorCode.IDENTITY_MISMATCH, error.message) from None
        if wrong:
            raise ProxyError(ErrorCode.IDENTITY_MISMATCH, "; ".join(str(item) for item in wrong[:3]))
        return "verified"


class Proxy:
    """One running proxy: the parts, wired. Events of backends go to admission and metrics from here."""

    def __init__(
        self,
        settings: Settings,
        engines: Engines,
        *,
        clock: Clock = monotonic,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        self.catalog = Catalog(settings.models)
        self.stopping = False
        self.fleet = Fleet(
            settings,
            self.catalog,
            self.metrics,
            clock,
            engine_resolver=engines,
            observer=_Observer(self),
            verify=IdentityCheck(),
        )
        self.admission = Admission(settings, self.metrics, _World(self), clock=clock)
        self.metrics.build_info.labels(__version__, "", "").set(1)

    def http(self) -> web.Application:
        """Return the HTTP application over these parts."""
        context = HttpContext(
            settings=self.settings,
            catalog=self.catalog,
            metrics=self.metrics,
            admission=self.admission,
            upstream=self.fleet.upstream,
            models=_Models(self),
            clock=self.clock,
        )
        return make_http(context)

    @property
    def live(self) -> int:
        """Number of requests that hold or want something."""
        return len(self.admission.tickets())

    @property
    def running(self) -> int:
        """Number of requests an engine works for."""
        idle = {TicketState.QUEUED, TicketState.CANCELLING, TicketState.DONE}
        return sum(1 for ticket in self.admission.tickets() if ticket.state not in idle)


class _World:
    """What admission asks of backends."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def request_load(self, model: str) -> None:
        self._proxy.fleet.request_load(model, Cause.REQUEST)

    def poke(self, key: BackendKey) -> None:
        self._proxy.fleet.poke(key)


class _Observer:
    """What backends tell."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def on_state(self, model: str, before: ModelState, after: ModelState, cause: Cause) -> None:
        """State metrics and the log line are the fleet's own; nothing to add."""

    def on_ready(self, key: BackendKey, info: EngineInfo) -> None:
        # one series per build that served; the one without an engine goes with the first
        with contextlib.suppress(KeyError):
            self._proxy.metrics.build_info.remove(__version__, "", "")
        self._proxy.metrics.build_info.labels(__version__, info.build, info.series).set(1)
        if info.policy is PhasePolicy.UNKNOWN:
            _log.warning(
                "engine without phases",
                model=key.model,
                hint="this llama-server lacks the patch: prompts and answers share batches, phases are unknown",
            )
        self._proxy.admission.backend_ready(key, info)

    def on_down(self, key: BackendKey, error: ProxyError) -> None:
        self._proxy.admission.backend_down(key, error)

    def on_load_failed(self, model: str, error: ProxyError) -> None:
        self._proxy.admission.load_failed(model, error)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._proxy.admission.snapshot(snapshot)


class _Models:
    """Read-only views of models for the HTTP surface, as JSON values."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def state(self, model: str) -> ModelState:
        return self._proxy.fleet.status(model).state

    def meta(self, model: str) -> Mapping[str, Any]:
        status = self._proxy.fleet.status(model)
        info = status.info
        return {
            "state": status.state.value,
            "description": self._proxy.catalog.model(model).description,
            "aliases": list(self._proxy.catalog.model(model).aliases),
            "n_ctx": info.context_tokens if info else None,
            "n_slots": info.slots if info else None,
        }

    def describe(self, model: str) -> Mapping[str, Any]:
        proxy = self._proxy
        status, view = proxy.fleet.status(model), proxy.admission.view(model)
        snapshot, info = proxy.fleet.snapshot(model), status.info
        now = proxy.clock()
        return {
            "id": model,
            **self.meta(model),
            "admin": view.gate.value,
            "backend": {
                "kind": status.kind.value,
                "generation": status.generation,
                "pid": status.pid,
                "port": status.port,
                "since_s": round(now - status.since, 3),
                "stage": status.stage.value if status.stage else None,
                "cause": status.cause.value,
                "identity": status.identity,
                "build": info.build if info else "",
                "series": info.series if info else "",
                "policy": info.policy.value if info else None,
                "last_error": status.last_error or None,
                "log_tail": list(proxy.fleet.log_tail(model, 20)) if status.last_error else [],
            },
            "engine": {
                "phase": snapshot.phase.value,
                "cohort": snapshot.cohort,
                "age_s": round(now - snapshot.taken_at, 3),
                "slots": [
                    {
                        "id": slot.id,
                        "busy": slot.busy,
                        "member": slot.member.value,
                        "request": slot.tag or None,
                        "held_tokens": slot.held_tokens,
                        "prompt_tokens": slot.prompt_tokens,
                        "decoded_tokens": slot.decoded_tokens,
                    }
                    for slot in snapshot.slots
                ],
            }
            if snapshot
            else None,
            "admission": {
                "gate": {"state": view.gate.value, "reason": view.gate_reason, "mode": view.gate_mode},
                "queued": view.queued,
                "running": view.running,
                "cancelling": view.cancelling,
                "queued_bytes": view.queued_bytes,
                "oldest_s": round(view.oldest_s, 3),
                "charged": view.charged,
                "slots": view.slots,
                "free": view.free,
                "reasons": {reason.value: count for reason, count in view.reasons.items()},
                "states": {state.value: count for state, count in view.states.items()},
            },
        }

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        states = {name: self.state(name).value for name in self._proxy.catalog.ids()}
        ready = not self._proxy.stopping and bool(states)
        return ready, {"ready": ready, "stopping": self._proxy.stopping, "models": states}


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the proxy answers."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


async def serve(settings: Settings, engines: Engines, told: Callable[[Listening], None]) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain until `shutdown_drain_s` and stop.

    A second signal cuts: what runs ends at once, engines are killed. Later ones change nothing.
    """
    stop, cut = asyncio.Event(), asyncio.Event()
    with _signals(stop, cut):
        async with _listening(settings, engines, cut) as (proxy, site, where):
            told(where)
            _log.info("listening", url=where.url, models=_listed(settings), version=__version__)
            await stop.wait()
            await _wind_down(proxy, site, cut)
        _log.info("stopped")


@contextlib.asynccontextmanager
async def _listening(
    settings: Settings, engines: Engines, cut: asyncio.Event
) -> AsyncIterator[tuple[Proxy, web.TCPSite, Listening]]:
    proxy = Proxy(settings, engines)
    runner = ProxyRunner(proxy.http(), settings)
    try:
        await proxy.fleet.start()
        await runner.setup()
        site = web.TCPSite(runner, settings.server.host, settings.server.port, backlog=1024)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield proxy, site, Listening(settings.server.host or host, port)
    finally:
        proxy.stopping = True
        await _stop_engines(proxy, cut)
        await runner.cleanup()
        proxy.admission.close()


async def _wind_down(proxy: Proxy, site: web.TCPSite, cut: asyncio.Event) -> None:
    """Refuse newcomers, end waiters, let running requests finish until the deadline, then end them."""
    proxy.stopping = True
    error = ProxyError(ErrorCode.SHUTTING_DOWN, "the proxy is shutting down", retry_after_s=5.0)
    _log.info("draining", running=proxy.running, deadline_s=proxy.settings.server.shutdown_drain_s)
    proxy.admission.shutdown(error)
    await _quiet(proxy, proxy.settings.server.shutdown_drain_s, cut)
    if proxy.running:
        _log.info("cutting", running=proxy.running)
        proxy.admission.shutdown(error, cut=True)
        await _quiet(proxy, STOP_MARGIN_S, asyncio.Event())
    await site.stop()


async def _stop_engines(proxy: Proxy, cut: asyncio.Event) -> None:
    """Stop every engine within the deadline, or at once when a second signal came or comes."""
    fleet, deadline_s = proxy.fleet, proxy.settings.server.shutdown_drain_s
    stopping = asyncio.ensure_future(fleet.stop(0 if cut.is_set() else deadline_s))
    impatient = asyncio.ensure_future(cut.wait())
    try:
        await asyncio.wait({stopping, impatient}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await fleet.stop(0)
        await stopping
    finally:
        impatient.cancel()


async def _quiet(proxy: Proxy, timeout_s: float, cut: asyncio.Event) -> None:
    """Wait until nothing runs, the time is over, or `cut` is set."""
    deadline = proxy.clock() + timeout_s
    while proxy.live and proxy.clock() < deadline and not cut.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(cut.wait(), 0.05)


@contextlib.contextmanager
def _signals(stop: asyncio.Event, cut: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        _log.info("signal", name=number.name, again=stop.is_set())
        (cut if stop.is_set() else stop).set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # the terminal is gone; under nohup that is to be survived
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _listed(settings: Settings) -> list[str]:
    """Return the models' names, each with its description where it has one."""
    return [f"{name} ({m.description})" if m.description else name for name, m in settings.models.items()]


def with_overrides(settings: Settings, *, host: str | None, port: int | None, engine: str | None) -> Settings:
    """Return settings with the command line's own words put over the file's."""
    server = settings.server.model_copy(
        update={k: v for k, v in {"host": host, "port": port}.items() if v is not None}
    )
    update: dict[str, Any] = {"server": server}
    if engine is not None:
        update["engine"] = settings.engine.model_copy(update={"dir": engine})
    return settings.model_copy(update=update)


__all__ = [
    "EngineBinary",
    "Engines",
    "Listening",
    "Proxy",
    "inspect_engine",
    "serve",
    "server_at",
    "with_overrides",
]
