"""A proxy's life as a process: listen, drain on a signal, stop what it started."""

import asyncio
import contextlib
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from proxy import __version__, logs
from proxy.app.engines import Engines
from proxy.app.parts import Proxy
from proxy.app.reloading import Reread
from proxy.errors import ErrorCode, ProxyError
from proxy.http.server import ProxyRunner
from proxy.settings import Settings
from proxy.state import StateDir, default_dir

STOP_MARGIN_S: Final = 3.0
"""After the drain deadline: time for error events to reach their clients before sockets close."""
OPEN_FILES: Final = 65_536
"""Wanted, where the machine allows it: clients take one each, and the usual 1,024 are few for a fleet."""
FEW_FILES: Final = 4_096

_log = logs.get("app")


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


async def serve(
    settings: Settings,
    engines: Engines,
    told: Callable[[Listening], None],
    reread: Reread | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain until `shutdown_drain_s` and stop.

    A second signal cuts: what runs ends at once, engines are killed. Later ones change nothing.
    """
    stop, cut = asyncio.Event(), asyncio.Event()
    _allow_open_files()
    with _signals(stop, cut):
        async with _listening(settings, engines, cut, reread) as (proxy, site, where):
            told(where)
            _log.info("listening", url=where.url, models=_listed(settings), version=__version__)
            await stop.wait()
            await _wind_down(proxy, site, cut)
        _log.info("stopped")


def _allow_open_files() -> None:
    """Raise the soft limit of open files as far as the hard one lets it, and say so when that is not far."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < FEW_FILES:
        _log.warning(
            "few open files", limit=wanted, advice="raise it: ulimit -Hn, or LimitNOFILE of the service"
        )


@contextlib.asynccontextmanager
async def _listening(
    settings: Settings, engines: Engines, cut: asyncio.Event, reread: Reread | None
) -> AsyncIterator[tuple[Proxy, web.TCPSite, Listening]]:
    state = StateDir.open(settings.server.state_dir or default_dir())
    proxy = Proxy(settings, engines, state=state, reread=reread)
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
