"""Fixtures of the backends' tests: a real llama-server, a fleet with a recorder for an observer."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proxy.backends import EngineBinary, Fleet
from proxy.catalog import Catalog
from proxy.clock import monotonic
from proxy.errors import ProxyError
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.types import BackendKey, Cause, EngineInfo, ModelState, Snapshot
from proxy.upstream import UpstreamRequest
from tests.support.processes import alive as alive

SMALL = ("-c", "4096", "-t", "1", "--no-warmup")
ALONE = ["-c", "16384", "-np", "1"]
"""One slot with room for an answer of `ENDLESS` tokens."""
ENDLESS = 15_000
"""Minutes of the mid-sized model: no machine stands still for so long that a test sees the end of it."""


def _file(*variables: str) -> Path:
    for variable in variables:
        if os.environ.get(variable):
            path = Path(os.environ[variable])
            if not path.exists():
                pytest.fail(f"{variable}={path} does not exist")
            return path
    pytest.skip(f"needs {' or '.join(variables)}")


@pytest.fixture(scope="session")
def engine_binary() -> Path:
    """A real llama-server."""
    return _file("LLAMA_SERVER_STOCK", "LLAMA_SERVER_BIN")


@pytest.fixture(scope="session")
def mid_model(zoo: Callable[[str], Path]) -> Path:
    """The zoo's mid-sized model: a few ms per token."""
    return zoo("llama-mid")


async def eventually(what: Callable[[], Any], timeout_s: float = 20.0, every_s: float = 0.01) -> Any:
    """Return the first true value of `what`, fail after the deadline."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(every_s)


@dataclass
class Recorder:
    """An observer that writes down what it is told, with times."""

    calls: list[tuple[str, Any, float]] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)

    def _note(self, name: str, value: Any) -> None:
        self.calls.append((name, value, time.monotonic()))

    def on_state(self, model: str, before: ModelState, after: ModelState, cause: Cause) -> None:
        self._note("state", (model, before.value, after.value, cause.value))

    def on_ready(self, key: BackendKey, info: EngineInfo) -> None:
        self._note("ready", (key, info))

    def on_down(self, key: BackendKey, error: ProxyError) -> None:
        self._note("down", (key, error))

    def on_draining(self, key: BackendKey, draining: bool) -> None:
        self._note("draining", (key, draining))

    def on_load_failed(self, model: str, error: ProxyError) -> None:
        self._note("load_failed", (model, error))

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def of(self, name: str) -> list[Any]:
        return [value for found, value, _ in self.calls if found == name]

    def states(self, model: str) -> list[str]:
        return [after for name, _, after, _ in self.of("state") if name == model]


def make_fleet(
    models: dict[str, Any],
    engine: Path | None = None,
    *,
    engine_args: tuple[str, ...] = SMALL,
    patched: bool = False,
    metrics: Metrics | None = None,
    memory: dict[str, Any] | None = None,
    hosts: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[Fleet, Recorder]:
    """Build a fleet of these models; each has a `stop.grace_s` of 3 unless it says otherwise."""
    configured = {name: {"stop": {"grace_s": 3}} | model for name, model in models.items()}
    settings = Settings.model_validate(
        {"models": configured, "engine": {"args": engine_args}, "memory": memory or {}, "hosts": hosts or {}}
    )
    recorder = Recorder()

    async def resolve(_model: Any) -> EngineBinary:
        assert engine is not None
        return EngineBinary(engine, patched=patched)

    fleet = Fleet(
        settings,
        Catalog(settings.models),
        metrics or Metrics(),
        monotonic,
        engine_resolver=resolve,
        observer=recorder,
        **more,
    )
    return fleet, recorder


@pytest.fixture
async def fleets() -> AsyncIterator[Callable[..., tuple[Fleet, Recorder]]]:
    """Make fleets that are stopped at the end of the test; no task of theirs may be left."""
    made: list[Fleet] = []

    def make(*args: Any, **kwargs: Any) -> tuple[Fleet, Recorder]:
        fleet, recorder = make_fleet(*args, **kwargs)
        made.append(fleet)
        return fleet, recorder

    yield make
    for fleet in made:
        await fleet.stop(8)
    left = [t.get_name() for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    assert not [
        name
        for name in left
        if name.split(":")[0]
        in {"load", "watch", "stop", "clear", "mirror", "stop-process", "retry", "leftovers"}
    ]


def completion(n_predict: int, *, stream: bool = True, prompt: str = "once upon a time") -> UpstreamRequest:
    """Return a completion that runs to its length."""
    import orjson

    body = orjson.dumps(
        {"prompt": prompt, "n_predict": n_predict, "ignore_eos": True, "stream": stream, "temperature": 0}
    )
    return UpstreamRequest("POST", "/completion", (("Content-Type", "application/json"),), body)


class Collect:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.first = asyncio.Event()

    async def write(self, data: bytes) -> None:
        self.parts.append(data)
        self.first.set()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)
