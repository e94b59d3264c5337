"""The engine's phases as the proxy shows them: tags, cohorts, standby, metrics; and an engine that has none."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine


@pytest.fixture
def phased(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> Proxy:
    """A slow model with two slots under `drain`."""
    args = ["-t", "1", "-np", "2", "-c", "65536"]
    return start({"models": {"m": {"path": str(zoo("llama-mid")), "args": args, "phase_policy": "drain"}}})


def ask(proxy: Proxy, tokens: int, **more: Any) -> RawStream:
    body = {"model": "m", "prompt": "a small box", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return RawStream(proxy.url, "/v1/completions", {**body, **more})


def slots(proxy: Proxy) -> list[dict[str, Any]]:
    engine = proxy.get("/api/models/m")["engine"]
    return engine["slots"] if engine else []


def places(proxy: Proxy) -> list[dict[str, Any]]:
    listed = proxy.get("/api/requests")["requests"]
    return [{name: one[name] for name in ("state", "reason")} for one in listed]


def test_a_slot_is_tied_to_its_request(phased: Proxy) -> None:
    """The engine carries our tag, so the mirror knows whose slot it is and where its request stands."""
    stream = ask(phased, 20_000)
    assert stream.head() == 200
    stream.event()
    tag = f"{stream.headers['x-request-id']}.1"
    until(
        "the mirror sees it",
        lambda: any(s["request"] == tag and s["member"] == "generate" for s in slots(phased)),
    )
    states = phased.get("/api/models/m")["admission"]["states"]
    assert states == {"generating": 1}
    assert phased.metric("llama_proxy_engine_phase", model="m", phase="generate") == 1
    assert phased.metric("llama_proxy_engine_phase", model="m", phase="unknown") == 0
    assert phased.get("/api/models/m")["backend"]["policy"] == "drain"
    stream.close()


def test_the_standby_waits_natively_and_the_rest_waits_here(phased: Proxy) -> None:
    """Two run, one is the engine's standby, the others stay in the proxy's queue with a reason."""
    running = [ask(phased, 20_000) for _ in range(2)]
    for stream in running:
        assert stream.head() == 200
        stream.event()
    waiting = [ask(phased, 5) for _ in range(4)]
    view = until(
        "one standby, three queued",
        lambda: (v := phased.get("/api/models/m")["admission"])["queued"] == 3 and v,
    )
    assert view["charged"] == 3
    assert view["slots"] == 2
    assert sum(view["reasons"].values()) == 3
    until(
        "the standby says so", lambda: {"state": "native_queued", "reason": "cohort_sealed"} in places(phased)
    )
    for stream in running:
        stream.close()
    for stream in waiting:
        assert stream.head() == 200
        assert stream.rest()[-1] == b"data: [DONE]"


def test_cohorts_and_waits_are_counted_from_the_engines_own_events(phased: Proxy) -> None:
    """Twelve requests: every one is in one cohort, the sizes add up, each has its waits observed once."""
    assert phased.post("/api/models/m/load?wait=60", {}, timeout_s=70)[1]["status"] == "ready"
    gate = {"state": "blocked", "reason": "until all are there", "mode": "hold"}
    assert phased.post("/api/models/m/gate", gate)[0] == 200
    streams = [ask(phased, 100 + n) for n in range(12)]
    until("all wait", lambda: phased.get("/api/models/m")["admission"]["queued"] == 12)
    assert phased.post("/api/models/m/gate", {"state": "open"})[0] == 200

    def finish(stream: RawStream) -> None:
        assert stream.head() == 200
        stream.rest()

    threads = [threading.Thread(target=finish, args=(s,)) for s in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    def seen(name: str) -> float:
        return phased.metric(f"llama_proxy_{name}", model="m")

    until("all cohorts are seen", lambda: seen("cohort_size_sum") == 12)
    assert seen("cohorts_total") == seen("cohort_size_count") <= 9
    for histogram in ("barrier_wait_seconds", "native_queue_seconds"):
        until(f"{histogram} of each", lambda h=histogram: seen(f"{h}_count") == 12)
    assert seen("engine_phase_seconds_total") > 0


def test_the_cohort_is_named_where_it_was_seen(phased: Proxy) -> None:
    """A plain answer, whose head comes last, names its cohort (a stream's head comes before there is one)."""
    ask(phased, 1).head()
    answer = ask(phased, 800, stream=False)
    assert answer.head() == 200
    assert int(answer.headers["x-cohort-id"]) >= 1


def test_a_stock_engine_serves_without_phases(
    start: Callable[..., Proxy], zoo: Callable[[str], Path], stock_binary: Path
) -> None:
    """Degraded, and saying so: phase `unknown`, own grants as the only gate, everything answered."""
    proxy = start({
        "engine": {"dir": str(stock_binary)},
        "models": {"m": {"path": str(zoo("llama-mid")), "args": ["-t", "1", "-np", "2", "-c", "8192"]}},
    })  # fmt: skip
    streams = [ask(proxy, 20) for _ in range(6)]
    for stream in streams:
        assert stream.head() == 200
        assert stream.rest()[-1] == b"data: [DONE]"
    described = proxy.get("/api/models/m")
    assert described["backend"]["policy"] == "unknown"
    assert described["engine"]["phase"] == "unknown"
    assert proxy.metric("llama_proxy_engine_phase", model="m", phase="unknown") == 1
    until("the ledger is zero", lambda: proxy.metric("llama_proxy_requests_inflight") == 0)
