"""A request of a higher class takes the place of one that the engine has queued and not begun."""

import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.client import RawStream, data
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine

SERVER = {
    "api_keys": [
        {"name": "bob", "key": "kb", "class": "batch"},
        {"name": "alice", "key": "ka", "class": "interactive"},
    ],
    "admin_keys": [{"name": "ops", "key": "adm"}],
}
ADMIN = {"Authorization": "Bearer adm"}


def ask(proxy: Proxy, key: str, name: str, tokens: int) -> RawStream:
    body = {"model": "m", "prompt": f"{name} says", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}", "x-request-id": name}
    return RawStream(proxy.url, "/v1/completions", body, timeout_s=120, headers=headers)


def delete(proxy: Proxy, name: str) -> int:
    request = urllib.request.Request(f"{proxy.url}/api/requests/{name}", headers=ADMIN, method="DELETE")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(answer.status)


def states(proxy: Proxy) -> dict[str, tuple[str, str | None, int]]:
    listed = proxy.get("/api/requests", headers=ADMIN)["requests"]
    return {one["id"]: (one["state"], one["reason"], one["recalls"]) for one in listed}


def test_a_higher_class_gets_into_the_next_cohort_by_recall(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """While one runs, the engine's free slot and its standby place go from batch requests to interactive ones;
    each batch request is recalled once, is told so in its stream, and is served whole afterwards."""
    args = ["-t", "1", "-np", "2", "-c", "32768"]
    proxy = start(
        {
            "server": SERVER,
            "admission": {"keepalive_s": 0.2},
            "models": {"m": {"path": str(zoo("llama-mid")), "args": args, "phase_policy": "drain"}},
        },
        traced=True,
    )
    running = ask(proxy, "kb", "running", 16_000)
    assert running.head() == 200
    while data(running.event()) is None:
        pass
    streams: dict[str, RawStream] = {}
    for name, key, place in (
        ("slot", "kb", "native_queued"),
        ("standby", "kb", "native_queued"),
        ("first", "ka", "native_queued"),
        ("second", "ka", "native_queued"),
    ):
        streams[name] = ask(proxy, key, name, 8)
        until(f"{name} is {place}", lambda n=name, p=place: states(proxy).get(n, ("",))[0] == p)
        if name == "slot":
            assert streams[name].head() == 200
            while streams[name].event() != b": native_queued reason=cohort_sealed":
                pass
    now = states(proxy)
    for name in ("slot", "standby"):
        assert (now[name][0], now[name][2]) == ("queued", 1)
        assert now[name][1] in {"no_free_slot", "cohort_sealed", "fairness"}
    assert [now[name][2] for name in ("first", "second")] == [0, 0]

    events: dict[str, list[bytes]] = {}

    def finish(name: str, stream: RawStream) -> None:
        assert (stream.status or stream.head()) == 200
        events[name] = stream.rest()

    threads = [threading.Thread(target=finish, args=job) for job in streams.items()]
    for thread in threads:
        thread.start()
    assert delete(proxy, "running") == 200
    assert data(running.rest()[-1])["error"]["code"] == "cancelled_by_operator"
    for thread in threads:
        thread.join(120)
    engine = proxy.get("/slots?model=m&phase_since=0", headers={"Authorization": "Bearer ka"})["events"]
    # who was recalled was let go without a token, too
    done = [e["request"].partition(".")[0] for e in engine if e["event"] == "release" and e["tokens"] == 8]
    assert set(done[:2]) == {"first", "second"}
    assert set(done[2:]) == {"slot", "standby"} and len(done) == 4
    for name in streams:
        pieces = [event for event in events[name] if data(event)]
        assert len([p for p in pieces if data(p)["choices"][0]["text"]]) == 8
        assert events[name][-1] == b"data: [DONE]"
    for name in ("slot", "standby"):
        assert any(event.startswith(b": queued position=") for event in events[name])
    until("the metric has it", lambda: proxy.metric("llama_proxy_recalls_total", model="m") == 2)
    until("nothing is left", lambda: proxy.metric("llama_proxy_requests_inflight") == 0)
    assert [step["broken"] for step in proxy.trace() if step["broken"]] == []

    def recalls() -> dict[str, int | None]:
        lines = [line for line in proxy.events() if line.get("event") == "request"]
        return {line["id"]: line.get("recalls") for line in lines if line["id"] in streams}

    wanted = {"slot": 1, "standby": 1, "first": None, "second": None}
    until("the log lines tell it", lambda: recalls() == wanted)
