"""What can be seen of one model at work: its state, its log, its slots, the way to its engine.

Reading is free and changes nothing; who changes it is the runner (`runner.py`).
"""

from typing import Final

from proxy.backends.bringup import Progress, Recipe
from proxy.backends.client import DeadUpstream
from proxy.backends.lifecycle import Life
from proxy.backends.logfeed import LogFollower
from proxy.backends.process import EngineProcess
from proxy.backends.serving import Serving
from proxy.backends.views import Kind, ModelStatus, Stage
from proxy.clock import Clock
from proxy.errors import ProxyError
from proxy.settings import Model
from proxy.types import BackendKey, ModelState, SlotView, Snapshot
from proxy.upstream import Upstream

_WAITS: Final = (Stage.WAKING, Stage.MEMORY)


def kind_of(model: Model) -> Kind:
    """Return how a model's backend comes to be."""
    return Kind.DNS if model.dns is not None else Kind.REMOTE if model.url is not None else Kind.PROCESS


class Sight:
    """The read side of a runner, and what it reads. All of it belongs to the event loop's thread."""

    def __init__(self, recipe: Recipe, clock: Clock) -> None:
        self.name: Final = recipe.name
        self._recipe = recipe
        self._clock = clock
        self._life = Life()
        self._since = clock()
        self._live: Serving | None = None
        self._progress: Progress | None = None
        self._last_process: EngineProcess | None = None
        self._failure: ProxyError | None = None

    @property
    def settings(self) -> Model:
        """The configuration of what serves, or is still being stopped; without that the one of the next start."""
        return (self._live.recipe if self._live is not None else self._recipe).model

    @property
    def kind(self) -> Kind:
        """How its backend comes to be."""
        return kind_of(self.settings)

    @property
    def key(self) -> BackendKey | None:
        """The ready generation's key, None when there is none."""
        return self._live.key if self._live and self._life.operational is ModelState.READY else None

    def upstream(self, key: BackendKey) -> Upstream:
        """Return the way to an engine of this generation; a dead end when it is not the present one."""
        client = self._live.client(key) if self._live is not None and self.key is not None else None
        if client is not None:
            return client
        return DeadUpstream(f"backend generation {key.generation} of model {self.name!r} is gone")

    def poke(self, key: BackendKey) -> None:
        """Poll `/slots` now; a stale key changes nothing."""
        if self._live is not None:
            self._live.poke(key)

    def poke_now(self) -> None:
        """Poll the slots of all that is ready now."""
        if self._live is not None:
            self._live.poke()

    def fresh_slots(self, age_s: float) -> tuple[SlotView, ...] | None:
        """Return the slots of all engines as last seen; None when one of them was not seen for this long."""
        snapshots, now = self.snapshots(), self._clock()
        if not snapshots or any(now - snapshot.asked_at > age_s for snapshot in snapshots):
            return None
        return tuple(slot for snapshot in snapshots for slot in snapshot.slots)

    @property
    def token(self) -> str:
        """The token of the ready backend's run, empty without one."""
        run = self._live.running.run if self._live else None
        return run.token if run else ""

    def snapshot(self) -> Snapshot | None:
        """Return the newest snapshot of the ready generation, of several engines that of the busiest."""
        return max(self.snapshots(), key=lambda snapshot: snapshot.busy, default=None)

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Return the newest snapshot of each engine of the ready generation."""
        return self._live.snapshots if self._live and self.key else ()

    def log_tail(self, lines: int) -> list[str]:
        """Return the last lines of the present or last process."""
        process = self._newest_process
        return process.tail.lines(lines) if process else []

    def follow_log(self, lines: int) -> LogFollower:
        """Follow the output of this and later processes, beginning with the last lines."""
        process = self._newest_process
        first = process.tail.lines(lines) if process else []
        if process is not None and process.tail.unfinished:
            first = first[:-1]
        return self._recipe.feed.follow(first)

    @property
    def _newest_process(self) -> EngineProcess | None:
        return (self._progress.process if self._progress else None) or self._last_process

    @property
    def life(self) -> Life:
        """The model's place on both axes."""
        return self._life

    @property
    def fingerprint(self) -> str:
        """Tells whether the configuration that shapes the process is still the same."""
        return self._recipe.fingerprint

    @property
    def failure(self) -> ProxyError | None:
        """Why the last attempt or the last ready backend failed; None once one is ready again."""
        return self._failure

    @property
    def occupancy(self) -> tuple[ModelState, int | None, float, float | None]:
        """State, process id, time of the last state change, and since when it is idle (None: busy or not ready)."""
        status = self.status()
        return status.state, status.pid, status.since, self.idle_since

    @property
    def idle_since(self) -> float | None:
        """When the ready backend's last exchange ended (or it became ready); None while it is busy or not ready."""
        if self._live is None or self.key is None or self.exchanges:
            return None
        return max(self._since, self._live.quiet_since)

    def status(self) -> ModelStatus:
        """Return the whole state at this instant."""
        running = self._live.running if self._live else None
        progress = self._progress
        process = running.process if running else progress.process if progress else None
        return ModelStatus(
            model=self.name,
            kind=self.kind,
            state=self._life.operational,
            admin=self._life.admin,
            reason=self._life.reason,
            cause=self._life.cause,
            generation=self._life.generation,
            since=self._since,
            stage=progress.stage if progress else None,
            waits_for=progress.waits_for if progress and progress.stage in _WAITS else "",
            pid=process.pid if process and process.code is None else None,
            port=running.port if running else progress.port if progress else None,
            info=running.info if running else None,
            identity=running.identity if running else "",
            exchanges=self.exchanges,
            last_error=self._failure.message if self._failure else "",
            strikes=self._life.strikes,
            retry_at=self._life.retry_at,
            restart=self._life.restart,
        )

    @property
    def exchanges(self) -> int:
        """Requests that are with the engine."""
        return self._live.exchanges if self._live else 0
