"""Each time limit ends a request with its own code and leaves nothing behind; a pause is nobody's silence."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream, data
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine

PAUSE_S = 6.0
SILENCE_S = 2.0


def ask(proxy: Proxy, tokens: int, prompt: str = "a small box", **more: Any) -> RawStream:
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, **more}
    return RawStream(proxy.url, "/v1/completions", body, timeout_s=240)


def begun(stream: RawStream) -> RawStream:
    """Read on to the first content of a stream."""
    assert stream.head() == 200
    while data(stream.event()) is None:
        pass
    return stream


def whole(proxy: Proxy, prompt: str) -> None:
    """Ask and read to the end."""
    begun(ask(proxy, 2, prompt)).rest()


def nothing_left(proxy: Proxy) -> bool:
    view = proxy.get("/api/models/m")
    slots = view["engine"]["slots"] if view["engine"] else []
    return not any(slot["busy"] for slot in slots) and view["admission"]["states"] == {}


def one_slot(
    path: Path, budgets: dict[str, float], admission: dict[str, Any] | None = None
) -> dict[str, Any]:
    entry = {"path": str(path), "args": ["-t", "1", "-np", "1", "-c", "16384"], "budgets": budgets}
    return {"engine": {"phase_policy": "mixed"}, "admission": admission or {}, "models": {"m": entry}}


def test_queue_timeout(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    """Who finds no slot in time gets 429 with a time to come back; who runs goes on."""
    proxy = start(one_slot(zoo("llama-mid"), {}, {"queue_timeout_s": 1, "keepalive_s": 0}))
    running = begun(ask(proxy, 10_000))
    late = ask(proxy, 4)
    assert late.head() == 429
    assert b'"queue_timeout"' in late.whole()
    assert 1 <= int(late.headers["retry-after"]) <= 60
    assert data(running.event())
    running.close()
    until("nothing is left", lambda: nothing_left(proxy))


def test_queue_timeout_goes_on_behind_the_slots(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """The engine's own queue is a queue: the standby is told why it waits, and not for longer than allowed."""
    config = one_slot(zoo("llama-mid"), {}, {"queue_timeout_s": 2, "keepalive_s": 0.3})
    proxy = start({**config, "engine": {"phase_policy": "drain"}})
    running = begun(ask(proxy, 10_000))
    standby = ask(proxy, 4)
    assert standby.head() == 200
    events = standby.rest()
    assert b": native_queued reason=cohort_sealed" in events
    assert data(events[-1])["error"]["code"] == "queue_timeout"
    assert proxy.metric("llama_proxy_hold_seconds_total", model="m", reason="cohort_sealed") > 1
    assert data(running.event())
    running.close()
    until("nothing is left", lambda: nothing_left(proxy))


def test_first_token_timeout(start: Callable[..., Proxy], demo_model: Path) -> None:
    """A prompt that takes longer than allowed is given up in the engine, too. (The engine begins a stream with
    the prompt, so a streaming client is told in the stream.)"""
    proxy = start(one_slot(demo_model, {"first_token_timeout_s": 2}))
    begun(ask(proxy, 1)).rest()
    for stream in (False, True):
        slow = ask(proxy, 4, f"{stream} the small box " * 1500, stream=stream)
        told = data(slow.rest()[-1]) if slow.head() == 200 else json.loads(slow.whole())
        assert told["error"]["code"] == "first_token_timeout"
        assert stream or slow.status == 504
        until("the engine lets go", lambda: nothing_left(proxy), 60)
    begun(ask(proxy, 1)).rest()


