"""One running proxy: its parts, wired. Events of backends go to admission and metrics from here."""

import contextlib
from functools import partial

from aiohttp import web

from proxy import __version__, logs
from proxy.admission import Admission
from proxy.app.books import Books
from proxy.app.control import Control
from proxy.app.describe import Described
from proxy.app.engines import Engines, IdentityCheck
from proxy.app.reconcile import Reconciler
from proxy.app.reloading import Reloader, Reread
from proxy.backends import ControlEvent, Fleet, Job, JobChanged, JobKind, Stage
from proxy.catalog import Catalog
from proxy.clock import Clock, monotonic
from proxy.errors import ProxyError
from proxy.http.events import note_effect
from proxy.http.hub import EventHub
from proxy.http.ports import HttpContext
from proxy.http.routes import make_http
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.state import StateDir
from proxy.types import (
    BackendKey,
    Cause,
    EngineInfo,
    EnginePhase,
    ModelState,
    PhasePolicy,
    Snapshot,
)

_log = logs.get("app")


class Proxy:
    """One running proxy: the parts, wired. Events of backends go to admission and metrics from here."""

    def __init__(
        self,
        settings: Settings,
        engines: Engines,
        *,
        clock: Clock = monotonic,
        state: StateDir | None = None,
        reread: Reread | None = None,
    ) -> None:
        """Without `state` gates, leases and run records end with this proxy, without `reread` nothing is reloaded."""
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        self.catalog = Catalog(settings.models)
        self.stopping = False
        self._swaps: set[str] = set()
        self.hub = EventHub()
        self.fleet = Fleet(
            settings,
            self.catalog,
            self.metrics,
            clock,
            engine_resolver=engines,
            observer=_Observer(self),
            verify=IdentityCheck(),
            requests=Books(lambda: self.admission),
            state=state,
            listener=self._heard,
        )
        self.control = Control(self.fleet, lambda: self.reloader)
        self.admission = Admission(
            settings, self.metrics, _World(self), clock=clock, listener=partial(note_effect, self.hub)
        )
        self.reloader = Reloader(
            settings, reread, fleet=self.fleet, catalog=self.catalog, admission=self.admission
        )
        stale_after_s = settings.admission.stale_after_s
        self.reconciler = Reconciler(self.admission, self.metrics, self.hub, stale_after_s)
        self.metrics.build_info.labels(__version__, "", "").set(1)

    def http(self) -> web.Application:
        """Return the HTTP application over these parts."""
        context = HttpContext(
            settings=self.settings,
            catalog=self.catalog,
            metrics=self.metrics,
            admission=self.admission,
            upstream=self.fleet.upstream,
            models=Described(self.catalog, self.fleet, self.admission, lambda: self.stopping, self.clock),
            clock=self.clock,
            hub=self.hub,
            control=self.control,
        )
        return make_http(context)

    def _heard(self, event: ControlEvent) -> None:
        if isinstance(event, JobChanged) and event.job.kind is JobKind.LOAD:
            self._told_of_load(event.job)
        if self.hub.watched:
            self.control.note(self.hub, event)

    def _told_of_load(self, job: Job) -> None:
        """Let requests show that their model waits for others to make room."""
        status = self.fleet.status(job.model)
        waits = not job.ended and status.stage is Stage.MEMORY and bool(status.waits_for)
        if waits != (job.model in self._swaps):
            (self._swaps.add if waits else self._swaps.discard)(job.model)
            self.admission.swap_wait(job.model, waiting=waits)

    @property
    def live(self) -> int:
        """Number of requests that hold or want something."""
        found = self.admission.live()
        return len(found.waiting) + len(found.running) + len(found.cancelling)

    @property
    def running(self) -> int:
        """Number of requests an engine works for."""
        return len(self.admission.live().running)


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
        self._phases: dict[BackendKey, tuple[EnginePhase, int | None]] = {}

    def on_state(self, model: str, before: ModelState, after: ModelState, cause: Cause) -> None:
        # metrics and the log line are the fleet's own
        data = {"model": model, "state": after.value, "before": before.value, "cause": cause.value}
        self._proxy.hub.publish("model", data)

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
        self._proxy.reconciler.forget(key)
        self._phases.pop(key, None)
        self._proxy.admission.backend_down(key, error)

    def on_draining(self, key: BackendKey, draining: bool) -> None:
        self._proxy.admission.backend_draining(key, draining=draining)

    def on_load_failed(self, model: str, error: ProxyError) -> None:
        self._proxy.admission.load_failed(model, error)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._proxy.reconciler.take(snapshot)
        seen = (snapshot.phase, snapshot.cohort)
        if self._phases.get(snapshot.key) != seen:
            self._phases[snapshot.key] = seen
            data = {
                "model": snapshot.key.model,
                "backend": snapshot.key.backend,
                "generation": snapshot.key.generation,
                "phase": snapshot.phase.value,
                "cohort": snapshot.cohort,
            }
            self._proxy.hub.publish("phase", data)
