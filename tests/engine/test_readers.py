"""Everything the engine shows about itself can be read at any moment of any load, from any thread."""

from __future__ import annotations

import pytest

from tests.engine.conftest import EngineFactory
from tests.engine.enginekit.load import run_load
from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.readers import VIEWS, Readers
from tests.engine.enginekit.waiting import eventually

READS, ROUNDS = 40, 30


@pytest.mark.parametrize("policy", ["mixed", "drain", "yield"])
def test_readers_beside_a_load(engine: EngineFactory, policy: str) -> None:
    """Four threads read all views without pause: every answer is whole, possible, and in order."""
    args = ("--lora", str(zoo("lora-a")), "--lora", str(zoo("lora-b")), "-b", "64", "--phase-yield-ms", "15")
    server = engine("llama", policy, (*args, "--embeddings", "--pooling", "none"), context=16384)
    with Readers(server, exclusive=policy != "mixed") as readers:
        for seed in range(ROUNDS):
            report = run_load(server, 300 + seed, 30, adapters=2)
            assert not report.failures, report.failures[:3]
            if min(readers.reads.values(), default=0) >= READS and {"prefill", "generate"} <= set(
                readers.seen
            ):
                break
    assert readers.problems == []
    assert set(readers.reads) == set(VIEWS)
    assert min(readers.reads.values()) >= READS, readers.reads
    assert {"prefill", "generate"} <= set(readers.seen), readers.seen


def test_readers_while_it_sleeps_and_wakes(engine: EngineFactory) -> None:
    """`/metrics` and `/props` go on while the model is dropped and loaded again; they wake nobody."""
    server = engine("llama", "drain", ("--sleep-idle-seconds", "1", "--embeddings", "--pooling", "none"))

    def sleeps() -> bool:
        return bool(server.get("/props").ok()["is_sleeping"])

    with Readers(server, exclusive=True, views=("metrics", "props")) as readers:
        for seed in range(3):
            assert not run_load(server, 400 + seed, 5).failures
            eventually(sleeps, "asleep again", timeout_s=60, poll_s=0.1)
    assert readers.problems == []
    assert min(readers.reads[view] for view in ("metrics", "props")) >= READS
