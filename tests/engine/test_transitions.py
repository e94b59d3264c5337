"""The ring of transitions is an exact mirror: replayed, it rebuilds every interval."""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from statistics import median
from typing import Any

import pytest

from tests.engine.conftest import EngineFactory
from tests.engine.enginekit.http import Exchange
from tests.engine.enginekit.phase import EVENTS, PhaseEvent, Story
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.replay import Replay
from tests.engine.enginekit.server import Server, greedy
from tests.engine.enginekit.waiting import eventually

TOTALS = {
    "phase_prefill_seconds_total": "prefill",
    "phase_generate_seconds_total": "generate",
    "phase_wait_seconds_total": "ready",
    "phase_queue_seconds_total": "queued",
}


def _scripted(server: Server, seed: int, count: int = 24) -> None:
    """Run a load with joins, late arrivals, families and clients that leave."""
    rng = random.Random(seed)
    running: list[Exchange] = []
    for number in range(count):
        more: dict[str, Any] = {"n_cmpl": 2} if rng.random() < 0.15 else {}
        tag = f"s{seed}.{number}"
        body = greedy(words(rng.choice((3, 40, 300)), number), rng.choice((1, 4, 60)), **more)
        running.append(server.start(body | {"stream": rng.random() < 0.5}, tag=tag))
        if rng.random() < 0.2:
            rng.choice(running).close()
        if len(running) >= 5:
            running.pop(0).finish()
    for exchange in running:
        exchange.finish()
    server.wait_idle()
    eventually(lambda: server.phase()["engine"] == "idle", "idle")


@pytest.mark.parametrize("policy", ["drain", "yield"])
def test_a_replay_rebuilds_every_interval(engine: EngineFactory, policy: str) -> None:
    """Legal transitions only, and totals per phase equal to the engine's counters."""
    server = engine("llama-mid", policy, ("-b", "128", "--phase-yield-ms", "40"))
    _scripted(server, 1)
    events = server.events()
    assert {e.event for e in events} <= set(EVENTS)
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    assert all(a.t_us <= b.t_us for a, b in zip(events, events[1:], strict=False))
    replay = Replay(slots=4).run(events)
    assert replay.engine == "idle"
    assert set(replay.members) == {"none"}
    metrics = server.metrics()
    for name, state in TOTALS.items():
        assert metrics[name] == pytest.approx(replay.seconds[state], abs=1e-4), name
    assert metrics["phase_prefill_total"] == replay.entered["prefill"]
    assert metrics["phase_generate_total"] == replay.entered["generate"]
    if policy == "yield":
        assert replay.seconds["paused"] > 0
        assert metrics["phase_yield_total"] == replay.yields


def test_the_replay_follows_the_live_states(engine: EngineFactory) -> None:
    """Any answer of `phase_since` agrees with itself: its events lead to its slots."""
    server = engine("llama-mid", "yield", ("-b", "64", "--phase-yield-ms", "30"))
    running = [server.stream(words(9 + 80 * n, n), 150, tag=f"r{n}") for n in range(8)]
    replay, since, checked = Replay(slots=4), 0, 0
    while not all(exchange.done for exchange in running):
        view = server.get(f"/slots?phase_since={since}").ok()
        events = [PhaseEvent(**event) for event in view["events"]]
        replay.run(events)
        since = view["seq"]
        for slot in view["slots"]:
            phase = slot["phase"]
            assert replay.members[slot["id"]] == phase["member"], view
            assert replay.engine == phase["engine"]
            assert replay.sealed == phase["sealed"]
            checked += phase["member"] != "none"
            assert "params" not in slot
    assert checked > 20
    assert replay.entered["prefill"] >= 3


