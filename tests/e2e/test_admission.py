"""Admission at every one of its decisions, in a real proxy with a real engine under load."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream, data
from tests.e2e.conftest import EXACT, model
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine

CLIENTS = 64
FIRST = 40
"""Clients that are there before the first of them is granted; the others come while those run."""


class Visit:
    """One streaming client's own measurements."""

    def __init__(self, url: str, number: int) -> None:
        self.url, self.number = url, number
        self.wait_s = self.first_s = 0.0
        self.generated = self.prompt = 0
        self.whole = False

    def __call__(self) -> None:
        ask = {
            "model": "m", "prompt": f"client {self.number} says", "max_tokens": 12 + self.number % 9, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        began = time.monotonic()
        stream = RawStream(
            self.url, "/v1/completions", ask, timeout_s=240, headers={"x-request-id": f"r{self.number}"}
        )
        assert stream.head() == 200
        self.wait_s = int(stream.headers["x-queue-wait-ms"]) / 1000
        event = stream.event()
        self.first_s = time.monotonic() - began
        events = [event, *stream.rest()]
        stream.close()
        usage = [value["usage"] for event in events if (value := data(event)) and value.get("usage")]
        self.generated, self.prompt = usage[-1]["completion_tokens"], usage[-1]["prompt_tokens"]
        self.whole = events[-1] == b"data: [DONE]"


SUMS = (
    "queue_wait_seconds_sum", "queue_wait_seconds_count", "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count", "requests_total", "generated_tokens_total", "prompt_tokens_total",
)  # fmt: skip


def sums(proxy: Proxy) -> dict[str, float]:
    return {name: proxy.metric(f"llama_proxy_{name}", model="m") for name in SUMS}


def gauge(text: str, name: str, more: str = "") -> float:
    """Sum of one gauge's samples in one scrape."""
    pattern = rf"^llama_proxy_{name}\{{[^}}]*{more}[^}}]*\}} (\S+)$"
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))


@pytest.mark.parametrize(("policy", "standby"), [("drain", 1), ("mixed", 0)])
def test_sixty_four_clients_on_four_slots(
    start: Callable[..., Proxy], zoo: Callable[[str], Path], policy: str, standby: int
) -> None:
    """No step ever charges more than the slots (and the standby); grants go in order of arrival; the metrics
    of the queue agree with what the clients were told and measured, one by one and in sum."""
    config = {
        "engine": {"phase_policy": policy},
        "admission": {"keepalive_s": 0},
        "models": {"m": model(zoo("llama-mid"))},
    }
    proxy = start(config, traced=True)
    assert proxy.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 1})[0] == 200
    before, first_step = sums(proxy), len(proxy.trace())
    visits = [Visit(proxy.url, number) for number in range(CLIENTS)]
    threads = [threading.Thread(target=visit) for visit in visits]
    gate = {"state": "blocked", "reason": "until many are there", "mode": "hold"}
    assert proxy.post("/api/models/m/gate", gate)[0] == 200
    for thread in threads[:FIRST]:
        thread.start()
    until(
        "the metrics show the queue",
        lambda: gauge(proxy.text("/metrics"), "queue_size", 'model="m"') == FIRST,
    )
    assert proxy.post("/api/models/m/gate", {"state": "open"})[0] == 200
    for thread in threads[FIRST:]:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        text = proxy.text("/metrics")
        size = gauge(text, "queue_size", 'model="m"')
        assert size == gauge(text, "requests_inflight", 'state="queued"')
        assert (size > 0) == (gauge(text, "queue_oldest_seconds", 'model="m"') > 0)
    for thread in threads:
        thread.join(1)
    assert all(visit.whole for visit in visits)
    until("the ledger is empty", lambda: proxy.metric("llama_proxy_requests_inflight") == 0)

    steps = proxy.trace()[first_step:]
    assert [step["broken"] for step in steps if step["broken"]] == []
    charged = [books["charged"] for step in steps for books in step["books"]]
    assert max(charged) == 4 + standby
    assert charged[-1] == 0
    arrived = [step["arrived"][0] for step in steps if "arrived" in step]
    granted = [ticket for step in steps for ticket, _ in step["granted"]]
    assert sorted(arrived) == sorted(f"r{number}" for number in range(CLIENTS))
    assert granted == arrived

    waited = {ticket: seconds for step in steps for ticket, seconds in step["finished"]}
    for visit in visits:
        # the header is written a turn of the event loop after the grant
        assert waited[f"r{visit.number}"] == pytest.approx(visit.wait_s, abs=0.5)
        assert visit.wait_s <= visit.first_s + 0.001
    found = {name: value - before[name] for name, value in sums(proxy).items()}
    assert found["requests_total"] == found["queue_wait_seconds_count"] == CLIENTS
    assert found["queue_wait_seconds_sum"] == pytest.approx(sum(waited.values()), abs=0.01)
    assert found["queue_wait_seconds_sum"] == pytest.approx(sum(v.wait_s for v in visits), rel=0.1, abs=2)
    assert found["time_to_first_token_seconds_count"] == CLIENTS
    assert found["queue_wait_seconds_sum"] <= found["time_to_first_token_seconds_sum"]
    assert found["time_to_first_token_seconds_sum"] <= sum(v.first_s for v in visits)
    assert found["generated_tokens_total"] == sum(v.generated for v in visits)
    assert found["prompt_tokens_total"] == sum(v.prompt for v in visits)


