"""What tells the policies apart: `drain` lets nobody in, `yield` pauses, the pool is kept."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens
from tests.engine.enginekit.http import Exchange
from tests.engine.enginekit.oracle import Reference
from tests.engine.enginekit.phase import Story
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server, greedy
from tests.engine.enginekit.waiting import eventually

SLOW = "llama-mid"
POOL = 1024
LIMIT_MS, ATTEMPTS = 1500, 10
UNIFIED = ("-fa", "off", "-ctk", "f32", "-ctv", "f32", "--kv-unified", "--no-cache-idle-slots")


def test_drain_is_the_default(engine: EngineFactory) -> None:
    """Without a flag the policy is `drain`, and `/props` says so."""
    phase = engine(policy="drain").get("/props").ok()["phase"]
    assert phase == {"policy": "drain", "yield_ms": 2000, "admit_ms": 0}


def test_the_environment_sets_the_policy(engine: EngineFactory) -> None:
    """Each flag has its variable; the flag wins."""
    env = {
        "LLAMA_ARG_PHASE_POLICY": "mixed",
        "LLAMA_ARG_PHASE_YIELD_MS": "123",
        "LLAMA_ARG_PHASE_ADMIT_MS": "4",
    }
    phase = engine(policy="yield", env=env).get("/props").ok()["phase"]
    assert phase == {"policy": "yield", "yield_ms": 123, "admit_ms": 4}


@pytest.mark.parametrize(
    "flags",
    [
        ("--phase-policy", "drian"),
        ("--phase-yield-ms", "-1"),
        ("--phase-yield-ms", "soon"),
        ("--phase-admit-ms", "-5"),
    ],
    ids=lambda flags: f"{flags[0][8:]}={flags[1]}",
)
def test_bad_flags_are_refused_by_name(engine: EngineFactory, flags: tuple[str, str]) -> None:
    """The engine ends at once and names the flag."""
    with pytest.raises(AssertionError, match="engine ended") as caught:
        engine(args=flags)
    assert flags[0] in str(caught.value)


def test_yield_lets_a_late_prompt_in_after_its_quantum(engine: EngineFactory, oracle: OracleFactory) -> None:
    """The late prompt starts within quantum + one decode call; the paused answers are unharmed."""
    model = oracle(SLOW)
    running = model.steady((words(9, seed) for seed in range(50)), 2, 900)
    late = model.steady((words(300, seed) for seed in range(60, 90)), 1, 20)[0]
    quantum_ms = 300
    server = engine(SLOW, "yield", (*EXACT, "-b", "64", "--phase-yield-ms", str(quantum_ms)))
    # longer than what is compared: they must still run when the late one comes
    streams = [
        server.start({**ref.body, "n_predict": 1200, "stream": True, "return_progress": True}, tag=f"old{i}")
        for i, ref in enumerate(running)
    ]
    streams[1].wait_token()
    newcomer = server.start({**late.body, "stream": True, "return_progress": True}, tag="late")
    newcomer.ok()
    for stream, reference in zip(streams, running, strict=True):
        found = stream.ok().token_ids[: len(reference.tokens)]
        assert_equal_tokens(found, reference.tokens, "a paused answer")
    assert_equal_tokens(newcomer.token_ids, late.tokens, "the late answer")

    story = Story(server.events())
    queued, joined = story.all("admit", "late")
    for tag in ("old0", "old1"):
        assert any(e.seq > queued.seq for e in story.all("pause", tag)), (
            f"{tag} was not paused for the late one"
        )
    waited_ms = (joined.t_us - queued.t_us) / 1000
    assert waited_ms >= quantum_ms
    # one decode call later, at the latest: no view begins and ends in between
    between = [v for v in server.trace() if queued.t_us + quantum_ms * 1000 < v.t_us < joined.t_us]
    assert len(between) <= 2, f"{len(between)} views after the quantum was over"
    pause, resume = (
        next(e for e in story.all(kind, "old0") if e.seq > queued.seq) for kind in ("pause", "resume")
    )
    assert pause.seq < story.seq("ready", "late") < resume.seq
    assert server.metrics()["phase_yield_total"] >= 1
    paused_ms = sum(
        (resumed.t_us - paused.t_us) / 1000
        for paused, resumed in zip(story.all("pause", "old0"), story.all("resume", "old0"), strict=True)
    )
    assert streams[0].final["timings"]["paused_ms"] == pytest.approx(paused_ms, rel=0.1, abs=5)


def test_yield_rests_the_generation_at_least_its_quantum(engine: EngineFactory) -> None:
    """Between an opening and the next pause lies a quantum, whatever arrives."""
    quantum_ms = 60
    server = engine(SLOW, "yield", ("--phase-yield-ms", str(quantum_ms)), context=65536)
    running = server.stream(words(9), 16_000, tag="running")
    running.wait_token()
    late = [server.stream(words(30, seed), 3, tag=f"late{seed}") for seed in range(1, 9)]
    for exchange in late:
        exchange.ok()
    story = Story(server.events())
    server.cut_all()
    pauses = story.all("pause", "running")
    assert len(pauses) >= 2
    openings = [e for e in story.events if e.event == "open"]
    for pause in pauses:
        opening = max((e for e in openings if e.seq < pause.seq), key=lambda e: e.seq)
        assert pause.t_us - opening.t_us >= quantum_ms * 1000
        assert any(opening.t_us < view.t_us <= pause.t_us and view.generated for view in server.trace()), (
            "paused before it made a step"
        )


def test_yield_bounds_every_wait(engine: EngineFactory) -> None:
    """A queued prompt waits for the rest of a sealed prefill, a quantum and one step, no more."""
    quantum_ms = 40
    server = engine(SLOW, "yield", ("-b", "128", "--phase-yield-ms", str(quantum_ms)), context=65536)
    running = [server.stream(words(9, n), 16_000, tag=f"old{n}") for n in range(2)]
    running[1].wait_token()
    for number in range(8):
        server.complete(words((3, 150)[number % 2], 10 + number), 4)
    events, views = server.events(), server.trace()
    server.cut_all()
    checked = 0
    for queued in (e for e in events if e.event == "admit" and e.cohort == 0):
        joined = next(
            e for e in events if e.seq > queued.seq and e.event == "admit" and e.slot == queued.slot
        )
        opened = [e.t_us for e in events if e.event == "open" and e.seq < joined.seq]
        due_us = max([queued.t_us, *opened[-1:]]) + quantum_ms * 1000
        late = [view for view in views if due_us < view.t_us < joined.t_us]
        # the call that runs when the quantum ends, and a first step of each answer
        assert len(late) <= 2, f"{len(late)} decode calls after the quantum of {queued}"
        checked += joined.t_us - queued.t_us > quantum_ms * 1000
    assert checked >= 4, "hardly anybody had to wait"


def _start_streams(server: Server, references: list[Reference], **more: Any) -> list[Exchange]:
    """Start one cohort of streams and return when it generates."""
    streams = [
        server.start({**ref.body, "stream": True, "return_progress": True, **more}, tag=f"old{i}")
        for i, ref in enumerate(references)
    ]
    for stream in streams:
        stream.wait_token()
    return streams


@pytest.mark.parametrize("policy", ["drain", "yield"])
def test_the_pool_is_kept_for_running_answers(
    engine: EngineFactory, oracle: OracleFactory, policy: str
) -> None:
    """Pool of 1,024, two streams that hold 300 tokens, a late prompt of 700: all are right."""
    model = oracle(SLOW)
    running = model.steady((words(20, seed) for seed in range(60)), 2, 400)
    late = model.steady((words(440, seed) for seed in range(60, 90)), 1, 20)[0]
    args = (*UNIFIED, "--phase-yield-ms", "50", "--phase-admit-ms", "100")
    server = engine(SLOW, policy, args, context=POOL)
    prompt_tokens = len(server.post("/tokenize", {"content": late.body["prompt"]}).ok()["tokens"])
    assert 650 <= prompt_tokens <= 750, prompt_tokens
    streams = _start_streams(server, running)
    for stream in streams:
        eventually(partial(_has_tokens, stream, 260), "260 tokens", timeout_s=60)
    newcomer = server.start({**late.body, "stream": True, "return_progress": True}, tag="late")
    for stream, reference in zip(streams, running, strict=True):
        assert_equal_tokens(stream.ok().token_ids, reference.tokens, "a running answer")
    assert_equal_tokens(newcomer.ok().token_ids, late.tokens, "the late answer")


def _has_tokens(stream: Exchange, count: int) -> bool:
    assert not stream.done, stream.describe()
    return len(stream.token_ids) >= count


def test_when_the_pool_overflows_the_newest_gives_way(engine: EngineFactory, oracle: OracleFactory) -> None:
    """Nobody said how long the answers get: the yielded cohort fails, the older streams go on."""
    model = oracle(SLOW)
    running = model.steady((words(20, seed) for seed in range(60)), 2, 300)
    server = engine(SLOW, "yield", (*UNIFIED, "--phase-yield-ms", "30"), context=POOL)
    streams = _start_streams(server, running, n_predict=-1)
    late = server.stream(words(330, 1), -1, tag="late")
    late.wait_token()
    for stream, reference in zip(streams, running, strict=True):
        eventually(partial(_has_tokens, stream, 300), "300 tokens", timeout_s=60)
        assert_equal_tokens(stream.token_ids[:300], reference.tokens, "a running answer")
    late.finish()
    assert "Context size has been exceeded" in str(late.error), late.describe()
    story = Story(server.events())
    assert story.all("pause", "old0")
    assert story.cohort("late") > story.cohort("old1")


def test_a_late_arrival_cannot_kill_a_running_cohort(engine: EngineFactory, oracle: OracleFactory) -> None:
    """A queued slot's cached prefix is given up when the running answers need its room."""
    wanted = oracle(SLOW).steady((words(20, seed) for seed in range(60)), 1, 700)[0]
    talk = words(250, 1)
    server = engine(SLOW, "drain", (*UNIFIED, "-b", "128"), context=POOL)
    server.complete(talk, 4, cache_prompt=True, id_slot=3)
    running = server.start(
        {**wanted.body, "stream": True, "return_progress": True, "id_slot": 0}, tag="running"
    )
    running.wait_token()
    late = server.start(greedy(f"{talk} again", 5, cache_prompt=True, id_slot=3), tag="late")
    eventually(lambda: "queued" in server.members(), "the late one queues")
    assert_equal_tokens(running.ok().token_ids, wanted.tokens, "the running answer")
    late.ok()


