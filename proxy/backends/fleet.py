"""The fleet: every configured model's backend, and operators' control of them, behind one object.

Knows nothing of how requests are queued: what it needs of them is the `Requests` port.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from proxy import logs
from proxy.backends.bringup import Recipe
from proxy.backends.caretaker import Caretaker
from proxy.backends.command import check
from proxy.backends.desk import Desk
from proxy.backends.fleetview import FleetView
from proxy.backends.gatekeeper import Gatekeeper
from proxy.backends.gates import Gate, GateMode
from proxy.backends.gpu import Gpus
from proxy.backends.hosting import Hosting
from proxy.backends.hostkeeper import HostStatus
from proxy.backends.jobs import Job
from proxy.backends.leasing import Leasing
from proxy.backends.loadjobs import LoadJobs
from proxy.backends.names import Lookup, Resolver
from proxy.backends.ports import ControlEvent, Listener, NoRequests, Requests
from proxy.backends.reconcile import ReconcileReport
from proxy.backends.reconciler import reconcile
from proxy.backends.refits import Refits
from proxy.backends.room import Room
from proxy.backends.runner import ModelRunner
from proxy.backends.runs import RunStore
from proxy.backends.slotcache import cache_of, sweep
from proxy.backends.stocktaking import take_stock
from proxy.backends.unloads import Unloads
from proxy.backends.views import (
    EngineResolver,
    FleetObserver,
    Then,
    UnloadReport,
    Verify,
)
from proxy.backends.voice import Told
from proxy.catalog import Catalog
from proxy.clock import Clock, monotonic
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.settings import ConfigError, Engine, Model, Settings
from proxy.state import StateDir
from proxy.types import NOBODY, Audit, Cause, EngineInfo

STOP_MARGIN_S: Final = 2.0
"""What a stop may take beyond its grace: letting go of requests, the KILL, the last words."""
_log = logs.get("backends")


def check_models(models: Mapping[str, Model], defaults: Engine) -> None:
    """Refuse models that cannot be run, before anything starts. Raises `ConfigError` naming the field."""
    for name, model in models.items():
        elsewhere = "url" if model.url is not None else "dns" if model.dns is not None else ""
        if model.on_proxy_exit == "keep" and elsewhere:
            raise ConfigError(f"models.{name}.on_proxy_exit: keep has no meaning with {elsewhere}; remove it")
        check(name, model, defaults)


class Fleet(FleetView):
    """Loads, watches and stops backends. One event loop, one owner; `stop` leaves nothing behind but kept engines.

    `jobs`, `gates` and `leases` are the operators' side: read them freely, change them by the methods below. `refits`
    changes the models while the fleet runs.
    """

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
        requests: Requests | None = None,
        state: StateDir | None = None,
        listener: Listener | None = None,
        gpus: Gpus | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        """Check the models; nothing runs yet. Raises `ConfigError`.

        Without `requests` only open exchanges are known, without `state` nothing survives. `listener` hears of every
        job, gate and lease; the state folder is closed by `stop`.
        """
        check_models(settings.models, settings.engine)
        super().__init__(catalog, requests or NoRequests(), state or StateDir.open(None))
        self._observer, self._metrics = observer, metrics
        self._stopping = False
        self._runs = RunStore(self._state)
        self._listener = listener
        self.jobs: Final = Desk(clock, self._tell)
        self._loads = LoadJobs(self.jobs, self._runner, catalog.model)
        told = Told(observer, self._loads)
        self._models = dict(settings.models)
        self._room = Room(
            settings.memory,
            self._models,
            settings.engine,
            state=self._state,
            clock=clock,
            wanted=self._wanted,
            evict=self._evict,
            finished=lambda job: (found := self.jobs.get(job)) is None or found.ended,
            gpus=gpus,
        )
        self.leases: Final = Leasing(self._state, clock, metrics, self._tell)
        self._hosting = Hosting(
            settings.hosts,
            self._models,
            guests=lambda: self._runners,
            leased=self.leases.awake,
            wanted=self._wanted,
            unload=self._retire,
            metrics=metrics,
            clock=clock,
        )
        self._told, self._clock = told, clock
        self._engine, self._resolver, self._verify = settings.engine, engine_resolver, verify
        self._lookup = lookup or Resolver()
        for name, model in self._models.items():
            self._runners[name] = self._new_runner(name, model)
        self._room.open(self._runners)
        self.gates: Final = Gatekeeper(
            catalog.ids(),
            state=self._state,
            requests=self._requests,
            apply=lambda model, gate: self._runner(model).set_admin(gate.state, gate.reason),
            metrics=metrics,
            tell=self._tell,
        )
        self._unloads = Unloads(
            runner=self._runner,
            model=catalog.model,
            gates=self.gates,
            requests=self._requests,
            desk=self.jobs,
            metrics=metrics,
            clock=clock,
        )
        self._ttl_s = {name: model.ttl_s for name, model in self._models.items() if model.ttl_s is not None}
        self._caretaker = Caretaker(
            self._runners,
            self._ttl_s,
            leasing=self.leases,
            wanted=self._wanted,
            unload=lambda name: self.begin_unload(name, mode="hold", cause=Cause.TTL),
            catch_up=self._catch_up,
            clock=clock,
        )
        self.refits: Final = Refits(
            self._models,
            self._runners,
            self._ttl_s,
            gates=self.gates,
            desk=self.jobs,
            make=self._new_runner,
            recipe=self._recipe,
            load=lambda name: self.request_load(name, Cause.RELOAD),
            unload=self.begin_unload,
            settled=self._requests.settled,
            metrics=metrics,
        )

    def _new_runner(self, name: str, model: Model) -> ModelRunner:
        return ModelRunner(
            self._recipe(name, model), metrics=self._metrics, clock=self._clock, observer=self._told
        )

    def _recipe(self, name: str, model: Model) -> Recipe:
        return Recipe(
            name,
            model,
            self._engine,
            self._resolver,
            self._verify,
            runs=self._runs,
            room=self._room,
            slots=cache_of(self._state, name, model, self._engine),
            host=self._hosting.keeper(model),
            lookup=self._lookup,
            granted=self._requests.granted,
        )

    # -- the life of the fleet --------------------------------------------------------------------------

    async def start(self) -> None:
        """Restore gates and leases, take over or end what an earlier proxy left, begin loading `preload` models.

        One whose gate an operator left blocked stays down.
        """
        self.gates.restore()
        self.leases.restore()
        await sweep(self._state, self._models)
        await take_stock(self._runs, self._runners, self._catalog)
        for name in self._catalog.ids():
            model = self._catalog.model(name)
            if model.on_proxy_exit == "keep" and not self._runs.kept:
                why = self._state.problem or "no state folder is in use"
                _log.warning("an engine cannot be kept and will stop with the proxy", model=name, problem=why)
            if model.preload and self.gates.gate(name).open:
                self.request_load(name, Cause.OPERATOR)
        self._caretaker.start()
        self._hosting.start()

    async def stop(self, deadline_s: float) -> None:
        """Stop every backend at once, TERM grace cut to the deadline; no further load is possible.

        Ready engines of models with `on_proxy_exit: keep` are let go of and run on.
        """
        self._stopping = True
        await self._caretaker.stop()
        await self._hosting.stop()
        await self.refits.close()
        # a load that was to follow an unload would follow one that is part of this
        await self._loads.close()
        grace_s = max(0.0, deadline_s - STOP_MARGIN_S)
        await asyncio.gather(
            *(
                runner.ask_stop(Cause.SHUTDOWN, min(grace_s, self._catalog.model(name).stop.grace_s))
                for name, runner in self._runners.items()
            )
        )
        await self._unloads.close()
        for runner in self._runners.values():
            await runner.close()
        await self._loads.close()
        await self.gates.close()
        await self.leases.close()
        await asyncio.to_thread(self._room.save)
        self._state.close()

    # -- loads ------------------------------------------------------------------------------------------

    def request_load(self, model: str, cause: Cause = Cause.REQUEST) -> None:
        """Make sure the model is loaded or being loaded; the observer hears how it ends. Idempotent.

        After a crash it joins the planned restart; after failed attempts of requests' own it may come too soon.
        """
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

    def begin_load(self, model: str, audit: Audit = NOBODY, cause: Cause = Cause.OPERATOR) -> Job:
        """Load as a job: the one under way, or an ended one where the model is ready or the load is refused."""
        self._runner(model)
        if self._stopping:
            raise ProxyError(ErrorCode.SHUTTING_DOWN, "the proxy is shutting down")
        self.refits.wish(model, loaded=True)
        return self._loads.begin(model, cause, audit)

    # -- unloads ----------------------------------------------------------------------------------------

    async def unload(
        self, model: str, *, deadline_s: float = 0.0, force: bool = False, cause: Cause = Cause.OPERATOR
    ) -> UnloadReport:
        """Stop a model's backend and wait until it is gone, without a job.

        Not forced: the model drains while requests finish, at most `deadline_s`. Forced: the generation is bumped
        before this first awaits, so that nothing more can start on the old one. In both cases the observer hears
        `on_down`, sockets are closed, and the process group is ended within the model's `stop.grace_s` + 2 s. A model
        that is not loaded is a success; twice at once is one.
        """
        self._runner(model)
        return await self._unloads.unload(model, deadline_s=deadline_s, force=force, cause=cause)

    def begin_unload(
        self,
        model: str,
        *,
        deadline_s: float | None = None,
        then: Then = Then.OPEN,
        reason: str = "",
        mode: GateMode | None = None,
        audit: Audit = NOBODY,
        cause: Cause = Cause.OPERATOR,
    ) -> Job:
        """Drain and stop as a job: running requests finish until `deadline_s` (default: the model's `stop.drain_s`).

        Requests that come meanwhile wait or are refused (`mode`, default: the model's `stop.new_requests`). The job's
        `cut` names those that still ran at the deadline. `then` block leaves the gate blocked. While an unload is
        under way this joins it: a sooner deadline and a block count, whoever began it.
        """
        self._runner(model)
        if cause is not Cause.RELOAD:
            self.refits.wish(model, loaded=False)
        return self._unloads.begin(
            model,
            deadline_s=deadline_s,
            cause=cause,
            audit=audit,
            then=then,
            reason=reason,
            mode=mode or self._catalog.model(model).stop.new_requests,
        )

    async def force(
        self,
        model: str,
        *,
        then: Then = Then.OPEN,
        reason: str = "",
        mode: GateMode = "hold",
        audit: Audit = NOBODY,
    ) -> UnloadReport:
        """End every request of a model and its process; answers within `stop.grace_s` + 2 s whatever the engine does.

        Works while the model loads, drains, is wedged or dead; one that is not loaded is a success. Twice at once is
        one. `then` block leaves the gate blocked with `reason` and `mode`; open opens it, whatever it was.
        """
        self._runner(model)
        self.refits.wish(model, loaded=False)
        return await self._unloads.force(model, then=then, reason=reason, mode=mode, audit=audit)

    async def reconcile(self, model: str) -> ReconcileReport:
        """Compare a model's books, processes, records, sockets and slots; repair what is safe; touch no live request."""
        return await reconcile(self._runner(model), self._runs, self._requests, self._metrics)

    # -- gates ------------------------------------------------------------------------------------------

    async def set_gate(self, model: str | None, gate: Gate) -> str:
        """Set the operator's gate of a model (None: of all), effective before this first awaits.

        `gatekeeper.blocked` and `opened` make one. Returns an empty text, or why it will not survive the proxy.
        """
        for name in self._catalog.ids() if model is None else (model,):
            self._runner(name)
            self.gates.set(name, gate)
        return await self.gates.save()

    def host(self, model: str) -> HostStatus | None:
        """Return the host a model runs on, None for one without."""
        return self._hosting.status(self._catalog.model(model))

    def _catch_up(self) -> None:
        self.gates.catch_up()
        self.leases.catch_up()

    def _evict(self, model: str) -> Job:
        return self.begin_unload(
            model, mode="hold", cause=Cause.EVICT, reason="another model needs its memory"
        )

    def _retire(self, model: str) -> Job:
        reason = "its host has been idle and goes to sleep"
        return self.begin_unload(model, mode="hold", cause=Cause.TTL, reason=reason)

    def _tell(self, event: ControlEvent) -> None:
        if self._listener is None:
            return
        try:
            self._listener(event)
        except Exception:
            _log.exception("a listener failed", told=type(event).__name__)
