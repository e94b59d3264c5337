"""The fleet: every configured model's backend, behind one object. Knows nothing of requests or admission."""

import asyncio
from collections.abc import Mapping
from typing import Final

from proxy.backends.bringup import Recipe
from proxy.backends.command import check
from proxy.backends.runner import ModelRunner
from proxy.backends.views import EngineResolver, FleetObserver, ModelStatus, UnloadReport, Verify
from proxy.catalog import Catalog
from proxy.clock import Clock, monotonic
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.settings import ConfigError, Engine, Model, Settings
from proxy.types import AdminState, BackendKey, Cause, EngineInfo, Snapshot
from proxy.upstream import Upstream

STOP_MARGIN_S: Final = 2.0
"""What a stop may take beyond its grace: letting go of requests, the KILL, the last words."""


def check_models(models: Mapping[str, Model], defaults: Engine) -> None:
    """Refuse models that cannot be run, before anything starts. Raises `ConfigError` naming the field."""
    for name, model in models.items():
        if model.dns is not None:
            raise ConfigError(f"models.{name}.dns: backends by name are not supported yet; use url")
        if model.on_proxy_exit == "keep":
            raise ConfigError(f"models.{name}.on_proxy_exit: keep is not supported yet; use stop")
        check(name, model, defaults)


class Fleet:
    """Loads, watches and stops backends. One event loop, one owner; `stop` leaves nothing behind."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        metrics: Metrics,
        clock: Clock = monotonic,
        *,
        engine_resolver: EngineResolver,
        observer: FleetObserver,
        verify: Verify | None = None,
    ) -> None:
        """Check the models; nothing runs yet. Raises `ConfigError`."""
        check_models(settings.models, settings.engine)
        self._runners: dict[str, ModelRunner] = {}
        for name in catalog.ids():
            model = catalog.model(name)
            recipe = Recipe(name, model, settings.engine, engine_resolver, verify)
            self._runners[name] = ModelRunner(recipe, metrics=metrics, clock=clock, observer=observer)
        self._preload = tuple(name for name in catalog.ids() if catalog.model(name).preload)
        self._grace_s = {name: catalog.model(name).stop.grace_s for name in catalog.ids()}
        self._observer = observer
        self._stopping = False

    async def start(self) -> None:
        """Begin loading the models marked `preload`; returns at once."""
        for name in self._preload:
            self.request_load(name, Cause.OPERATOR)

    async def stop(self, deadline_s: float) -> None:
        """Stop every backend at once, TERM grace cut to the deadline; no further load is possible."""
        self._stopping = True
        grace_s = max(0.0, deadline_s - STOP_MARGIN_S)
        await asyncio.gather(
            *(
                runner.unload(
                    deadline_s=0, force=True, cause=Cause.SHUTDOWN, grace_s=min(grace_s, self._grace_s[name])
                )
                for name, runner in self._runners.items()
            )
        )
        for runner in self._runners.values():
            await runner.close()

    def request_load(self, model: str, cause: Cause = Cause.REQUEST) -> None:
        """Make sure the model is loaded or being loaded; the observer hears how it ends. Idempotent."""
        runner = self._runner(model)
        if self._stopping:
            error = ProxyError(ErrorCode.SHUTTING_DOWN, "the proxy is shutting down")
            self._observer.on_load_failed(model, error)
            return
        runner.ask(cause)

    async def load(self, model: str, cause: Cause = Cause.OPERATOR) -> EngineInfo:
        """Load and wait. All callers share one attempt; a caller's cancel does not end it. Raises `ProxyError`."""
        runner = self._runner(model)
        if self._stopping:
            raise ProxyError(ErrorCode.SHUTTING_DOWN, "the proxy is shutting down")
        return await asyncio.shield(runner.ask(cause))

    async def unload(
        self, model: str, *, deadline_s: float = 0.0, force: bool = False, cause: Cause = Cause.OPERATOR
    ) -> UnloadReport:
        """Stop a model's backend and wait until it is gone.

        Not forced: new loads are refused while exchanges finish, at most `deadline_s`. Forced: the generation
        is bumped before this first awaits, so that nothing more can start on the old one. In both cases the
        observer hears `on_down`, sockets are closed, and the process group is ended within the model's
        `stop.grace_s` + 2 s. A model that is not loaded is a success; twice at once is one.
        """
        runner = self._runner(model)
        return await runner.unload(
            deadline_s=deadline_s, force=force, cause=cause, grace_s=self._grace_s[model]
        )

    def set_admin(self, model: str, admin: AdminState, reason: str = "") -> None:
        """Set the administrative axis: anything but `enabled` refuses loads by requests."""
        self._runner(model).set_admin(admin, reason)

    def upstream(self, key: BackendKey) -> Upstream:
        """Return the way to a backend generation; a stale one fails like a connection that died unused."""
        return self._runner(key.model).upstream(key)

    def poke(self, key: BackendKey) -> None:
        """Poll the backend's slots now."""
        self._runner(key.model).poke(key)

    def key(self, model: str) -> BackendKey | None:
        """Return the ready generation of a model."""
        return self._runner(model).key

    def snapshot(self, model: str) -> Snapshot | None:
        """Return the newest snapshot of a ready backend (see its age)."""
        return self._runner(model).snapshot()

    def status(self, model: str) -> ModelStatus:
        """Return a model's whole state at this instant."""
        return self._runner(model).status()

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Return all models in configuration order."""
        return tuple(runner.status() for runner in self._runners.values())

    def log_tail(self, model: str, lines: int = 100) -> list[str]:
        """Return the last lines of the engine's output, of the present or the last process."""
        return self._runner(model).log_tail(lines)

    def _runner(self, model: str) -> ModelRunner:
        runner = self._runners.get(model)
        if runner is None:
            raise ProxyError(ErrorCode.MODEL_NOT_FOUND, f"model {model!r} does not exist", param="model")
        return runner