def test_requests_are_charged_by_their_tasks(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    """100 inputs take all slots and nobody beside them; three prompts take three, `n=2` two; `n` above the
    slots takes none and gets the engine's own 400."""
    embed = {
        "path": str(zoo("bert-embed")),
        "args": ["-t", "1", "-np", "4", "--embeddings", "-b", "2048", "-ub", "2048", "-c", "8192"],
    }
    proxy = start({"models": {"m": model(zoo("llama"), *EXACT), "embed": embed}}, traced=True)
    answers: dict[str, tuple[int, Any]] = {}

    def ask(name: str, path: str, body: dict[str, Any]) -> None:
        answers[name] = proxy.post(path, body, headers={"x-request-id": name})

    inputs = [f"text number {n} " * 20 for n in range(100)]
    jobs = [("wide", "/v1/embeddings", {"model": "embed", "input": inputs})] + [
        (f"narrow{n}", "/v1/embeddings", {"model": "embed", "input": inputs[: 1 + n % 4]}) for n in range(12)
    ]
    threads = [threading.Thread(target=ask, args=job) for job in (*jobs[1:5], jobs[0], *jobs[5:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    ask("array", "/v1/completions", {"model": "m", "prompt": ["a", "b", "c"], "max_tokens": 4})
    ask("two", "/v1/chat/completions", {**chat, "n": 2})
    ask("five", "/v1/chat/completions", {**chat, "n": 5})

    assert {name: status for name, (status, _) in answers.items() if status != 200} == {"five": 400}
    assert "source" not in answers["five"][1]["error"]
    assert [item["index"] for item in answers["wide"][1]["data"]] == list(range(100))
    assert len(answers["array"][1]["choices"]) == 3
    assert len(answers["two"][1]["choices"]) == 2
    steps = proxy.trace()
    tasks = dict(step["arrived"] for step in steps if "arrived" in step)
    cost = dict(grant for step in steps for grant in step["granted"])
    wanted = {"wide": (100, 4), "array": (3, 3), "two": (2, 2), "five": (5, 0)}
    wanted |= {f"narrow{n}": (1 + n % 4, 1 + n % 4) for n in range(12)}
    assert {name: (tasks[name], cost[name]) for name in wanted} == wanted
    for step in steps:
        assert step["broken"] == []
        for books in step["books"]:
            assert books["charged"] <= books["slots"] + 1
            if books["wide"]:
                assert (books["charged"], books["grants"]) == (books["slots"], 1)
    assert proxy.metric("llama_proxy_wide_requests_total", model="embed") == 1
    assert proxy.metric("llama_proxy_requests_inflight") == 0


def test_counters_of_failures_start_at_zero(shared: Proxy) -> None:
    """Before anything went wrong their series are there, so that the first event is a step and not a birth."""
    text = shared.text("/metrics")
    for sample in (
        'client_disconnects_total{model="embed",state="generating"}',
        'upstream_errors_total{kind="mid_body",model="embed"}',
        'requests_rejected_total{code="queue_full",model="embed"}',
        'crashes_total{model="embed"}',
        'identity_mismatch_total{model="embed"}',
        'wide_requests_total{model="embed"}',
    ):
        assert f"llama_proxy_{sample} 0.0\n" in text, sample
