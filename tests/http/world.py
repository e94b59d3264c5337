"""The rest of the proxy around the HTTP surface: real admission, real upstream client, paced engines."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from aiohttp import web

from proxy.admission import Admission
from proxy.backends.client import DeadUpstream, EngineClient
from proxy.catalog import Catalog
from proxy.clock import monotonic
from proxy.errors import ErrorCode, ProxyError
from proxy.http.events import note_effect
from proxy.http.hub import EventHub
from proxy.http.ports import HttpContext
from proxy.http.routes import make_http
from proxy.http.server import ProxyRunner
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.types import (
    BackendKey,
    EngineInfo,
    EnginePhase,
    MemberState,
    ModelState,
    Outcome,
    PhasePolicy,
    SlotView,
    Snapshot,
)
from proxy.upstream import Upstream

from .paced import PacedEngine


class House:
    """One proxy in front of one paced engine per model. Plays the part of the fleet."""

    def __init__(
        self,
        settings: Settings,
        *,
        slots: int = 4,
        native: bool = True,
        auto: bool = True,
        policy: PhasePolicy = PhasePolicy.UNKNOWN,
    ) -> None:
        self.settings = settings
        self.slots = slots
        self.native = native
        self.auto = auto
        self.metrics = Metrics()
        self.catalog = Catalog(settings.models)
        self.engine = PacedEngine()
        self.hub = EventHub()
        self.admission = Admission(settings, self.metrics, self, listener=partial(note_effect, self.hub))
        self.loads: list[str] = []
        self.states: dict[str, ModelState] = {}
        self.policy = policy
        self.member: MemberState = MemberState.GENERATE
        self.members: dict[str, MemberState] = {}
        """Where single requests are, by the stem of their tag; the others are where `member` says."""
        self.showing: EnginePhase | None = None
        """What the engine says it does, where that is not to follow from its slots."""
        self.mute = False
        """Whether the engine shows its slots no more."""
        self.keys: dict[str, BackendKey] = {}
        self.clients: dict[BackendKey, EngineClient] = {}
        self.generation = 0
        self.port = 0
        self._runner: ProxyRunner | None = None
        self._poller: asyncio.Task[None] | None = None
        self._later: set[asyncio.Handle] = set()

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, host: str = "127.0.0.1") -> None:
        await self.engine.start()
        context = HttpContext(
            self.settings,
            self.catalog,
            self.metrics,
            self.admission,
            self.upstream,
            self,
            monotonic,
            self.hub,
        )
        self._runner = ProxyRunner(make_http(context), self.settings)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._poller = asyncio.ensure_future(self._poll())

    def listening(self) -> list[socket.socket]:
        """The proxy's own listening sockets: what is set on them, connections inherit."""
        assert self._runner is not None
        servers = [site._server for site in self._runner.sites]  # type: ignore[attr-defined]
        return [transport._sock for server in servers for transport in server.sockets]

    async def stop(self) -> None:
        assert self._runner is not None and self._poller is not None
        self.admission.shutdown(ProxyError(ErrorCode.SHUTTING_DOWN, "the test is over"), cut=True)
        await self._runner.cleanup()
        self._poller.cancel()
        await asyncio.wait({self._poller})
        for client in self.clients.values():
            await client.close()
        await self.engine.stop()
        self.admission.close()

    # --- the fleet's part ---------------------------------------------------------------------------

    def request_load(self, model: str) -> None:
        if self.state(model) is not ModelState.UNLOADED:
            return
        self.loads.append(model)
        self.states[model] = ModelState.LOADING
        if self.auto:
            asyncio.get_running_loop().call_soon(self.ready, model)

    def ready(self, model: str) -> BackendKey:
        self.generation += 1
        key = BackendKey(model, f"{model}-0", self.generation)
        self.clients[key] = EngineClient(self.engine.base, "engine-key")
        self.keys[model] = key
        self.states[model] = ModelState.READY
        self.admission.backend_ready(key, EngineInfo(self.slots, 4096, self.policy))
        return key

    def upstream(self, key: BackendKey) -> Upstream:
        client = self.clients.get(key)
        return client if client is not None and self.keys.get(key.model) == key else DeadUpstream("gone")

    def poke(self, key: BackendKey) -> None:
        asyncio.get_running_loop().call_soon(self._snapshot, key)

    def _snapshot(self, key: BackendKey) -> None:
        if self.mute:
            return
        now = monotonic()
        busy = [
            SlotView(
                id=number,
                busy=True,
                tag=tag if self.native else "",
                member=self.members.get(tag.partition(".")[0], self.member),
            )
            for number, tag in enumerate(list(self.engine.active)[: self.slots])
        ]
        idle = [SlotView(id=number, busy=False) for number in range(len(busy), self.slots)]
        phase = EnginePhase.UNKNOWN
        if self.policy is not PhasePolicy.UNKNOWN:
            phase = self.showing or (EnginePhase.GENERATE if busy else EnginePhase.IDLE)
        seen = Snapshot(key, now, now, (*busy, *idle), native=self.native, phase=phase)
        self.admission.snapshot(seen)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            for key in self.keys.values():
                self._snapshot(key)

    # --- Models -------------------------------------------------------------------------------------

    def state(self, model: str) -> ModelState:
        return self.states.get(model, ModelState.UNLOADED)

    def phase(self, model: str) -> EnginePhase | None:
        return EnginePhase.GENERATE if self.state(model) is ModelState.READY else None

    def meta(self, model: str) -> Mapping[str, Any]:
        return {"n_ctx": 4096}

    def describe(self, model: str) -> Mapping[str, Any]:
        return {"id": model, "state": self.state(model).value}

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        return True, {"models": len(self.catalog.ids())}

    # --- what tests ask -----------------------------------------------------------------------------

    def live(self) -> int:
        """Tickets that still hold something."""
        return len(self.admission.tickets())

    def sample(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"llama_proxy_{name}", labels)
        return 0.0 if value is None else value

    def outcomes(self) -> dict[str, float]:
        """Finished requests by outcome."""
        found: dict[str, float] = {outcome.value: 0.0 for outcome in Outcome}
        for metric in self.metrics.requests.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    found[sample.labels["outcome"]] += sample.value
        return found


def settings(**sections: Any) -> Settings:
    """Settings for tests: one model `demo` (alias `default`) unless told otherwise."""
    sections.setdefault("models", {"demo": {"path": "demo.gguf", "aliases": ["default"]}})
    return Settings.model_validate(sections)


@asynccontextmanager
async def house(configured: Settings | None = None, **options: Any) -> AsyncIterator[House]:
    """Run a house for the length of a block."""
    made = House(configured or settings(), **options)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def until(condition: Callable[[], bool], within: float = 20.0) -> None:
    """Wait for a state, with a deadline."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.005)


async def raw(port: int, data: bytes, within: float = 20.0, *, half_close: bool = False) -> bytes:
    """Send bytes as they are; return everything until the server closes (or the deadline)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if half_close:
            writer.write_eof()
        parts = bytearray()
        try:
            async with asyncio.timeout(within):
                while more := await reader.read(65536):
                    parts += more
        except (TimeoutError, ConnectionError):
            pass
        return bytes(parts)
    finally:
        writer.transport.abort()
