"""Tasks that end with their prompt (embeddings, decisions, ranks) beside running answers, and among themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens
from tests.engine.enginekit.phase import Story
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server
from tests.engine.enginekit.zooclaims import Feature, Proof, SetUp
from tests.engine.enginekit.zootable import proves

ROUNDS, TASKS = 20, 3
CLOSE, ROUNDED = 1e-4, 5e-3
"""Absolute, and relative for BERT: its GELU goes through a table in half precision, which turns on the batch."""
LABELS = ("river", "stone", "boat", "mill")


def _embed(number: int) -> tuple[str, Any]:
    return "/embeddings", {"content": words(9 + 20 * number, number)}


def _rank(number: int) -> tuple[str, Any]:
    return "/v1/rerank", {"query": words(4, number), "documents": [words(3 + 5 * n, n) for n in range(5)]}


def _decide(number: int) -> tuple[str, Any]:
    choice = {"type": "choice", "instructions": "which", "criteria": {label: words(2, 3) for label in LABELS}}
    score = {"type": "score", "instructions": "how much", "criteria": ["none", "some", "all"]}
    truth = {"type": "noul", "instructions": "is it so"}
    return "/v1/systemone", {
        "state": words(10 + 30 * number, number),
        "questions": {"a": choice, "b": score, "c": truth},
    }


ASK: dict[str, Callable[[int], tuple[str, Any]]] = {
    "llama, embeddings": _embed,
    "llama-decide": _decide,
    "bert-embed": _embed,
    "bert-rerank": _rank,
}


def _numbers(value: Any) -> list[float]:
    """Return all numbers of an answer in order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in _numbers(value[key])]
    if isinstance(value, list):
        return [number for item in value for number in _numbers(item)]
    return [float(value)] if isinstance(value, int | float) else []


def _assert_alike(found: Any, wanted: Any, *, rounded: bool) -> None:
    numbers = _numbers(wanted)
    assert len(numbers) > 3, wanted
    assert _numbers(found) == pytest.approx(numbers, abs=CLOSE, rel=ROUNDED if rounded else None)


def _round(server: Server, case: SetUp, wanted: list[Any], number: int) -> list[str]:
    """Post the tasks at once, compare each answer, and return their tags."""
    tags = [f"t{number}.{task}" for task in range(TASKS)]
    calls = [ASK[case.name](task) for task in range(TASKS)]
    started = [server.start(body, path=path, tag=tag) for (path, body), tag in zip(calls, tags, strict=True)]
    for exchange, reference in zip(started, wanted, strict=True):
        _assert_alike(exchange.ok().json(), reference, rounded=case.model.startswith("bert"))
    return tags


@proves(Feature.BESIDE)
def test_zoo_beside_answers(
    engine: EngineFactory, stock: EngineFactory, oracle: OracleFactory, case: SetUp, policy: str
) -> None:
    """The numbers are the unpatched engine's; they wait for a drain or a pause, and never seal a cohort."""
    plain = stock(case.model, (*EXACT, *case.flags()))
    calls = [ASK[case.name](task) for task in range(TASKS)]
    wanted = [plain.post(path, body).ok() for path, body in calls]
    server = engine(case.model, policy, (*EXACT, *case.flags(), "--phase-yield-ms", "5"))
    if case.claims[Feature.BESIDE].proof is Proof.MIXED:
        assert server.get("/props").ok()["phase"]["policy"] == "mixed"
        _round(server, case, wanted, 0)
        return

    answer = oracle(case.model, EXACT).steady((words(12, s) for s in range(60)), 1, 900)[0]
    for number in range(ROUNDS):
        running = server.stream(answer.body["prompt"], 900, tag=f"r{number}")
        running.wait_token()
        tags = _round(server, case, wanted, number)
        assert_equal_tokens(running.ok().token_ids, answer.tokens, "the answer beside them")
        story = Story(server.events())
        assert not [seal for seal in story.all("seal") if seal.request in tags]
        release = story.seq("release", f"r{number}")
        queued = [event for tag in tags for event in story.all("admit", tag) if not event.cohort]
        waited = [event for event in queued if event.seq < release]
        paused = story.all("pause", f"r{number}")
        if policy == "drain" and waited:
            joined = [event for tag in tags for event in story.all("admit", tag) if event.cohort]
            assert min(event.seq for event in joined) > release
            return
        if policy == "yield" and waited and paused:
            return
    pytest.fail(f"the answer always ended before the tasks arrived, in {ROUNDS} rounds")
