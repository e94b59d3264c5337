"""Streams through the proxy are the engine's own."""

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream, data
from tests.e2e.conftest import EXACT, model
from tests.e2e.harness import Proxy
from tests.e2e.relay import PACED, Relay, dechunked
from tests.support.ports import held_port
from tests.support.wait import until

pytestmark = pytest.mark.engine

VOLATILE = ("id", "created", "timings", "id_slot", "__verbose")
"""What differs between two runs of one request on one engine."""


@pytest.fixture
def engine_alone(engine_binary: Path, zoo: Callable[[str], Path], tmp_path: Path) -> Iterator[str]:
    """The same engine and model without a proxy."""
    with held_port() as port, (tmp_path / "alone.log").open("wb") as log:
        process = subprocess.Popen(
            [str(engine_binary), "-m", str(zoo("llama")), "--host", "127.0.0.1", "--port", str(port), "--alias", "tiny",
             "-t", "1", "-np", "4", "-c", "8192", "-b", "512", *EXACT], stdout=log, stderr=log,
        )  # fmt: skip

        def healthy() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        try:
            until("the lone engine is healthy", healthy)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait(10)


def stable(event: bytes) -> Any:
    """An event without what changes from run to run."""
    value = data(event)
    if not isinstance(value, dict):
        return event
    for key in VOLATILE:
        value.pop(key, None)
    return value


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the small box"}], "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "the small box"}),
        ("/completion", {"prompt": "the small box", "n_predict": 20}),
    ],
)  # fmt: skip
def test_events_equal_the_engines_own(
    shared: Proxy, engine_alone: str, path: str, ask: dict[str, Any]
) -> None:
    """Same seed, temperature 0: the proxied events are the lone engine's, one for one, end marker included."""
    ask = {"model": "tiny", "max_tokens": 20, "temperature": 0, "seed": 1, "stream": True, **ask}
    runs = []
    for url in (engine_alone, shared.url):
        stream = RawStream(url, path, ask)
        assert stream.head() == 200
        runs.append([stable(event) for event in stream.rest()])
        stream.close()
    assert runs[0] == runs[1]
    assert len(runs[0]) > 20


HELLO = [{"role": "user", "content": "the small box"}]


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True, "n": 2}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "stream": True, "logprobs": 2}),
        ("/completion", {"prompt": "a", "stream": True, "n_probs": 2, "return_progress": True}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "stream": True}),
        ("/v1/messages", {"messages": HELLO, "stream": True}),
        ("/v1/messages", {"messages": HELLO}),
        ("/v1/responses", {"input": "the small box", "stream": True}),
    ],
)  # fmt: skip
def test_bodies_are_the_engines_own_byte_for_byte(
    start: Callable[..., Proxy], engine_alone: str, path: str, ask: dict[str, Any]
) -> None:
    """What the engine wrote to the proxy, kept on the wire between them, is what the client got."""
    with Relay(int(engine_alone.rsplit(":", 1)[1])) as relay:
        proxy = start({"models": {"tiny": {"url": f"http://127.0.0.1:{relay.port}"}}})
        limit = {"max_tokens": 20, "n_predict": 20, "max_output_tokens": 20, "temperature": 0, "seed": 1}
        stream = RawStream(
            proxy.url, path, {"model": "tiny", **limit, **ask}, headers={"Connection": "close"}
        )
        assert stream.head() == 200
        while stream._fill():
            pass
        got = dechunked(stream.buffer)[0] if stream.chunked else stream.buffer
        assert got == relay.answer_to(f"POST {path} ".encode())
        assert len(got) > 200