def test_a_full_pool_ends_in_an_error_and_an_idle_engine(engine: EngineFactory) -> None:
    """Two endless answers in one small pool: they end with an error, the next request works."""
    args = ("--kv-unified", "--no-cache-idle-slots")
    server = engine("llama", "drain", args, context=512, slots=2)
    streams = [server.stream(words(30, seed), -1) for seed in (1, 2)]
    for stream in streams:
        stream.finish()
    server.wait_idle()
    assert server.complete(words(5), 5)["tokens_predicted"] == 5


def test_drain_warns_where_an_endless_answer_bites(engine: EngineFactory) -> None:
    """Only when somebody waits for an answer without a limit."""
    server = engine(SLOW, "drain")
    server.complete(words(5), 5)
    endless = server.stream(words(9), -1)
    endless.wait_token()
    assert "no limit" not in server.log()
    late = server.stream(words(9, 1), 3, tag="late")
    eventually(lambda: "no limit" in server.log(), "a warning")
    endless.close()
    late.ok()


def test_waiting_is_billed_as_waiting(engine: EngineFactory) -> None:
    """Queue and barrier have their own fields; prompt and answer times are the member's own."""
    server = engine(SLOW, "drain", ("-b", "128"))
    long = server.stream(words(900), 300, tag="long")
    long.wait_progress()
    short = server.stream(words(15, 1), 20, tag="short")
    long.wait_token()
    late = server.stream(words(15, 2), 20, tag="late")
    for exchange in (long, short, late):
        exchange.ok()
    story = Story(server.events())
    found = {e: x.final["timings"] for e, x in (("long", long), ("short", short), ("late", late))}
    barrier_ms = (story.first("open").t_us - story.first("ready", "short").t_us) / 1000
    assert found["short"]["barrier_ms"] == pytest.approx(barrier_ms, rel=0.1, abs=5)
    own_ms = (story.first("ready", "short").t_us - story.first("admit", "short").t_us) / 1000
    assert found["short"]["prompt_ms"] <= own_ms + 5
    queued, joined = story.all("admit", "late")
    assert found["late"]["queue_ms"] == pytest.approx((joined.t_us - queued.t_us) / 1000, abs=5)
    assert found["late"]["queue_ms"] > found["late"]["prompt_ms"]
    total_ms = 1000 * ((late.ended_at_s or 0) - late.sent_at_s)
    billed = sum(found["late"][field] for field in ("queue_ms", "barrier_ms", "prompt_ms", "predicted_ms"))
    assert billed <= total_ms + 5
    assert found["long"]["queue_ms"] < 50
    assert found["long"]["paused_ms"] == 0


def test_waiting_does_not_count_against_the_time_limit(engine: EngineFactory) -> None:
    """`t_max_predict_ms` measures generation only: a pause does not shorten the answer."""
    server = engine(SLOW, "yield", ("-b", "64", "-ub", "4", "--phase-yield-ms", "20"), context=65536)
    limited: dict[str, Any] = {"t_max_predict_ms": LIMIT_MS, "n_indent": 1}
    for attempt in range(ATTEMPTS):
        tag = f"running{attempt}"
        running = server.stream(words(9), 60, tag=tag, **limited)
        running.wait_token()
        # longer where the machine reads too fast
        late = server.stream(words(1100 if attempt < 2 else 5000, attempt), 2, tag=f"late{attempt}")
        running.ok()
        late.ok()
        paused_ms = running.final["timings"]["paused_ms"]
        whole = running.final["tokens_predicted"] == 60
        if whole and Story(server.events()).all("pause", tag) and paused_ms > LIMIT_MS:
            break
    else:
        pytest.fail(f"never whole after a pause of more than {LIMIT_MS} ms in {ATTEMPTS} attempts")
    assert running.final["timings"]["predicted_ms"] < LIMIT_MS
