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


@pytest.fixture
def one_slot(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> Proxy:
    """A slow model with one slot and no standby."""
    return start({
        "engine": {"phase_policy": "mixed"},
        "models": {"m": {"path": str(zoo("llama-mid")), "args": ["-t", "1", "-np", "1", "-c", "8192"]}},
    })  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
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
    start: Callable[..., Proxy], demo_model: Path
) -> None:
    """The load goes on for others; the ticket does not stay."""
    proxy = start({"models": {"m": {"path": str(demo_model), "args": ["-t", "1", "-np", "2", "-c", "2048"]}}})
    leaving = RawStream(proxy.url, "/v1/completions", {"model": "m", "prompt": "a", **LONG})
    until("it waits for the load", lambda: inflight(proxy, "queued") == 1)
    leaving.close()
    until("it is gone", lambda: inflight(proxy) == 0, 0.5)
    status, body = proxy.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})
    assert status == 200, body


@pytest.mark.parametrize("stream", [True, False])
def test_a_streaming_client_that_leaves_frees_the_slot(one_slot: Proxy, stream: bool) -> None:
    """The engine's slot is free within three seconds, for a stream and for a plain answer."""
    client = RawStream(
        one_slot.url, "/v1/completions", {"model": "m", "prompt": "a", **LONG, "stream": stream}
    )
    if stream:
        assert client.head() == 200
        assert client.event()
    else:
        until("it runs", lambda: inflight(one_slot) == 1 and busy(one_slot, "m") == 1)
    client.close()
    until("the engine's slot is free", lambda: busy(one_slot, "m") == 0, 3)
    until("the ledger is zero", lambda: inflight(one_slot) == 0, 2)
    status, _ = one_slot.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2})
    assert status == 200


def test_leaving_during_prefill_stays_charged_until_the_engine_lets_go(
    start: Callable[..., Proxy], demo_model: Path
) -> None:
    """A cancel in prefill waits for the running batch: until then the ticket is `cancelling` and still charged."""
    proxy = start(
        {
            "models": {
                "m": {"path": str(demo_model), "args": ["-t", "1", "-np", "1", "-b", "128", "-c", "8192"]}
            }
        }
    )
    status, _ = proxy.post("/v1/completions", {"model": "m", "prompt": "warm", "max_tokens": 1})
    assert status == 200
    client = RawStream(
        proxy.url, "/v1/completions", {"model": "m", "prompt": "one two three four " * 900, **LONG}
    )
    until("the engine prefills", lambda: busy(proxy, "m") == 1)
    client.close()
    until("it is cancelling", lambda: inflight(proxy, "cancelling") == 1, 1)
    left = time.monotonic()
    while busy(proxy, "m"):
        assert inflight(proxy, "cancelling") == 1 or busy(proxy, "m") == 0, (
            "dropped while the engine was at work"
        )
        assert time.monotonic() - left < 2 + 4, "not within one batch and two seconds"
    until("the ledger is zero", lambda: inflight(proxy) == 0, 2)
