"""An engine whose slots cannot be seen for a while: service goes on, and what had changed is told afterwards."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream, data
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine

BLIND_S = 5.0
VEIL = Path(__file__).with_name("veil.py")


def ask(url: str, name: str, tokens: int) -> RawStream:
    body = {"model": "m", "prompt": name, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    stream = RawStream(url, "/v1/completions", body, timeout_s=120, headers={"x-request-id": name})
    assert stream.head() == 200
    return stream


def first(stream: RawStream) -> RawStream:
    while data(stream.event()) is None:
        pass
    return stream


def backend(proxy: Proxy) -> dict[str, Any]:
    [found] = proxy.get("/api/models/m")["admission"]["backends"]
    return dict(found)


def test_five_seconds_without_a_view(
    start: Callable[..., Proxy], zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    """Meanwhile one client leaves, a stranger takes a slot, others are served; the metric tells the age; afterwards
    one line says what was found, and the books are right again."""
    engine = f"${{ENGINE}} -m {zoo('llama-mid')} -t 1 -np 4 -c 131072 --phase-policy mixed"
    command = f"{sys.executable} {VEIL} {tmp_path} ${{PORT}} {engine}"
    # the watchdog would take so long a silence for a wedge
    proxy = start({"models": {"m": {"cmd": command, "wedge_after_s": 0}}}, traced=True)
    stays = first(ask(proxy.url, "stays", 20_000))
    leaves = first(ask(proxy.url, "leaves", 20_000))
    until("the view is fresh", lambda: backend(proxy)["mirror"] == "native")

    cut = tmp_path / "cut"
    cut.touch()
    began = time.monotonic()
    until("polls fail", (tmp_path / "swallowed").exists)
    stranger = first(ask(f"http://127.0.0.1:{(tmp_path / 'port').read_text()}", "stranger", 20_000))
    leaves.close()
    until("the books say so", lambda: backend(proxy)["mirror"] == "stale")
    assert proxy.metric("llama_proxy_mirror_age_seconds", model="m") > 3
    served = 0
    while time.monotonic() - began < BLIND_S or served == 0:
        assert proxy.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})[0] == 200
        served += 1
    assert data(stays.event())
    assert not [line for line in proxy.events() if line.get("event") == "view of the engine is back"]

    cut.unlink()

    def told() -> list[dict[str, Any]]:
        return [line for line in proxy.events() if line.get("event") == "view of the engine is back"]

    [line] = until("what differed is told", told)
    print(json.dumps(line))
    assert line["blind_s"] > 3
    assert line["ended"] == ["leaves"]
    assert line["foreign"] == 1
    assert proxy.metric("llama_proxy_mirror_mismatch_total", model="m") >= 1
    assert proxy.metric("llama_proxy_mirror_age_seconds", model="m") < 3
    now = backend(proxy)
    assert (now["mirror"], now["foreign"], now["cancelling"]) == ("native", 1, 0)
    stranger.close()
    until("the stranger is gone", lambda: backend(proxy)["foreign"] == 0)
    stays.close()
    until("nothing is left", lambda: proxy.metric("llama_proxy_requests_inflight") == 0)
    assert [step["broken"] for step in proxy.trace() if step["broken"]] == []


@pytest.fixture
def without_slots(
    zoo: Callable[[str], Path], tmp_path: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A stock llama-server that somebody started with `--no-slots`, and its address."""
    stock = os.environ.get("LLAMA_SERVER_STOCK")
    if not stock:
        pytest.skip("needs LLAMA_SERVER_STOCK")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--host 127.0.0.1 --port {port} -t 1 -np 2 -c 32768 --no-warmup --no-slots"
    with (tmp_path / "stock.log").open("wb") as log:
        engine = subprocess.Popen(
            [stock, "-m", str(zoo("llama-mid")), *flags.split()], stdout=log, stderr=log
        )
    yield f"http://127.0.0.1:{port}", engine
    engine.kill()
    engine.wait()


def test_an_engine_that_shows_no_slots_serves(
    start: Callable[..., Proxy], without_slots: tuple[str, subprocess.Popen[bytes]]
) -> None:
    """Its 501 is an answer: by our own books it serves as ever, past queue and leaving clients, until it is really gone."""
    url, engine = without_slots
    proxy = start({"models": {"m": {"url": url}}}, traced=True)
    stays = first(ask(proxy.url, "stays", 20_000))
    until("it is known that nothing can be seen", lambda: backend(proxy)["mirror"] == "absent")
    leaves = first(ask(proxy.url, "leaves", 20_000))
    body = {"model": "m", "prompt": "a", "max_tokens": 2}
    with ThreadPoolExecutor(4) as clients:
        waiting = [clients.submit(proxy.post, "/v1/completions", body) for _ in range(4)]
        until("all others wait", lambda: proxy.get("/api/models/m")["admission"]["queued"] == 4)
        leaves.close()
        assert [one.result()[0] for one in waiting] == [200] * 4
    assert data(stays.event())
    shown = proxy.get("/api/models/m")
    assert (shown["state"], shown["backend"]["generation"]) == ("ready", 1)
    assert proxy.metric("llama_proxy_crashes_total", model="m") == 0
    told = [line for line in proxy.events() if line.get("event") == "no usable slots"]
    assert len(told) == 1 and "501" in told[0]["error"]

    engine.kill()
    until("its end is noticed", lambda: proxy.metric("llama_proxy_crashes_total", model="m") == 1)
    assert [step["broken"] for step in proxy.trace() if step["broken"]] == []
