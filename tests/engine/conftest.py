"""Fixtures for tests over HTTP against a real llama-server.

``LLAMA_SERVER_BIN`` names the patched binary, ``LLAMA_SERVER_STOCK`` the unpatched
one. A test that needs a binary which is not given is skipped with the reason.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from enginekit.check import assert_rested  # noqa: E402
from enginekit.models import zoo  # noqa: E402
from enginekit.oracle import Oracle  # noqa: E402
from enginekit.server import EXACT, Server  # noqa: E402

PATCHED_ENV, STOCK_ENV = "LLAMA_SERVER_BIN", "LLAMA_SERVER_STOCK"
TEST_TIMEOUT_S = 180

EngineFactory = Callable[..., Server]
OracleFactory = Callable[..., Oracle]


def pytest_configure(config: pytest.Config) -> None:
    """Register this folder's markers."""
    config.addinivalue_line("markers", "engine: needs a llama-server binary")
    config.addinivalue_line("markers", "soak: long; run only when asked for with -m soak")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark everything here ``engine``, bound its time, and leave soaks to ``-m soak``."""
    asked = "soak" in str(config.getoption("-m") or "")
    kept, left = [], []
    for item in items:
        if HERE not in item.path.parents:
            kept.append(item)
            continue
        item.add_marker(pytest.mark.engine)
        soak = item.get_closest_marker("soak") is not None
        if config.pluginmanager.hasplugin("timeout") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800 if soak else TEST_TIMEOUT_S))
        (left if soak and not asked else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _binary(name: str, what: str) -> Path:
    value = os.environ.get(name)
    if not value:
        pytest.skip(f"no {what} engine: set {name} to its llama-server")
    path = Path(value)
    if not path.is_file():
        pytest.fail(f"{name}={value} is not a file")
    return path


@pytest.fixture(scope="session")
def patched_bin() -> Path:
    """Return the patched llama-server."""
    return _binary(PATCHED_ENV, "patched")


@pytest.fixture(scope="session")
def stock_bin() -> Path:
    """Return the unpatched llama-server."""
    return _binary(STOCK_ENV, "unpatched")


@pytest.fixture
def engine(patched_bin: Path, tmp_path: Path) -> Iterator[EngineFactory]:
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
                patched_bin,
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
def stock(stock_bin: Path, tmp_path: Path) -> Iterator[EngineFactory]:
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
                stock_bin,
                path,
                ("-np", str(slots), "-c", str(context), *args),
                tmp_path / f"stock{count}",
            )
            count += 1
            return stack.enter_context(server)

        yield start


@pytest.fixture(scope="session")
def oracle(stock_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OracleFactory]:
    """Return a factory of oracles, one unpatched engine per set of flags and session."""
    with ExitStack() as stack:
        known: dict[tuple[object, ...], Oracle] = {}

        def start(
            model: str | Path = "llama", args: Sequence[str] = EXACT, *, context: int = 8192
        ) -> Oracle:
            key = (model, tuple(args), context)
            if key not in known:
                path = model if isinstance(model, Path) else zoo(model)
                folder = tmp_path_factory.mktemp("oracle")
                server = Server(stock_bin, path, ("-np", "1", "-c", str(context), *args), folder)
                known[key] = Oracle(stack.enter_context(server))
            return known[key]

        yield start
