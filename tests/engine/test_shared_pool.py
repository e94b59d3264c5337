"""Prompts that do not fit into a shared pool together do not share a cohort, whatever the policy."""

from __future__ import annotations

import pytest

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens
from tests.engine.enginekit.phase import Story
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server
from tests.engine.enginekit.waiting import eventually

POOL = 1024
ARGS = (*EXACT, "--kv-unified", "-b", "128", "--phase-admit-ms", "2000", "--no-cache-idle-slots")


def _tokens(server: Server, prompt: str) -> int:
    return len(server.post("/tokenize", {"content": prompt}).ok()["tokens"])


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("policy", ["drain", "yield"])
def test_what_does_not_fit_together_runs_one_after_another(
    engine: EngineFactory, oracle: OracleFactory, policy: str, copies: int
) -> None:
    """Two requests gathered in one admit window: both answers are whole and right, each in its own cohort.

    With `copies` the one that has to wait brings a child along.
    """
    short = oracle("llama-mid").steady((words(70, seed) for seed in range(40)), 1, 30)[0]
    long = oracle("llama-mid").steady((words(605, seed) for seed in range(40, 80)), 1, 12)[0]
    server = engine("llama-mid", policy, ARGS, context=POOL)
    held = _tokens(server, short.body["prompt"]) + _tokens(server, long.body["prompt"])
    assert held > POOL, held
    assert _tokens(server, long.body["prompt"]) + copies * 12 < POOL
    first = server.start({**short.body, "stream": True, "return_progress": True}, tag="short")
    # the order of arrival is the engine's, not that of two threads
    eventually(lambda: Story(server.events()).all("admit", "short"), "the short one is there")
    more = {"n_cmpl": copies} if copies > 1 else {"stream": True, "return_progress": True}
    second = server.start({**long.body, **more}, tag="long")
    assert_equal_tokens(first.ok(timeout_s=120).token_ids, short.tokens, "the short answer")
    second.ok(timeout_s=120)
    if copies == 1:
        assert_equal_tokens(second.token_ids, long.tokens, "the long answer")
    else:
        for answer in second.json():
            assert_equal_tokens(answer["tokens"], long.tokens, f"copy {answer['index']}")
    story = Story(server.events())
    assert story.cohort("long") > story.cohort("short")
    slot = story.slot("long")
    admitted = [event.cohort for event in story.all("admit", "long") if event.slot == slot]
    assert admitted == [0, story.cohort("long")], "queued once, then in a cohort of its own"
    assert story.seq("admit", "long") < story.seq("open"), "it was there before the first cohort opened"
    assert server.metrics()["phase_prefill_total"] == 2
