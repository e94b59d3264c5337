"""All hosts of a fleet: which models run on which, and what of them keeps a host awake."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from proxy.backends.hostkeeper import HostKeeper, HostStatus
from proxy.backends.hosts import Use
from proxy.backends.lifecycle import Life
from proxy.clock import Clock
from proxy.metrics import Metrics
from proxy.settings import Host, Model
from proxy.types import BackendKey, ModelState


class Guest(Protocol):
    """What is read off a model that runs on a host."""

    @property
    def life(self) -> Life:
        """Its place on both axes."""

    @property
    def key(self) -> BackendKey | None:
        """The ready generation's key."""

    @property
    def exchanges(self) -> int:
        """Requests that are with its engine."""

    @property
    def idle_since(self) -> float | None:
        """When its last exchange ended, None while it is busy or not ready."""


class Hosting:
    """The keepers, by host. Hosts that no model names are looked after as well: they are idle from the start."""

    def __init__(
        self,
        settings: Mapping[str, Host],
        models: Mapping[str, Model],
        *,
        guests: Callable[[], Mapping[str, Guest]],
        leased: Callable[[], bool],
        wanted: Callable[[str], bool],
        unload: Callable[[str], object],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`models` may change. `guests()` are the runners by model; `unload(model)` begins one that lets requests finish."""
        self._models = models
        self._guests = guests
        self._leased = leased
        self._wanted = wanted
        self._unload = unload
        self._keepers = {
            name: HostKeeper(
                name,
                host,
                use=self._use,
                unload=self._retire,
                wanted=wanted,
                metrics=metrics,
                clock=clock,
            )
            for name, host in settings.items()
        }

    def start(self) -> None:
        """Begin to look after all."""
        for keeper in self._keepers.values():
            keeper.start()

    async def stop(self) -> None:
        """End all hooks and looks; loads that wait for a host are told."""
        await asyncio.gather(*(keeper.stop() for keeper in self._keepers.values()))

    def keeper(self, model: Model) -> HostKeeper | None:
        """Return who keeps the model's host, None for a model without one."""
        return self._keepers[model.host] if model.host is not None else None

    def status(self, model: Model) -> HostStatus | None:
        """Return the model's host at this instant."""
        keeper = self.keeper(model)
        return keeper.status() if keeper is not None else None

    def _use(self, host: str) -> Use:
        everyone = self._guests()
        guests = {
            name: everyone[name]
            for name, model in self._models.items()
            if model.host == host and name in everyone
        }
        idle = [since for guest in guests.values() if (since := guest.idle_since) is not None]
        gone = (ModelState.UNLOADED, ModelState.FAILED)
        return Use(
            leased=self._leased(),
            wanted=any(
                self._wanted(name) or guest.exchanges or guest.life.loading for name, guest in guests.items()
            ),
            loaded=tuple(name for name, guest in guests.items() if guest.life.operational not in gone),
            idle_since=max(idle, default=None),
        )

    def _retire(self, model: str) -> None:
        # one that is leaving already needs no second order
        if self._guests()[model].key is not None:
            self._unload(model)
