"""Fixtures for tests over HTTP against a real llama-server, patched and unpatched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.engine.enginekit.check import assert_rested
from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.oracle import Oracle
from tests.engine.enginekit.server import EXACT, Server
from tests.engine.enginekit.zootable import cell, record

HERE = Path(__file__).resolve().parent
TEST_TIMEOUT_S, SOAK_TIMEOUT_S = 900, 3600
ORACLES_RUNNING = 6

EngineFactory = Callable[..., Server]
OracleFactory = Callable[..., Oracle]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark everything here ``engine``, bound its time, and leave soaks to ``-m soak``."""
    asked = "soak" in str(config.getoption("-m") or "")
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        if HERE not in item.path.parents:
            kept.append(item)
            continue
        item.add_marker(pytest.mark.engine)
        soak = item.get_closest_marker("soak") is not None
        if config.pluginmanager.hasplugin("timeout") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT_S if soak else TEST_TIMEOUT_S))
        (left if soak and not asked else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


# cells of the zoo's table that this session tested, and whether every phase of the test passed
_cells: dict[str, bool] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember what the zoo contract proved."""
    report = yield
    key = cell(item)
    if key is not None and not report.skipped:
        _cells[key] = report.passed and _cells.get(key, True)
    return report


def pytest_sessionfinish() -> None:
    """Write it down for the table in the README."""
    record(_cells)


@pytest.fixture
def engine(engine_binary: Path, tmp_path: Path) -> Iterator[EngineFactory]:
    """Return a factory of patched engines; at the end each must be alive, rested and clean.

    Clean means: no slot busy, no mixed batch and no early token under an exclusive policy.
    """
    with ExitStack() as stack:
        started: list[tuple[Server, str]] = []

        def start(
            model: str | Path = "llama",
            policy: str = "drain",
            args: Sequence[str] = (),
            *,
            slots: int = 4,
            context: int = 8192,
            env: dict[str, str] | None = None,
        ) -> Server:
            path = model if isinstance(model, Path) else zoo(model)
            server = Server(
                engine_binary,
                path,
                ("-np", str(slots), "-c", str(context), "--phase-policy", policy, *args),
                tmp_path / f"engine{len(started)}",
                env=env,
            )
            stack.enter_context(server)
            started.append((server, policy))
            return server

        yield start
        for server, policy in started:
            assert_rested(server, policy)


@pytest.fixture
def stock(stock_binary: Path, tmp_path: Path) -> Iterator[EngineFactory]:
    """Return a factory of unpatched engines."""
    with ExitStack() as stack:
        count = 0

        def start(
            model: str | Path = "llama",
            args: Sequence[str] = (),
            *,
            slots: int = 4,
            context: int = 8192,
        ) -> Server:
            nonlocal count
            path = model if isinstance(model, Path) else zoo(model)
            server = Server(
                stock_binary,
                path,
                ("-np", str(slots), "-c", str(context), *args),
                tmp_path / f"stock{count}",
            )
            count += 1
            return stack.enter_context(server)

        yield start


@pytest.fixture(scope="session")
def oracle(stock_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OracleFactory]:
    """Return a factory of oracles, one per set of flags and session; few of their engines run at once."""
    known: dict[tuple[object, ...], Oracle] = {}
    running: OrderedDict[tuple[object, ...], Server] = OrderedDict()

    def server(model: str | Path, args: tuple[str, ...], context: int) -> Server:
        key = (model, args, context)
        if key not in running:
            while len(running) >= ORACLES_RUNNING:
                running.popitem(last=False)[1].stop()
            path = model if isinstance(model, Path) else zoo(model)
            folder = tmp_path_factory.mktemp("oracle")
            started = Server(stock_binary, path, ("-np", "1", "-c", str(context), *args), folder)
            running[key] = started.__enter__()
        running.move_to_end(key)
        return running[key]

    def start(model: str | Path = "llama", args: Sequence[str] = EXACT, *, context: int = 8192) -> Oracle:
        key = (model, tuple(args), context)
        if key not in known:
            known[key] = Oracle(partial(server, *key))
        return known[key]

    try:
        yield start
    finally:
        for last in running.values():
            last.stop()
