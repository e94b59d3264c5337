"""Says what happens to a model: one log line, one counter and one call of the observer for each thing."""

from collections.abc import Callable
from typing import Final, ParamSpec

from proxy import logs
from proxy.backends.lifecycle import Moved
from proxy.backends.views import FleetObserver
from proxy.errors import ProxyError
from proxy.metrics import Metrics
from proxy.types import BackendKey, Cause, EngineInfo, ModelState, Snapshot

_log = logs.get("backends")
_P = ParamSpec("_P")


class Voice:
    """The only place that counts, logs and reports a model's transitions."""

    def __init__(self, name: str, *, metrics: Metrics, observer: FleetObserver) -> None:
        self._name: Final = name
        self._metrics = metrics
        self._observer = observer
        self._show(ModelState.UNLOADED)

    def moved(self, moved: Moved, generation: int) -> None:
        """The operational state changed."""
        before, after, cause = moved.before.value, moved.after.value, moved.cause.value
        self._metrics.model_transitions.labels(self._name, before, after, cause).inc()
        self._show(moved.after)
        _log.info(
            "model state", model=self._name, before=before, after=after, cause=cause, generation=generation
        )
        self._tell(self._observer.on_state, self._name, moved.before, moved.after, moved.cause)

    def ready(self, key: BackendKey, info: EngineInfo) -> None:
        """A backend serves."""
        self._tell(self._observer.on_ready, key, info)

    def down(self, key: BackendKey, error: ProxyError) -> None:
        """A backend that served is gone or about to be."""
        self._tell(self._observer.on_down, key, error)

    def draining(self, key: BackendKey, *, draining: bool) -> None:
        """An engine that serves is to get no new requests, or is again."""
        self._tell(self._observer.on_draining, key, draining)

    def load_failed(self, error: ProxyError) -> None:
        """A load that somebody waits for will not come."""
        _log.warning("load failed", model=self._name, code=error.code.value, error=error.message)
        self._tell(self._observer.on_load_failed, self._name, error)

    def snapshot(self, snapshot: Snapshot) -> None:
        """The mirror has news."""
        self._tell(self._observer.on_snapshot, snapshot)

    def _show(self, present: ModelState) -> None:
        for state in ModelState:
            self._metrics.model_state.labels(self._name, state.value).set(state is present)

    def _tell(self, hear: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Call the observer; its failure must not stop the machine half way."""
        try:
            hear(*args, **kwargs)
        except Exception:
            _log.exception("an observer failed", model=self._name, call=getattr(hear, "__name__", "?"))


class Told:
    """Several observers as one, each told in turn; one that fails does not keep the next from hearing."""

    def __init__(self, *observers: FleetObserver) -> None:
        self._observers = observers

    def on_state(self, model: str, before: ModelState, after: ModelState, cause: Cause) -> None:
        self._each("on_state", model, before, after, cause)

    def on_ready(self, key: BackendKey, info: EngineInfo) -> None:
        self._each("on_ready", key, info)

    def on_down(self, key: BackendKey, error: ProxyError) -> None:
        self._each("on_down", key, error)

    def on_draining(self, key: BackendKey, draining: bool) -> None:
        self._each("on_draining", key, draining)

    def on_load_failed(self, model: str, error: ProxyError) -> None:
        self._each("on_load_failed", model, error)

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self._each("on_snapshot", snapshot)

    def _each(self, call: str, *args: object) -> None:
        for observer in self._observers:
            try:
                getattr(observer, call)(*args)
            except Exception:
                _log.exception("an observer failed", call=call)
