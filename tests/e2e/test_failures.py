"""Engines that die, models that cannot load, proxies that are stopped or killed."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import openai
import psutil
import pytest

from tests.e2e.client import RawStream, data
from tests.e2e.conftest import model
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine

LONG = {"max_tokens": 6000, "stream": True, "ignore_eos": True}


@pytest.fixture
def slow(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> Proxy:
    return start({"models": {"m": model(zoo("llama-mid"))}})


def test_a_killed_engine_ends_streams_with_an_error_event(slow: Proxy) -> None:
    """SIGKILL mid-stream: whole events only, then one error event within a second, then the end; the next request reloads."""
    stream = RawStream(slow.url, "/v1/completions", {"model": "m", "prompt": "a", **LONG}, timeout_s=10)
    assert stream.head() == 200
    assert stream.event()
    [engine] = slow.engines()
    killed = engine.pid
    engine.kill()
    stream.sock.settimeout(1.0)
    events = stream.rest()
    assert data(events[-1])["error"]["code"] == "upstream_error"
    assert b"[DONE]" not in b"".join(events)
    for event in events[:-1]:
        assert data(event)["choices"]
    status, _ = slow.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})
    assert status == 200
    assert slow.engines()[0].pid != killed
    assert slow.metric("llama_proxy_crashes_total", model="m") == 1


def test_the_openai_sdk_raises_on_a_killed_engine(slow: Proxy, request: pytest.FixtureRequest) -> None:
    """The in-stream error is an APIError, not a silent end."""
    client = openai.OpenAI(base_url=slow.url + "/v1", api_key="none", max_retries=0, timeout=20)
    request.addfinalizer(client.close)
    stream = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=6000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    slow.engines()[0].kill()
    with pytest.raises(openai.APIError, match=r"(?i)engine|upstream"):
        for _ in stream:
            pass


def test_a_model_that_does_not_exist_fails_all_waiters(start: Callable[..., Proxy], tmp_path: Path) -> None:
    """Ten waiters get the engine's own words within three seconds."""
    proxy = start({"models": {"ghost": {"path": str(tmp_path / "ghost.gguf")}}})
    answers: list[tuple[int, dict[str, dict[str, str]]]] = []

    def ask() -> None:
        answers.append(proxy.post("/v1/completions", {"model": "ghost", "prompt": "a"}, timeout_s=3))

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(answers) == 10
    for status, body in answers:
        assert status == 502
        assert body["error"]["code"] == "model_load_failed"
        assert "ghost.gguf" in body["error"]["message"]
    assert proxy.metric("llama_proxy_requests_inflight") == 0


def test_sigterm_drains_or_cuts_by_its_deadline(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """A short stream ends by itself, a long one is cut with an error event, queued ones get 503; no process is left."""
    proxy = start({
        "server": {"shutdown_drain_s": 4},
        "engine": {"phase_policy": "mixed"},
        "models": {"m": {"path": str(zoo("llama-mid")), "args": ["-t", "1", "-np", "2", "-c", "16384"]}},
    })  # fmt: skip
    long = RawStream(proxy.url, "/v1/completions", {"model": "m", "prompt": "a", **LONG}, timeout_s=20)
    short = RawStream(
        proxy.url, "/v1/completions", {"model": "m", "prompt": "b", **LONG, "max_tokens": 300}, timeout_s=20
    )
    for stream in (long, short):
        assert stream.head() == 200
        assert stream.event()
    queued = RawStream(
        proxy.url, "/v1/completions", {"model": "m", "prompt": "c", "max_tokens": 5}, timeout_s=20
    )
    until("one is queued", lambda: proxy.metric("llama_proxy_requests_inflight", state="queued") == 1)
    family = proxy.children()
    assert proxy.process is not None
    proxy.process.send_signal(signal.SIGTERM)
    assert queued.head() == 503
    assert b"shutting_down" in queued.whole()
    assert short.rest()[-1] == b"data: [DONE]"
    assert data(long.rest()[-1])["error"]["code"] == "shutting_down"
    assert proxy.process.wait(10) == 0
    until("no process is left", lambda: not any(p.is_running() and p.status() != "zombie" for p in family), 3)


def test_a_second_sigterm_does_not_wait_for_a_stubborn_engine(
    start: Callable[..., Proxy], zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    """An engine that ignores TERM has a grace; whoever asks again gets a kill, and still an orderly end."""
    script = tmp_path / "stubborn.sh"
    script.write_text(
        "trap '' TERM\n"
        f'"$1" -m {zoo("llama")} --host 127.0.0.1 --port "$2" -t 1 -np 2 -c 2048 &\n'
        "while true; do sleep 60; done\n"
    )
    proxy = start({
        "server": {"shutdown_drain_s": 30},
        "models": {"m": {"cmd": f"sh {script} ${{ENGINE}} ${{PORT}}", "stop": {"grace_s": 28}}},
    })  # fmt: skip
    assert proxy.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})[0] == 200
    family = proxy.children()
    assert proxy.process is not None
    proxy.process.send_signal(signal.SIGTERM)
    until("the engine is being stopped", lambda: '"stopping"' in proxy.tail(), 10)
    proxy.process.send_signal(signal.SIGTERM)
    assert proxy.process.wait(10) == 0
    assert '"stopped"' in proxy.tail(2)
    until("no process is left", lambda: not any(_alive(p) for p in family), 3)


def test_a_closed_terminal_drains(slow: Proxy) -> None:
    """SIGHUP is a request to stop like SIGTERM: streams end with words, not with a torn socket."""
    stream = RawStream(
        slow.url, "/v1/completions", {"model": "m", "prompt": "a", **LONG, "max_tokens": 200}, timeout_s=20
    )
    assert stream.head() == 200
    assert stream.event()
    assert slow.process is not None
    slow.process.send_signal(signal.SIGHUP)
    assert stream.rest()[-1] == b"data: [DONE]"
    assert slow.process.wait(10) == 0


def test_sigkill_leaves_no_engine_and_a_restart_works(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """The engine dies with its proxy; the same port serves again at once."""
    proxy = start({"models": {"m": model(zoo("llama-mid"))}})
    stream = RawStream(proxy.url, "/v1/completions", {"model": "m", "prompt": "a", **LONG})
    assert stream.head() == 200
    family = proxy.children()
    assert any("llama-server" in p.name() for p in family)
    port = int(proxy.url.rsplit(":", 1)[1])
    os.kill(proxy.pid, signal.SIGKILL)
    assert proxy.process is not None
    proxy.process.wait(10)
    until("no engine survives", lambda: not any(_alive(p) for p in family), 3)
    proxy.config["server"]["port"] = port
    proxy.start()
    assert proxy.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})[0] == 200


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != "zombie"
    except psutil.NoSuchProcess:
        return False
