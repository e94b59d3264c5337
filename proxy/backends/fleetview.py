"""What can be seen of all models and their backends. Reading is free and changes nothing (`fleet.py` does that)."""

from proxy.backends.logfeed import LogFollower
from proxy.backends.ports import Requests
from proxy.backends.runner import ModelRunner
from proxy.backends.views import ModelStatus, WouldCut
from proxy.catalog import Catalog
from proxy.errors import ErrorCode, ProxyError
from proxy.state import StateDir
from proxy.types import BackendKey, Snapshot
from proxy.upstream import Upstream


class FleetView:
    """The read side of a fleet. A model that does not exist raises `ProxyError` (`model_not_found`)."""

    def __init__(self, catalog: Catalog, requests: Requests, state: StateDir) -> None:
        self._catalog = catalog
        self._requests = requests
        self._state = state
        self._runners: dict[str, ModelRunner] = {}

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
        """Return the newest snapshot of a ready backend (see its age), of several engines that of the busiest."""
        return self._runner(model).snapshot()

    def snapshots(self, model: str) -> tuple[Snapshot, ...]:
        """Return the newest snapshot of each of a ready model's engines."""
        return self._runner(model).snapshots()

    def status(self, model: str) -> ModelStatus:
        """Return a model's whole state at this instant."""
        return self._runner(model).status()

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Return all models in configuration order."""
        return tuple(runner.status() for runner in self._runners.values())

    def would_cut(self, model: str) -> WouldCut:
        """Return what `force` would end, changing nothing (dry run)."""
        runner, live = self._runner(model), self._requests.live(model)
        status = runner.status()
        return WouldCut(model, status.state, status.pid, live.waiting, live.running, runner.exchanges)

    def log_tail(self, model: str, lines: int = 100) -> list[str]:
        """Return the last lines of the engine's output, of the present or the last process."""
        return self._runner(model).log_tail(lines)

    def follow_log(self, model: str, lines: int = 100) -> LogFollower:
        """Follow the engine's output over its generations; close the follower. One that is too slow is dropped."""
        return self._runner(model).follow_log(lines)

    @property
    def state_problem(self) -> str:
        """Why nothing survives this proxy; empty while it does, or is not meant to."""
        return self._state.problem

    def _wanted(self, model: str) -> bool:
        live = self._requests.live(model)
        return bool(live.waiting or live.running)

    def _runner(self, model: str) -> ModelRunner:
        runner = self._runners.get(model)
        if runner is None:
            raise ProxyError(ErrorCode.MODEL_NOT_FOUND, f"model {model!r} does not exist", param="model")
        return runner