def test_total_timeout(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    """A stream that is too long as a whole ends with an event."""
    proxy = start(one_slot(zoo("llama-mid"), {"total_timeout_s": 5}))
    assert proxy.post("/api/models/m/load?wait=60", {}, timeout_s=70)[1]["status"] == "ready"
    events = ask(proxy, 16_000)
    assert events.head() == 200
    assert data(events.rest()[-1])["error"]["code"] == "total_timeout"
    until("nothing is left", lambda: nothing_left(proxy))


def test_load_timeout(start: Callable[..., Proxy], tmp_path: Path) -> None:
    """An engine that never listens: whoever waits for it is told, streaming or not."""
    script = tmp_path / "deaf.sh"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    proxy = start({
        "admission": {"keepalive_s": 0.5},
        "models": {"m": {"cmd": f"sh {script} ${{PORT}}", "budgets": {"load_timeout_s": 5}}},
    })  # fmt: skip
    stream = ask(proxy, 4)
    assert stream.head() == 200
    whole_one = ask(proxy, 4, stream=False)
    events = stream.rest()
    assert events[0].startswith(b": queued position=1 reason=model_loading")
    assert data(events[-1])["error"]["code"] == "load_timeout"
    assert whole_one.head() == 504
    until("nothing is left", lambda: proxy.metric("llama_proxy_requests_inflight") == 0)


def test_gate_hold_timeout(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    """Who is held by a gate learns of it in bounded time, in the stream or with a status; who runs goes on."""
    proxy = start(one_slot(zoo("llama-mid"), {}, {"gate_hold_max_s": 5, "keepalive_s": 0.2}))
    running = begun(ask(proxy, 10_000))
    assert (
        proxy.post("/api/models/m/gate", {"state": "blocked", "reason": "new driver", "mode": "hold"})[0]
        == 200
    )
    held = ask(proxy, 4)
    assert held.head() == 200
    whole_one = ask(proxy, 4, stream=False)
    events = held.rest()
    assert events[0].startswith(b": queued position=1 reason=gate_blocked")
    assert data(events[-1])["error"]["code"] == "gate_hold_timeout"
    assert whole_one.head() == 504
    assert b'"gate_hold_timeout"' in whole_one.whole()
    assert proxy.metric("llama_proxy_hold_seconds_total", model="m", reason="gate_blocked") >= 10
    assert data(running.event())
    running.close()
    until("nothing is left", lambda: nothing_left(proxy))


def test_a_stopped_engine_is_silence(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    """SIGSTOP in the middle of a stream: it ends with `inter_token_timeout`; when the engine goes on, nothing
    of it is left there."""
    proxy = start(one_slot(zoo("llama-mid"), {"inter_token_timeout_s": SILENCE_S}))
    stream = begun(ask(proxy, 10_000))
    [engine] = proxy.engines()
    engine.suspend()
    try:
        events = stream.rest()
        assert data(events[-1])["error"]["code"] == "inter_token_timeout"
    finally:
        engine.resume()
    until("nothing is left", lambda: nothing_left(proxy), 60)
    begun(ask(proxy, 2)).rest()


def test_a_pause_by_yield_is_no_silence(start: Callable[..., Proxy], demo_model: Path) -> None:
    """`inter_token_timeout_s: 2` and a pause of six seconds and more: the stream survives, whole, and its client
    is told meanwhile that it is paused."""
    args = ["-t", "1", "-np", "2", "-b", "256", "-c", "40960"]
    entry = {
        "path": str(demo_model),
        "args": args,
        "phase_policy": "yield",
        "phase_yield_ms": 200,
        "budgets": {"inter_token_timeout_s": SILENCE_S},
    }
    proxy = start({"admission": {"keepalive_s": 1}, "models": {"m": entry}})
    begun(ask(proxy, 1)).rest()
    began = time.monotonic()
    begun(ask(proxy, 1, "one two three four " * 500)).rest()
    took_s = time.monotonic() - began
    stream = begun(ask(proxy, 20_000))
    gap_s, told = 0.0, 0
    for scale in (1.5, 3, 6):
        # how long it takes to read is the machine's: longer prompts until the pause is long enough
        words = min(3800, int(500 * scale * PAUSE_S / took_s))
        other = threading.Thread(target=whole, args=(proxy, f"{scale} five six seven " * words))
        other.start()
        last = time.monotonic()
        while other.is_alive():
            event = stream.event()
            assert event
            assert b'"error"' not in event
            told += event == b": paused"
            if data(event) is not None:
                gap_s, last = max(gap_s, time.monotonic() - last), time.monotonic()
        other.join()
        if gap_s >= PAUSE_S:
            break
    print(f"the stream was silent for {gap_s:.1f} s, with {told} comments")
    assert gap_s >= PAUSE_S
    assert told >= 3
    for _ in range(10):
        assert b'"error"' not in stream.event()
    stream.close()
    until("nothing is left", lambda: nothing_left(proxy))
