"""A ready backend of one generation: its connections, its mirror, its sentinel, and its orderly end."""

import asyncio
import contextlib
from typing import Final

from proxy import logs
from proxy.backends import modelfile, probes
from proxy.backends.bringup import Recipe, Running
from proxy.backends.client import EngineClient, ProbeError
from proxy.backends.command import batch_tokens
from proxy.backends.mirror import Mirror
from proxy.backends.process import StopReport
from proxy.backends.sentinel import Lost, Sentinel
from proxy.backends.slots import SlotsReport
from proxy.backends.voice import Voice
from proxy.backends.watchdog import Rules
from proxy.clock import Clock
from proxy.errors import ProxyError
from proxy.metrics import Metrics
from proxy.types import BackendKey, EngineInfo, Snapshot

LET_GO_S: Final = 0.3
"""How long requests of a stopped backend have to write their error event before sockets are cut."""

_log = logs.get("backends")


class Live:
    """What is there while one engine is ready (see `Serving`). `lost` is told once when it goes by itself."""

    def __init__(
        self,
        key: BackendKey,
        running: Running,
        recipe: Recipe,
        *,
        metrics: Metrics,
        clock: Clock,
        voice: Voice,
        lost: Lost,
    ) -> None:
        self.key: Final = key
        self.running: Final = running
        self.recipe = recipe
        self._voice = voice
        client = running.client
        self.sentinel: Final = Sentinel(
            key, running.process, _rules(recipe, running.info), metrics=metrics, clock=clock, lost=lost
        )
        self.mirror: Final = Mirror(
            key,
            self._slots,
            clock=clock,
            metrics=metrics,
            on_snapshot=self._seen,
            on_failed_polls=self.sentinel.failed,
            # of one that was taken over the first events are not all of its life
            engine_is_ours=running.process is not None and running.process.child,
            working=lambda: client.exchanges,
        )

    async def _slots(self, since: int | None) -> SlotsReport:
        """Read the slots; of a remote engine an error says `answered` only while it serves as when it was loaded."""
        client = self.running.client
        try:
            return await probes.slots(client, since)
        except ProbeError as error:
            if self.running.process is None and error.answered and not await probes.serves(client):
                # a gateway that reaches nobody, an engine that was started anew and loads or takes another key
                raise ProbeError(str(error)) from None
            raise

    def _seen(self, snapshot: Snapshot) -> None:
        self._voice.snapshot(snapshot)
        self.sentinel.seen(snapshot)

    def refit(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.sentinel.go_by(_rules(recipe, self.running.info))

    def begin(self) -> None:
        self._voice.ready(self.key, self.running.info)
        self.mirror.start()

    @property
    def exchanges(self) -> int:
        return self.running.client.exchanges

    @property
    def quiet_since(self) -> float:
        return self.running.client.quiet_since

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        return () if self.mirror.latest is None else (self.mirror.latest,)

    def client(self, key: BackendKey) -> EngineClient | None:
        return self.running.client if key == self.key else None

    def poke(self, key: BackendKey | None = None) -> None:
        if key is None or key == self.key:
            self.mirror.poke()

    async def watch_exit(self) -> None:
        await self.sentinel.watch_exit()

    def excused(self) -> contextlib.AbstractContextManager[None]:
        return self.sentinel.excused()

    def dismiss(self) -> None:
        self.sentinel.dismiss()

    def farewell(self, error: ProxyError) -> None:
        self._voice.down(self.key, error)

    @property
    def kept(self) -> bool:
        return self.running.run is not None and self.running.run.keep

    def renounce(self) -> None:
        if self.running.run is not None:
            self.recipe.runs.renounce(self.running.run)

    async def let_go(self, error: ProxyError) -> None:
        await self.mirror.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LET_GO_S):
                await self.running.client.idle()
        await self.running.client.close(error.message)

    async def clear(self, error: ProxyError) -> StopReport | None:
        await self.mirror.stop()
        await self.running.client.close(error.message)
        return await end(self.recipe, self.running, 0)

    async def detach(self) -> None:
        process = self.running.process
        if process is not None:
            _log.info("engine kept", model=self.key.model, pid=process.pid)
            await process.detach()


async def end(recipe: Recipe, running: Running, grace_s: float) -> StopReport | None:
    """Stop the process, and forget its record once nothing of it is left."""
    if running.process is None:
        return None
    report = await running.process.stop(grace_s)
    if running.run is not None and not report.left:
        recipe.runs.forget(running.run)
    return report


def _rules(recipe: Recipe, info: EngineInfo) -> Rules | None:
    model = recipe.model
    if model.wedge_after_s is None:
        return None
    return Rules(
        model.wedge_after_s,
        probes.TIMEOUT_S,
        modelfile.size(model.path),
        batch_tokens(model, recipe.defaults),
        info.admit_ms / 1000,
    )
