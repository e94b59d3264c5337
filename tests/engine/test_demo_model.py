"""A trained model of a useful size: concurrent answers are those of the unpatched engine to each alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens
from tests.engine.enginekit.phase import Story

RECIPE = ("-ub", "1", "-fa", "off", "--no-kv-unified")
"""One token per kernel call: what else is in a batch cannot change a result."""
QUESTIONS = (
    "Name a colour.",
    "Why is the sea salty? Tell it to a child of five, in two short sentences, and use no long words.",
    "Count from one to nine and say which of these numbers can be divided by three without a rest.",
    "Write a line about rain.",
    "What does a lighthouse do at night, and who looks after it when there is a storm?",
)
TOKENS = 24


@pytest.mark.parametrize("policy", ["mixed", "drain", "yield"])
def test_contract_a_trained_model_answers_as_if_alone(
    engine: EngineFactory, oracle: OracleFactory, demo_model: Path, policy: str
) -> None:
    """Five questions on four slots, token for token, first tokens only behind the barrier."""
    alone = oracle(demo_model, args=RECIPE)
    wanted = [alone.ask(f"Question: {question}\nAnswer:", TOKENS) for question in QUESTIONS]
    server = engine(demo_model, policy, (*RECIPE, "-b", "16", "--phase-yield-ms", "300"), context=2048)
    body = {"stream": True, "return_progress": True}
    started = [
        server.start({**reference.body, **body}, tag=f"q{number}") for number, reference in enumerate(wanted)
    ]
    for number, (exchange, reference) in enumerate(zip(started, wanted, strict=True)):
        exchange.ok(timeout_s=180)
        assert_equal_tokens(exchange.token_ids, reference.tokens, f"answer {number}")
    if policy != "mixed":
        story = Story(server.events())
        assert len(story.all("ready")) >= len(QUESTIONS)