def test_the_tag_ties_a_slot_to_its_request(engine: EngineFactory) -> None:
    """`x-request-id` is in the slot, in the events, and in the children's slots."""
    server = engine("llama-mid", "drain")
    server.stream(words(9), 400, tag="chat-1.2_B", n_cmpl=2)
    eventually(lambda: "generate" in server.members(), "it generates")
    tags = [slot["phase"]["request"] for slot in server.slots()]
    assert tags.count("chat-1.2_B") == 2
    assert tags.count("") == 2
    server.cut_all()
    eventually(lambda: {slot["phase"]["request"] for slot in server.slots()} == {""}, "no tag is left")


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("a" * 64, "a" * 64),
        ("a" * 200, "a" * 64),
        ("x y/z{}\"'<>", "xyz"),
        ("", ""),
        ("..-__", "..-__"),
    ],
)
def test_a_tag_is_cleaned(engine: EngineFactory, sent: str, kept: str) -> None:
    """At most 64 of `[A-Za-z0-9._-]`; anything else cannot reach a log, a label or JSON."""
    server = engine()
    answer = server.post("/completion", greedy(words(5), 3), {"x-request-id": sent})
    assert answer.status == 200
    assert server.events()[0].request == kept


def test_every_endpoint_carries_the_tag(engine: EngineFactory) -> None:
    """Chat, completions, infill, embeddings, responses, messages."""
    server = engine(args=("--embeddings", "--pooling", "none"))
    message = {"messages": [{"role": "user", "content": "river"}], "max_tokens": 3}
    calls = {
        "/completion": {"prompt": "river", "n_predict": 3},
        "/v1/completions": {"prompt": "river", "max_tokens": 3},
        "/v1/chat/completions": message,
        "/v1/messages": message,
        "/v1/responses": {"input": "river", "max_output_tokens": 3},
        "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 3},
        "/embeddings": {"content": "river"},
    }
    for number, (path, body) in enumerate(calls.items()):
        answer = server.post(path, body, {"X-Request-Id": f"call{number}"})
        assert answer.status == 200, (path, answer.body)
        assert Story(server.events()).all("admit", f"call{number}"), path


def test_overrun_is_counted(engine: EngineFactory) -> None:
    """A reader that comes too late is told how many transitions it missed."""
    server = engine()
    for _ in range(180):
        server.complete("river", 1)
    view = server.get("/slots?phase_since=0").ok()
    assert len(view["events"]) == 1024
    assert view["lost"] == view["seq"] - 1024
    assert view["lost"] > 0
    assert view["events"][0]["seq"] == view["lost"] + 1
    newer = server.get(f"/slots?phase_since={view['seq']}").ok()
    assert (newer["events"], newer["lost"]) == ([], 0)


@pytest.mark.parametrize("value", ["", "-1", "abc", "1.5", "99999999999999999999", "1%00"])
def test_a_bad_sequence_number_is_refused_or_ignored(engine: EngineFactory, value: str) -> None:
    """Never a crash: the ordinary view, or a 400 that names the parameter."""
    server = engine()
    answer = server.get(f"/slots?phase_since={value}")
    if answer.status == 200:
        assert isinstance(answer.json(), list)
    else:
        assert answer.status == 400
        assert b"phase_since" in answer.body
    server.assert_alive()


def test_numbers_survive_sleep(engine: EngineFactory) -> None:
    """`seq` and cohort ids go on when the context was unloaded and loaded again."""
    server = engine("llama", "drain", ("--sleep-idle-seconds", "1"))
    server.complete("river", 2)
    before = server.events()
    counters = server.metrics()
    eventually(lambda: "entering sleep" in server.log().lower(), "it sleeps", timeout_s=15)
    # the sleeping server still tells its policy and counters
    assert server.get("/props").ok()["phase"]["policy"] == "drain"
    asleep = server.metrics()
    for name in ("phase_prefill_total", "decode_prompt_batches_total"):
        assert asleep[name] == counters[name]
    server.complete("river", 2)
    after = server.events()
    assert [e.seq for e in after] == list(range(1, len(after) + 1))
    assert len(after) > len(before)
    assert after[: len(before)] == before
    cohorts = [e.cohort for e in after if e.event == "ready"]
    assert cohorts == sorted(set(cohorts))
    assert server.metrics()["phase_prefill_total"] == counters["phase_prefill_total"] + 1


