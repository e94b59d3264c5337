"""What others see of the fleet: the observer it reports to, and frozen records of its state."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from proxy.backends.command import EngineBinary
from proxy.errors import ProxyError
from proxy.settings import Model
from proxy.types import AdminState, BackendKey, Cause, EngineInfo, ModelState, Snapshot

EngineResolver = Callable[[Model], Awaitable[EngineBinary]]
"""Finds (or builds) the llama-server of a model. A `ProxyError` it raises fails the load with its words."""

Verify = Callable[[int, Path], Awaitable[str]]
"""Checks a running process (pid) against the manifest in an engine folder; returns the identity level.
Raises `ProxyError` (`identity_mismatch`) to refuse the load."""


class Kind(StrEnum):
    """How a model's backend comes to be; label `backend`."""

    PROCESS = "process"
    REMOTE = "remote"
    DNS = "dns"


class Stage(StrEnum):
    """How far a load has come."""

    WAKING = "waking"
    MEMORY = "memory"
    ENGINE = "engine"
    STARTING = "starting"
    LOADING = "loading"
    VERIFYING = "verifying"
    PROBING = "probing"


class FleetObserver(Protocol):
    """Told of everything that happens, synchronously and in order. May not raise, block or call back in."""

    def on_state(self, model: str, before: ModelState, after: ModelState, cause: Cause) -> None: ...

    def on_ready(self, key: BackendKey, info: EngineInfo) -> None: ...

    def on_down(self, key: BackendKey, error: ProxyError) -> None:
        """A ready backend is gone or about to be stopped. End its requests now: sockets close next."""

    def on_draining(self, key: BackendKey, draining: bool) -> None:
        """A ready engine is to get no new requests (or is again); what runs there goes on."""

    def on_load_failed(self, model: str, error: ProxyError) -> None: ...

    def on_snapshot(self, snapshot: Snapshot) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model at this instant. `since` is the (monotonic) time of the last state change.

    While loading: its `stage`, and what a load in stage `waking` or `memory` waits for.

    While `failed`: `strikes` failures in a row, `retry_at` the (monotonic) time before which requests start nothing,
    `restart` whether it is tried then by itself.
    """

    model: str
    kind: Kind
    state: ModelState
    admin: AdminState
    reason: str
    cause: Cause
    generation: int
    since: float
    stage: Stage | None = None
    waits_for: str = ""
    pid: int | None = None
    port: int | None = None
    info: EngineInfo | None = None
    identity: str = ""
    exchanges: int = 0
    last_error: str = ""
    strikes: int = 0
    retry_at: float | None = None
    restart: bool = False


class Then(StrEnum):
    """What holds after an unload: `open` lets the next request load the model again, `block` keeps it down."""

    OPEN = "open"
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class UnloadReport:
    """How an unload went.

    `before` is the state it found; `cut` counts exchanges that were ended; `code` and `signals` tell how the process
    ended; `left` are process ids that survived a KILL (should be empty). Of a force-unload: `queued` and `running`
    requests were ended, `names` are their ids, `unsettled` those of them that are still in the books (should be
    empty), `job` is its job's id, `problem` says why a gate will not survive the proxy.
    """

    model: str
    before: ModelState
    forced: bool
    cut: int = 0
    code: int | None = None
    signals: tuple[str, ...] = ()
    left: tuple[int, ...] = ()
    seconds: float = 0.0
    queued: int = 0
    running: int = 0
    names: tuple[str, ...] = ()
    unsettled: tuple[str, ...] = ()
    job: str = ""
    problem: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing is left: no process, no request."""
        return not self.left and not self.unsettled


@dataclass(frozen=True, slots=True)
class WouldCut:
    """What a force-unload would end, were it run now."""

    model: str
    state: ModelState
    pid: int | None
    waiting: tuple[str, ...]
    running: tuple[str, ...]
    exchanges: int
