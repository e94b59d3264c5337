"""Prompts with pictures beside prompts of text, for each projector of the zoo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens
from tests.engine.enginekit.http import Json
from tests.engine.enginekit.oracle import MIN_GAP
from tests.engine.enginekit.phase import Story
from tests.engine.enginekit.pictures import media_prompt, picture_chat
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server
from tests.engine.enginekit.zooclaims import Feature, Proof, SetUp
from tests.engine.enginekit.zootable import proves

CHAT = "/v1/chat/completions"
PICTURES, SHADES = 3, range(5, 250, 12)
ROUNDS, ANSWER = 20, 500
# the admit window ends when all four slots are taken: one cohort, however slow the client
GATHER = {"x_phase_gather_ms": "1000"}


def _answer(body: Json) -> Json:
    found: Json = body["choices"][0]
    return found


def _gap(body: Json) -> float:
    tops = [step["top_logprobs"] for step in _answer(body)["logprobs"]["content"]]
    return min((top[0]["logprob"] - top[1]["logprob"] for top in tops if len(top) > 1), default=1.0)


def _text(body: Json) -> str:
    return str(_answer(body)["message"]["content"])


def _single_runs(plain: Server, *, exact: bool) -> dict[int, Json]:
    """Return the unpatched engine's answers to three pictures by shade: all different, none near a tie."""
    found: dict[int, Json] = {}
    for shade in SHADES:
        answer = plain.post(CHAT, picture_chat(shade)).ok()
        if (not exact or _gap(answer) >= MIN_GAP) and _text(answer) not in map(_text, found.values()):
            found[shade] = answer
        if len(found) == PICTURES:
            return found
    raise AssertionError(f"only {len(found)} different answers in {len(SHADES)} pictures")


@proves(Feature.PICTURES)
def test_zoo_pictures(
    engine: EngineFactory, stock: EngineFactory, oracle: OracleFactory, case: SetUp, policy: str
) -> None:
    """Three pictures and a text in one cohort: each answer is the single one; then each picture alone."""
    flags = (*EXACT, *case.flags(), "-b", "128")
    wanted = _single_runs(stock(case.model, flags), exact=case.exact)
    text = oracle(case.model, EXACT).steady((words(150, s) for s in range(40)), 1, 60)[0]
    server = engine(case.model, policy, flags)
    chats = [server.start(picture_chat(shade), path=CHAT, tag=f"p{shade}", **GATHER) for shade in wanted]
    beside = server.start(text.body, tag="text", **GATHER)
    for exchange, reference in zip(chats, wanted.values(), strict=True):
        found = exchange.ok().json()
        for count in ("prompt_tokens", "completion_tokens"):
            assert found["usage"][count] == reference["usage"][count]
        if case.exact:
            assert _text(found) == _text(reference)
    if case.exact:
        assert_equal_tokens(beside.ok().token_ids, text.tokens, "the text beside the pictures")
    assert len(beside.ok().token_ids) == len(text.tokens)

    story = Story(server.events())
    assert len({story.cohort(tag) for tag in ("text", *(f"p{shade}" for shade in wanted))}) == 1
    assert sum(view.kind == "media" for view in server.trace()) == PICTURES
    for shade, reference in wanted.items():
        found = server.post(CHAT, {**picture_chat(shade), "cache_prompt": False}).ok()
        assert _text(found) == _text(reference), "alone"


@proves(Feature.PICTURE_LAST)
def test_zoo_a_picture_at_the_end(
    engine: EngineFactory, stock: EngineFactory, oracle: OracleFactory, case: SetUp, policy: str
) -> None:
    """Refused with 400, or answered from its own logits: while others answer the same as alone."""
    flags = (*EXACT, *case.flags())
    refused = case.claims[Feature.PICTURE_LAST].proof is Proof.REFUSED
    text = oracle(case.model, EXACT).steady((words(30, s) for s in range(80)), 1, ANSWER)[0]
    server = engine(case.model, policy, (*flags, "--phase-yield-ms", "5"))

    alone = _ask_last(server, "alone")
    if refused:
        assert alone == (400, '"prompt" must not end with a media chunk, add text after it')
    else:
        assert alone == _ask_last(stock(case.model, flags), "single")
    for number in range(ROUNDS):
        other = server.stream(text.body["prompt"], ANSWER, tag=f"o{number}")
        other.wait_token()
        status, told = _ask_last(server, f"p{number}")
        runs = not other.done
        assert status == alone[0]
        if case.exact:
            assert told == alone[1]
            assert_equal_tokens(other.ok().token_ids, text.tokens, "the answer beside it")
        other.ok()
        story = Story(server.events())
        release = story.seq("release", f"o{number}")
        queued = any(event.seq < release for event in story.all("admit", f"p{number}"))
        if queued or (refused and runs):
            assert server.post("/completion", media_prompt(server, 50, " and then")).status == 200
            return
    pytest.fail(f"the other answer always ended first, in {ROUNDS} rounds")


def _ask_last(server: Server, tag: str) -> tuple[int, Any]:
    """Ask with a picture at the end of the prompt; return the status, and the error or the tokens."""
    answer = server.post("/completion", media_prompt(server, 50, ""), {"x-request-id": tag})
    told = answer.json()
    return answer.status, told["error"]["message"] if "error" in told else told["tokens"]