def _keep_busy(server: Server, total: int, lengths: tuple[int, ...], header: str | None) -> None:
    """Keep slots + 1 short requests in flight: one is always the deferred standby."""
    headers = {} if header is None else {"x-phase-gather-ms": header}
    flight: list[Exchange] = []
    for number in range(total):
        flight.append(server.stream(words(9, number), lengths[number % len(lengths)], headers=headers))
        if len(flight) == 5:
            eventually(lambda: any(x.done for x in flight), "one ends", poll_s=0.0005)
            flight = [exchange for exchange in flight if not exchange.done]
    for exchange in flight:
        exchange.ok()


def _seal_sizes_and_gaps(server: Server) -> tuple[list[int], list[float]]:
    """Return each cohort's members at its seal, and ms from each idle to the next cohort."""
    events = server.events()
    sizes = [e.tokens for e in events if e.event == "seal"]
    gaps = []
    idle: int | None = None
    for event in events:
        if event.event == "idle":
            idle = event.t_us
        elif event.event == "admit" and event.cohort and idle is not None:
            gaps.append((event.t_us - idle) / 1000)
            idle = None
    return sizes, gaps


def test_one_standby_fills_the_cohorts(engine: EngineFactory) -> None:
    """Continuous requests of different lengths, slots + 1 in flight: full cohorts, short gaps."""
    server = engine("llama-mid", "drain", ("-b", "512"))
    # far enough apart for whoever follows to be there before the next one ends
    _keep_busy(server, 48, (20, 100, 180, 60, 140), None)
    sizes, gaps = _seal_sizes_and_gaps(server)
    steady = sizes[1:-2]
    assert len(steady) >= 8
    assert median(steady) == 4, sizes
    assert sum(size == 4 for size in steady) >= 0.8 * len(steady), sizes
    assert median(gaps[1:-2]) <= 10, gaps


def test_a_hint_fills_cohorts_of_equal_answers(engine: EngineFactory) -> None:
    """All members end in one step: the standby's hint holds the window until its companions come."""
    server = engine("llama-mid", "drain", ("-b", "512"))
    _keep_busy(server, 48, (30,), "500")
    sizes, _ = _seal_sizes_and_gaps(server)
    steady = sizes[1:-2]
    assert len(steady) >= 6
    assert sum(size == 4 for size in steady) >= 0.8 * len(steady), sizes


def _deferred(server: Server, count: int, running: Exchange) -> bool:
    return running.done or server.metrics()["requests_deferred"] >= count


def test_deferred_requests_keep_their_order(engine: EngineFactory) -> None:
    """When several slots are freed in one step, those who waited longest come first."""
    server = engine("llama-mid", "drain", ("-b", "512"), context=32768)

    def in_time(tokens: int) -> bool:
        running = server.stream([words(9, n) for n in range(4)], tokens)
        running.wait_token()
        waiting = []
        for number in range(8):
            waiting.append(server.start(greedy(words(9, 10 + number), 10), tag=f"w{tokens}.{number}"))
            eventually(partial(_deferred, server, number + 1, running), "it is deferred")
        late = running.done
        for exchange in (running, *waiting):
            exchange.ok()
        if late:
            return False
        story = Story(server.events())
        order = sorted(range(8), key=lambda n: story.seq("admit", f"w{tokens}.{n}"))
        assert order == list(range(8)), order
        cohorts: dict[int, list[int]] = defaultdict(list)
        for number in range(8):
            cohorts[story.cohort(f"w{tokens}.{number}")].append(number)
        assert [sorted(v) for _, v in sorted(cohorts.items())] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        return True

    assert any(map(in_time, (300, 1500, 6000))), "the running ones ended too early each time"
