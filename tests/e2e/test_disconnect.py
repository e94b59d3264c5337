"""Clients that leave, in every phase, through the real server: nothing stays behind."""

import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream
from tests.e2e.fleetload import engine_events
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine

LONG = {"max_tokens": 15_000, "stream": True, "ignore_eos": True}
HELLO = [{"role": "user", "content": "a"}]
ENDPOINTS = pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/messages", {"messages": HELLO}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 15_000}),
    ],
)
STREAM = pytest.mark.parametrize("stream", [True, False])


def inflight(proxy: Proxy, state: str = "") -> float:
    return proxy.metric("llama_proxy_requests_inflight", **({"state": state} if state else {}))


def busy(proxy: Proxy, name: str) -> int:
    """Busy slots of the engine itself; -1 while it does not run."""
    try:
        slots: list[dict[str, Any]] = proxy.get(f"/slots?model={name}")
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return -1
    return sum(1 for slot in slots if slot["is_processing"])


def ended(proxy: Proxy) -> list[str]:
    """The ids of the requests that hold nothing any more, in the order of their ends."""
    return [ticket for step in proxy.trace() for ticket, _ in step["finished"]]


def released(proxy: Proxy, tag: str) -> dict[str, Any]:
    """The engine's own record of the one end of a request."""
    [event] = [e for e in engine_events(proxy) if (e["event"], e["request"]) == ("release", tag)]
    return event


def charged(proxy: Proxy) -> int:
    """What the books hold against the engine of `m`."""
    return int(proxy.get("/api/models/m")["admission"]["charged"])


@pytest.fixture
def one_slot(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> Proxy:
    """A slow model with one slot and no standby."""
    args = ["-t", "1", "-np", "1", "-c", "16384"]
    config = {
        "engine": {"phase_policy": "mixed"},
        "models": {"m": {"path": str(zoo("llama-mid")), "args": args}},
    }
    return start(config, traced=True)


@STREAM
def test_a_queued_client_that_leaves_is_gone_at_once(one_slot: Proxy, stream: bool) -> None:
    """Its place goes to nobody's harm: it is gone long before the runner, which is unharmed."""
    running = RawStream(one_slot.url, "/v1/completions", {"model": "m", "prompt": "a", **LONG})
    assert running.head() == 200
    queued = RawStream(
        one_slot.url,
        "/v1/completions",
        {"model": "m", "prompt": "b", **LONG, "stream": stream},
        headers={"x-request-id": "queued"},
    )
    until("it is queued", lambda: inflight(one_slot, "queued") == 1)
    queued.close()
    until("the queue is empty", lambda: inflight(one_slot, "queued") == 0, 8)
    assert ended(one_slot) == ["queued"]
    assert sum(len(step["granted"]) for step in one_slot.trace()) == 1
    assert running.event()
    running.close()
    until("the ledger is zero", lambda: inflight(one_slot) == 0, 60)
    assert one_slot.metric("llama_proxy_client_disconnects_total", model="m", state="queued") == 1


def test_a_client_that_leaves_while_loading_is_gone_at_once(
    start: Callable[..., Proxy], demo_model: Path, held_engine: Path
) -> None:
    """On every path, streaming or not; the load goes on for others, and only they are granted anything."""
    config = {
        "engine": {"dir": str(held_engine)},
        "models": {"m": {"path": str(demo_model), "args": ["-t", "1", "-np", "2", "-c", "2048"]}},
    }
    proxy = start(config, traced=True)
    asks = [(path, {**ask, "stream": stream}) for path, ask in ENDPOINTS.args[1] for stream in (True, False)]
    for path, ask in asks:
        leaving = RawStream(proxy.url, path, {"model": "m", **LONG, **ask})
        until("it waits for the load", lambda: inflight(proxy, "queued") == 1)
        leaving.close()
        until("it is gone", lambda: inflight(proxy) == 0, 20)
        assert proxy.get("/api/models/m")["state"] in {"starting", "loading"}
    held_engine.with_name("go").touch()
    status, body = proxy.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})
    assert status == 200, body
    assert sum(len(step["granted"]) for step in proxy.trace()) == 1
    assert proxy.metric("llama_proxy_client_disconnects_total", model="m", state="queued") == len(asks)


