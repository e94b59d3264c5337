"""A proxy with the real engine and small models."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import OPEN
from tests.e2e.harness import Proxy

EXACT = ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]
"""Flags under which a token does not depend on what shares its batch (F32 weights)."""

ROOM = ("-c", "32768")
"""Context in which no slot's request ends by itself during a test."""


def model(path: Path, *args: str, **more: Any) -> dict[str, Any]:
    """One model entry with the flags all tests share."""
    return {"path": str(path), "args": ["-t", "1", "-np", "4", "-c", "8192", *args], **more}


@pytest.fixture(autouse=True)
def _close_sockets() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def start(tmp_path: Path, engine_binary: Path) -> Iterator[Callable[..., Proxy]]:
    """Start proxies with the patched engine; all end with the test, and no engine may outlive them."""
    started: list[Proxy] = []

    def inner(config: dict[str, Any], *, traced: bool = False, **env: str) -> Proxy:
        config.setdefault("engine", {}).setdefault("dir", str(engine_binary))
        proxy = Proxy(config, tmp_path / f"proxy{len(started)}", env, traced=traced)
        started.append(proxy)
        proxy.start()
        return proxy

    yield inner
    for proxy in started:
        proxy.kill_all()


@pytest.fixture
def held_engine(engine_binary: Path, tmp_path: Path) -> Path:
    """The patched engine, whose load goes on only when there is a file `go` beside this one."""
    slow = tmp_path / "slow-llama-server"
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *--help*) ;; *) while [ ! -e {tmp_path}/go ]; do sleep 0.1; done ;; esac\n'
        f'exec {engine_binary} "$@"\n'
    )
    slow.chmod(0o755)
    return slow


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, engine_binary: Path, zoo: Callable[[str], Path]
) -> Iterator[Proxy]:
    """One proxy for tests that leave no trace: a fast chat model, a slow one, an embedder."""
    config = {
        "engine": {"dir": str(engine_binary)},
        "server": {"max_body_bytes": 1_000_000},
        "models": {
            "tiny": model(zoo("llama"), *EXACT, aliases=["default"]),
            "mid": model(zoo("llama-mid"), *EXACT, *ROOM),
            "embed": {"path": str(zoo("bert-embed")), "args": ["-t", "1", "-np", "4", "--embeddings", "-b", "2048", "-ub", "2048", "-c", "8192"]},
        },
    }  # fmt: skip
    with Proxy(config, tmp_path_factory.mktemp("shared")) as proxy:
        yield proxy
