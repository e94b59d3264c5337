"""Random load: nothing mixes, nothing is early, nothing hangs, nothing leaks."""

from __future__ import annotations

import pytest

from tests.engine.conftest import EngineFactory
from tests.engine.enginekit.check import EARLY, MIXED, assert_exclusive
from tests.engine.enginekit.load import Report, run_load
from tests.engine.enginekit.models import extra_model, zoo
from tests.engine.enginekit.phase import NO_SLOT
from tests.engine.enginekit.replay import Replay
from tests.engine.enginekit.server import Server
from tests.engine.enginekit.waiting import eventually

ALL_POLICIES = ("mixed", "drain", "yield")
DECODES = ("decode_prompt_batches_total", "decode_generate_batches_total")


def _start(engine: EngineFactory, policy: str, *more: str) -> Server:
    args = ("--lora", str(zoo("lora-a")), "--lora", str(zoo("lora-b")), "-b", "64")
    both = ("--embeddings", "--pooling", "none", "--phase-yield-ms", "15")
    return engine("llama", policy, (*args, *both, *more), context=16384)


def _assert_all_ended(report: Report, count: int) -> None:
    assert not report.failures, f"{len(report.failures)} failures:\n" + "\n".join(report.failures[:5])
    assert sum(report.outcomes.values()) == count


def _decode_calls(server: Server) -> float:
    metrics = server.metrics()
    return sum(metrics[name] for name in DECODES) - metrics[MIXED]


def _assert_at_rest(server: Server) -> None:
    server.wait_idle()
    assert server.busy_share(1.0) <= 0.02, "the engine does not rest"


def _storm(engine: EngineFactory, policy: str, seed: int, count: int) -> None:
    server = _start(engine, policy)
    report = run_load(server, seed, count, adapters=2)
    _assert_all_ended(report, count)
    assert report.outcomes["left"] > count / 20
    assert report.outcomes["completed"] > count / 3
    _assert_at_rest(server)


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_slice_of_the_storm(engine: EngineFactory, policy: str, seed: int) -> None:
    """200 random requests: cancels, lengths, families, adapters, streams, embeddings."""
    _storm(engine, policy, seed, 200)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_ten_thousand_decode_calls(engine: EngineFactory, policy: str) -> None:
    """0 mixed and 0 early in `drain` and `yield`, > 0 mixed in `mixed`, counters equal the trace."""
    server = _start(engine, policy)
    seed = 0
    while _decode_calls(server) < 10_000:
        seed += 1
        assert seed < 60, "the load is too light"
        _assert_all_ended(run_load(server, 1000 + seed, 150, adapters=2, leave=0.05), 150)
    server.wait_idle()
    metrics, views = server.metrics(), server.trace()
    assert metrics[MIXED] == sum(view.mixed for view in views)
    if policy == "mixed":
        assert metrics[MIXED] > 0
        assert metrics[EARLY] > 0
    else:
        assert_exclusive(server)
    if policy == "yield":
        assert metrics["phase_yield_total"] > 0
    # within a cohort's phase no prompt view follows a generated one
    if policy == "drain":
        newest = 0
        generating = set[int]()
        for view in views:
            assert view.cohort >= newest
            newest = view.cohort
            if view.generated:
                generating.add(view.cohort)
            else:
                assert view.cohort not in generating, "a prompt view after its cohort opened"


@pytest.mark.parametrize("policy", ["drain", "yield"])
def test_a_replayed_storm(engine: EngineFactory, policy: str) -> None:
    """The transitions of a random load, read in pieces, are legal from the first to the last."""
    server = _start(engine, policy)
    replay, since = Replay(slots=4), 0
    for seed in range(12):
        _assert_all_ended(run_load(server, 500 + seed, 12, adapters=2), 12)
        server.wait_idle()
        eventually(lambda: server.phase()["engine"] == "idle", "idle")
        events = server.events(since)
        replay.run(events)
        since = events[-1].seq
        assert replay.engine == "idle"
        assert set(replay.members) == {"none"}
        assert all(e.slot == NO_SLOT for e in events if e.event in ("open", "idle"))


@pytest.mark.parametrize("policy", ["drain", "yield"])
def test_speculation_under_load(engine: EngineFactory, policy: str) -> None:
    """Drafts, cancels and small batches together: no hang, no leak."""
    more = ("-md", str(zoo("llama-draft")), "--spec-type", "draft-simple")
    args = (*more, "--spec-draft-n-max", "4", "-b", "64", "--phase-yield-ms", "15")
    server = engine("llama", policy, (*args, "--embeddings", "--pooling", "none"), context=16384)
    _assert_all_ended(run_load(server, 9, 100), 100)
    _assert_at_rest(server)


@pytest.mark.parametrize("policy", ["drain", "yield"])
@pytest.mark.parametrize("model", ["mamba", "qwen35-mtp", "gemma3-swa"])
def test_other_memories_under_load(engine: EngineFactory, model: str, policy: str) -> None:
    """Recurrent, hybrid and sliding-window caches with checkpoints, cancels and reuse."""
    args = ("-b", "64", "--phase-yield-ms", "15", "--embeddings", "--pooling", "none")
    server = engine(model, policy, args, context=16384)
    _assert_all_ended(run_load(server, 10, 80), 80)
    _assert_at_rest(server)


@pytest.mark.parametrize("policy", ["drain", "yield"])
def test_a_small_shared_pool_under_load(engine: EngineFactory, policy: str) -> None:
    """A pool too small for all: some requests may be told so; the engine lives and rests."""
    args = ("--kv-unified", "-b", "64", "--phase-yield-ms", "15", "--embeddings")
    server = engine("llama", policy, (*args, "--pooling", "none"), context=1024)
    report = run_load(server, 11, 120)
    told = [line for line in report.failures if "exceed" in line.lower()]
    assert told == report.failures, [line for line in report.failures if line not in told][:3]
    _assert_at_rest(server)


@pytest.mark.parametrize("policy", ["drain", "yield"])
def test_a_trained_model_under_load(engine: EngineFactory, policy: str) -> None:
    """The same on a real (tiny) model with another vocabulary."""
    model = extra_model("stories260K.gguf")
    if model is None:
        pytest.skip("no stories260K.gguf: put it into the folder LLAMA_PROXY_TEST_MODELS names")
    args = ("-b", "256", "--phase-yield-ms", "15", "--embeddings", "--pooling", "none")
    server = engine(model, policy, args)
    report = run_load(server, 12, 100)
    told = [line for line in report.failures if "exceed" in line.lower()]
    assert told == report.failures
    _assert_at_rest(server)