@STREAM
@ENDPOINTS
def test_a_running_client_that_leaves_frees_the_slot(
    one_slot: Proxy, path: str, ask: dict[str, Any], stream: bool
) -> None:
    """The engine's slot is free long before the answer would end, for a stream and for a plain answer."""
    client = RawStream(
        one_slot.url,
        path,
        {"model": "m", **LONG, **ask, "stream": stream},
        headers={"x-request-id": "leaves"},
    )
    if stream:
        assert client.head() == 200
        assert client.event()
    until("it runs", lambda: inflight(one_slot) == 1 and busy(one_slot, "m") == 1)
    client.close()
    until("the engine's slot is free", lambda: busy(one_slot, "m") == 0, 60)
    until("the ledger is zero", lambda: inflight(one_slot) == 0, 20)
    assert released(one_slot, "leaves.1")["tokens"] < 8000
    status, _ = one_slot.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})
    assert status == 200


def test_a_standby_that_leaves_gives_its_place_back(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """Granted beyond the slots, waiting inside the engine, gone: not charged any more while the other streams on."""
    args = ["-t", "1", "-np", "1", "-c", "16384"]
    proxy = start({"models": {"m": {"path": str(zoo("llama-mid")), "args": args}}}, traced=True)
    running = RawStream(
        proxy.url,
        "/v1/completions",
        {"model": "m", "prompt": "a", **LONG},
        headers={"x-request-id": "running"},
    )
    assert running.head() == 200
    assert running.event()
    for stream in (True, False):
        standby = RawStream(
            proxy.url, "/v1/completions", {"model": "m", "prompt": "b", **LONG, "stream": stream}
        )
        until("the standby is charged", lambda: charged(proxy) == 2)
        standby.close()
        until("it is not any more", lambda: charged(proxy) == 1 and inflight(proxy) == 1, 20)
        assert "running" not in ended(proxy)
        assert running.event()
    running.close()
    until("the ledger is zero", lambda: inflight(proxy) == 0, 60)
    # the engine looks after a plain answer's client once a second: until then it may still start the task
    until("the engine is idle", lambda: busy(proxy, "m") == 0, 60)


@pytest.mark.parametrize("policy", ["drain", "mixed"])
def test_leaving_during_prefill_stays_charged_until_the_engine_lets_go(
    start: Callable[..., Proxy], demo_model: Path, policy: str
) -> None:
    """A cancel in prefill waits for the running batch, not for the prompt: most of that is never read, and until the
    engine let go (by its own record, on the same clock) the ticket is `cancelling` and charged."""
    args = ["-t", "1", "-np", "1", "-b", "128", "-c", "8192"]
    proxy = start(
        {"engine": {"phase_policy": policy}, "models": {"m": {"path": str(demo_model), "args": args}}},
        traced=True,
    )

    def read() -> int:
        """Prompt tokens of the running request that the engine has read so far."""
        slots = proxy.get("/slots?model=m")
        return max(slot.get("n_prompt_tokens_processed", 0) * slot["is_processing"] for slot in slots)

    words = 3600
    text = "one two three four " * (words // 4)
    ask = {
        "model": "m",
        "prompt": text,
        "messages": [{"role": "user", "content": text}],
        "cache_prompt": False,
    }
    assert proxy.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 1})[0] == 200
    cases = (("/v1/completions", True), ("/v1/chat/completions", False), ("/v1/messages", True))
    for number, (path, stream) in enumerate(cases):
        name = f"r{number}"
        before = len(proxy.trace())
        client = RawStream(proxy.url, path, {**ask, **LONG, "stream": stream}, headers={"x-request-id": name})
        until("the engine prefills", lambda: read() >= 128, 60)
        client.close()
        seen = [0]

        def over(seen: list[int] = seen) -> bool:
            seen.append(read())
            return inflight(proxy) == 0 and charged(proxy) == 0

        until("the ledger is zero", over, 120)
        assert max(seen) < words * 3 / 4, "it read on for nobody"
        assert "ready" not in {e["event"] for e in engine_events(proxy) if e["request"] == f"{name}.1"}
        steps = proxy.trace()[before:]
        steps = steps[next(place for place, step in enumerate(steps) if name in dict(step["granted"])) :]
        books = [(step["books"][0]["charged"], step["books"][0]["cancelling"]) for step in steps]
        dropped = books.index((0, 0))
        assert set(books[:dropped]) == {(1, 0), (1, 1)}
        assert books[dropped - 1] == (1, 1)
        assert steps[dropped]["at"] >= released(proxy, f"{name}.1")["t_us"] / 1e6, "dropped while at work"
    assert [step["broken"] for step in proxy.trace() if step["broken"]] == []
