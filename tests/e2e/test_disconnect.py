"""Clients that leave, in every phase, through the real server: nothing stays behind."""

import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine

LONG = {"max_tokens": 6000, "stream": True, "ignore_eos": True}
HELLO = [{"role": "user", "content": "a"}]
ENDPOINTS = pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/messages", {"messages": HELLO}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 6000}),
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


def charged(proxy: Proxy) -> int:
    """What the books hold against the engine of `m`."""
    return int(proxy.get("/api/models/m")["admission"]["charged"])


@pytest.fixture
def one_slot(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> Proxy:
    """A slow model with one slot and no standby."""
    return start({
        "engine": {"phase_policy": "mixed"},
        "models": {"m": {"path": str(zoo("llama-mid")), "args": ["-t", "1", "-np", "1", "-c", "8192"]}},
    })  # fmt: skip


@STREAM
def test_a_queued_client_that_leaves_is_gone_at_once(one_slot: Proxy, stream: bool) -> None:
    """Its place goes to nobody's harm: the queue is empty within half a second, the runner unharmed."""
    running = RawStream(one_slot.url, "/v1/completions", {"model": "m", "prompt": "a", **LONG})
    assert running.head() == 200
    queued = RawStream(
        one_slot.url, "/v1/completions", {"model": "m", "prompt": "b", **LONG, "stream": stream}
    )
    until("it is queued", lambda: inflight(one_slot, "queued") == 1)
    queued.close()
    until("the queue is empty", lambda: inflight(one_slot, "queued") == 0, 0.5)
    assert running.event()
    running.close()
    until("the ledger is zero", lambda: inflight(one_slot) == 0, 10)
    assert one_slot.metric("llama_proxy_client_disconnects_total", model="m", state="queued") == 1


def test_a_client_that_leaves_while_loading_is_gone_at_once(
    start: Callable[..., Proxy], demo_model: Path, engine_binary: Path, tmp_path: Path
) -> None:
    """On every path, streaming or not; the load goes on for others, and only they are granted anything."""
    slow = tmp_path / "slow-llama-server"
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *--help*) ;; *) while [ ! -e {tmp_path}/go ]; do sleep 0.1; done ;; esac\n'
        f'exec {engine_binary} "$@"\n'
    )
    slow.chmod(0o755)
    config = {
        "engine": {"dir": str(slow)},
        "models": {"m": {"path": str(demo_model), "args": ["-t", "1", "-np", "2", "-c", "2048"]}},
    }
    proxy = start(config, traced=True)
    asks = [(path, {**ask, "stream": stream}) for path, ask in ENDPOINTS.args[1] for stream in (True, False)]
    for path, ask in asks:
        leaving = RawStream(proxy.url, path, {"model": "m", **LONG, **ask})
        until("it waits for the load", lambda: inflight(proxy, "queued") == 1)
        leaving.close()
        until("it is gone", lambda: inflight(proxy) == 0, 0.5)
        assert proxy.get("/api/models/m")["state"] in {"starting", "loading"}
    (tmp_path / "go").touch()
    status, body = proxy.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})
    assert status == 200, body
    assert sum(len(step["granted"]) for step in proxy.trace()) == 1
    assert proxy.metric("llama_proxy_client_disconnects_total", model="m", state="queued") == len(asks)


@STREAM
@ENDPOINTS
def test_a_running_client_that_leaves_frees_the_slot(
    one_slot: Proxy, path: str, ask: dict[str, Any], stream: bool
) -> None:
    """The engine's slot is free within three seconds, for a stream and for a plain answer."""
    client = RawStream(one_slot.url, path, {"model": "m", **LONG, **ask, "stream": stream})
    if stream:
        assert client.head() == 200
        assert client.event()
    until("it runs", lambda: inflight(one_slot) == 1 and busy(one_slot, "m") == 1)
    client.close()
    until("the engine's slot is free", lambda: busy(one_slot, "m") == 0, 3)
    until("the ledger is zero", lambda: inflight(one_slot) == 0, 2)
    status, _ = one_slot.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})
    assert status == 200


def test_a_standby_that_leaves_gives_its_place_back(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """Granted beyond the slots, waiting inside the engine, gone: not charged any more while the other streams on."""
    args = ["-t", "1", "-np", "1", "-c", "8192"]
    proxy = start({"models": {"m": {"path": str(zoo("llama-mid")), "args": args}}})
    running = RawStream(proxy.url, "/v1/completions", {"model": "m", "prompt": "a", **LONG})
    assert running.head() == 200
    assert running.event()
    for stream in (True, False):
        standby = RawStream(
            proxy.url, "/v1/completions", {"model": "m", "prompt": "b", **LONG, "stream": stream}
        )
        until("the standby is charged", lambda: charged(proxy) == 2)
        standby.close()
        until("it is not any more", lambda: charged(proxy) == 1 and inflight(proxy) == 1, 3)
        assert running.event()
    running.close()
    until("the ledger is zero", lambda: inflight(proxy) == 0, 5)
    # the engine looks after a plain answer's client once a second: until then it may still start the task
    until("the engine is idle", lambda: busy(proxy, "m") == 0, 5)


@pytest.mark.parametrize("policy", ["drain", "mixed"])
def test_leaving_during_prefill_stays_charged_until_the_engine_lets_go(
    start: Callable[..., Proxy], demo_model: Path, policy: str
) -> None:
    """A cancel in prefill waits for the running batch: within one batch and two seconds the slot is free, and
    until then the ticket is `cancelling` and charged."""
    args = ["-t", "1", "-np", "1", "-b", "128", "-c", "8192"]
    proxy = start(
        {"engine": {"phase_policy": policy}, "models": {"m": {"path": str(demo_model), "args": args}}},
        traced=True,
    )

    def prefilling() -> bool:
        slots = proxy.get("/slots?model=m")
        return any(
            slot["is_processing"] and slot.get("n_prompt_tokens_processed", 0) >= 128 for slot in slots
        )

    text = "one two three four " * 900
    ask = {
        "model": "m",
        "prompt": text,
        "messages": [{"role": "user", "content": text}],
        "cache_prompt": False,
    }
    warm = {"model": "m", "prompt": "one two three four " * 64, "max_tokens": 1, "cache_prompt": False}
    assert proxy.post("/v1/completions", {**warm, "prompt": "a"})[0] == 200
    began = time.monotonic()
    assert proxy.post("/v1/completions", warm)[0] == 200
    batch_s = time.monotonic() - began  # of two batches: the second is for what else the machine does
    for path, stream in (("/v1/completions", True), ("/v1/chat/completions", False), ("/v1/messages", True)):
        client = RawStream(proxy.url, path, {**ask, **LONG, "stream": stream})
        until("the engine prefills", prefilling)
        client.close()
        left = time.monotonic()
        until("it is cancelling", lambda: inflight(proxy, "cancelling") == 1, 1)
        seen: list[tuple[bool, int]] = []
        while not seen or seen[-1][0]:
            # the books are read first: what they no longer hold the engine must have let go before
            books = charged(proxy)
            seen.append((busy(proxy, "m") == 1, books))
            assert time.monotonic() - left < batch_s + 2, "not within one batch and two seconds"
        assert {books for at_work, books in seen if at_work} <= {1}, "dropped while the engine was at work"
        until("the ledger is zero", lambda: inflight(proxy) == 0 and charged(proxy) == 0, 2)
    assert [step["broken"] for step in proxy.trace() if step["broken"]] == []