def test_reads_hold_single_events(start: Callable[..., Proxy]) -> None:
    """Behind the real process, whose engine sends an event when the client has read the one before, every client
    read holds exactly one whole event."""
    backend = subprocess.Popen([sys.executable, "-c", PACED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert backend.stdin is not None
        assert backend.stdout is not None
        proxy = start({"models": {"m": {"url": f"http://127.0.0.1:{int(backend.stdout.readline())}"}}})
        stream = RawStream(proxy.url, "/v1/chat/completions", {"model": "m", "messages": [], "stream": True})
        assert stream.head() == 200
        count, read = 0, stream.buffer
        while b"[DONE]" not in read:
            read = read or stream.sock.recv(65536)
            assert read.count(b"data: ") == read.count(b"\n\n") == 1, read
            count += 1
            backend.stdin.write(b"\n")
            backend.stdin.flush()
            if b"[DONE]" not in read:
                read = b""
        stream.close()
        assert count == 501
    finally:
        backend.kill()
        backend.communicate()


def test_a_stream_is_not_buffered(shared: Proxy) -> None:
    """The first event of an answer of many seconds arrives while the engine is still at work on the rest."""
    stream = RawStream(
        shared.url,
        "/v1/completions",
        {"model": "mid", "prompt": "a", "max_tokens": 8000, "stream": True, "ignore_eos": True},
    )
    assert stream.head() == 200
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-accel-buffering"] == "no"
    assert stream.headers["cache-control"] == "no-cache"
    assert stream.event().startswith(b"data: ")
    assert shared.metric("llama_proxy_requests_inflight", model="mid") == 1
    stream.close()
    until("the ledger is empty", lambda: shared.metric("llama_proxy_requests_inflight", model="mid") == 0)


def test_sixty_four_streams_on_four_slots(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    """64 clients at once on 4 slots: all finish, never more than the slots (and one standby) are charged."""
    proxy = start({"models": {"mid": model(zoo("llama-mid"))}}, traced=True)
    assert proxy.post("/api/models/mid/load?wait=60", {}, timeout_s=70)[1]["status"] == "ready"
    gate = {"state": "blocked", "reason": "until all are there", "mode": "hold"}
    assert proxy.post("/api/models/mid/gate", gate)[0] == 200
    answers: list[int] = []

    def one(n: int) -> None:
        ask = {
            "model": "mid",
            "prompt": f"client {n} says",
            "max_tokens": 24,
            "stream": True,
            "ignore_eos": True,
        }
        stream = RawStream(proxy.url, "/v1/completions", ask, timeout_s=240)
        assert stream.head() == 200
        events = stream.rest()
        stream.close()
        assert events[-1] == b"data: [DONE]"
        answers.append(sum(1 for e in events if (v := data(e)) and v["choices"] and v["choices"][0]["text"]))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    until("all wait", lambda: proxy.get("/api/models/mid")["admission"]["queued"] == 64)
    assert proxy.post("/api/models/mid/gate", {"state": "open"})[0] == 200
    while any(t.is_alive() for t in threads):
        view = proxy.get("/api/models/mid")["admission"]
        states = view["states"]
        assert sum(states.values()) == view["queued"] + view["running"] + view["cancelling"]
    for thread in threads:
        thread.join(1)
    slots, standby = 4, 1
    assert max(books["charged"] for step in proxy.trace() for books in step["books"]) == slots + standby
    assert len(answers) == 64
    assert min(answers) > 0
    assert proxy.metric("llama_proxy_queue_wait_seconds_count", model="mid") == 64
    until("the ledger is empty", lambda: proxy.metric("llama_proxy_requests_inflight") == 0)
    assert proxy.metric("llama_proxy_queue_size") == 0


def test_wide_requests_are_charged_as_such_and_finish(shared: Proxy) -> None:
    """100 embedding inputs and a three-prompt array finish; while the wide one runs nothing else is granted."""
    wide = shared.metric("llama_proxy_wide_requests_total", model="embed")
    status, body = shared.post(
        "/v1/embeddings", {"model": "embed", "input": [f"text number {n} " * 30 for n in range(100)]}
    )
    assert status == 200
    assert [d["index"] for d in body["data"]] == list(range(100))
    assert shared.metric("llama_proxy_wide_requests_total", model="embed") == wide + 1
    status, body = shared.post(
        "/v1/completions", {"model": "tiny", "prompt": ["a", "b", "c"], "max_tokens": 4}
    )
    assert status == 200
    assert len(body["choices"]) == 3


def test_responses_and_tools_of_other_endpoints(shared: Proxy) -> None:
    """Each remaining inference path answers through the proxy."""
    for path, ask, key in (
        ("/v1/responses", {"input": "hello there", "max_output_tokens": 8}, "output"),
        ("/tokenize", {"content": "a small box"}, "tokens"),
        ("/detokenize", {"tokens": [300, 301]}, "content"),
        ("/apply-template", {"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/infill", {"input_prefix": "a ", "input_suffix": " b", "n_predict": 4}, "content"),
    ):
        status, body = shared.post(path, {"model": "tiny", **ask})
        assert status == 200, (path, body)
        assert key in body, path
    for path in ("/props?model=tiny", "/slots?model=tiny", "/v1/models", "/health", "/healthz", "/readyz"):
        assert shared.get(path) is not None
    assert json.dumps(shared.get("/props?model=tiny")).find("api_key") == -1
