"""Bugs of the unpatched engine that are fixed in every policy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens
from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.pictures import media_prompt, picture_chat
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server, greedy
from tests.engine.enginekit.waiting import eventually

ALL_POLICIES = ("mixed", "drain", "yield")


def _assert_quiet(server: Server) -> None:
    server.wait_idle()
    assert server.busy_share(0.5) <= 0.1, "the engine spins"


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_empty_prompt_with_children_is_answered(engine: EngineFactory, policy: str, stream: bool) -> None:
    """The parent ends without a prompt; its orphan is promoted, answers, and nothing spins."""
    server = engine(policy=policy)
    body: dict[str, Any] = {"prompt": "", "n_cmpl": 2, "n_predict": 5, "stream": stream}
    exchange = server.start(body).finish()
    assert exchange.status == 200, exchange.describe()
    _assert_quiet(server)


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("batch", [8, 32, 64])
def test_children_under_small_batches_are_right(
    engine: EngineFactory, oracle: OracleFactory, policy: str, batch: int
) -> None:
    """The parent's state is copied when its last token was decoded, not before."""
    wanted = oracle().steady((words(100, seed) for seed in range(30)), 1, 12)[0]
    server = engine(policy=policy, args=(*EXACT, "-b", str(batch)))
    running = server.stream([words(20, 1), words(3, 2)], 40)
    answer = server.post("/completion", {**wanted.body, "n_cmpl": 2})
    assert answer.status == 200, answer.body
    for choice in answer.json():
        assert_equal_tokens(choice["tokens"], wanted.tokens, "a choice")
    running.ok()


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_children_outlive_a_full_pool(engine: EngineFactory, policy: str) -> None:
    """Sub-batches forced by a full pool: an error or an answer, no 500 about state, no spin."""
    args = ("--kv-unified", "--no-cache-idle-slots", "-b", "256")
    server = engine(policy=policy, args=args, context=512)
    running = server.stream(words(90), 150)
    running.wait_token()
    exchange = server.start(greedy(words(120, 1), 30, n_cmpl=3)).finish()
    assert exchange.status in (200, 500), exchange.describe()
    if exchange.status == 500:
        assert b"Context size has been exceeded" in exchange.raw, exchange.describe()
    running.finish()
    _assert_quiet(server)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_silent_client_that_leaves_is_noticed(engine: EngineFactory, policy: str) -> None:
    """While another request streams and a monitor polls, a client that waits may leave."""
    server = engine("llama-mid", policy, context=32768)
    running = server.stream(words(9), 8000, tag="running")
    running.wait_token()
    silent = server.start(greedy(words(9, 1), 8000), tag="silent")
    eventually(lambda: sum(s["is_processing"] for s in server.slots()) == 2, "both have slots")
    silent.close()
    eventually(
        lambda: sum(s["is_processing"] for s in server.slots()) == 1 or running.done,
        "the slot is freed",
        timeout_s=60,
    )
    assert not running.done


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_a_pinned_request_spares_the_busy_slot(
    engine: EngineFactory, oracle: OracleFactory, policy: str, moment: str
) -> None:
    """`id_slot` of a busy slot waits for it; it does not load a cached prompt into it."""
    count, n_predict = (600, 10) if moment == "prefill" else (12, 300)
    prompts = (words(count, seed) for seed in range(50))
    wanted = oracle("llama-mid").steady(prompts, 1, n_predict)[0]
    server = engine("llama-mid", policy, (*EXACT, "-b", "64"))
    talk = words(500, 77)
    server.complete(talk, 2, cache_prompt=True, id_slot=1)
    server.complete(words(500, 78), 2, cache_prompt=True, id_slot=1)
    body = {**wanted.body, "stream": True, "return_progress": True, "id_slot": 0}
    running = server.start(body, tag="running")
    if moment == "prefill":
        running.wait_progress()
    else:
        running.wait_token()
    pinned = server.start(greedy(talk, 3, id_slot=0, cache_prompt=True), tag="pinned")
    assert_equal_tokens(running.ok().token_ids, wanted.tokens, "the running answer")
    pinned.ok()


def _vision(start: Any, policy: str | None, *more: str) -> Server:
    args = (*EXACT, "--mmproj", str(zoo("mmproj-llava")), *more)
    server: Server = start("llama", args) if policy is None else start("llama", policy, args)
    return server


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_contract_pictures_in_company(engine: EngineFactory, stock: EngineFactory, policy: str) -> None:
    """Image prompts and text prompts in one cohort: each answer is the single one of stock."""
    plain = _vision(stock, None)
    server = _vision(engine, policy, "-b", "128", "--phase-yield-ms", "20")
    chats = [picture_chat(shade) for shade in (10, 90, 200)]
    path = "/v1/chat/completions"
    wanted = [plain.post(path, chat).ok()["choices"][0]["message"]["content"] for chat in chats]
    assert len(set(wanted)) == 3
    text = server.stream(words(150), 60)
    started = [server.start(chat, path=path) for chat in chats]
    found = [x.ok().json()["choices"][0]["message"]["content"] for x in started]
    assert found == wanted
    text.ok()
    assert any(view.kind == "media" for view in server.trace())


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_prompt_that_ends_in_a_picture(engine: EngineFactory, policy: str) -> None:
    """Refused with 400, or answered by its own logits: in company the same as alone."""
    server = _vision(engine, policy, "-b", "128")
    alone = server.post("/completion", media_prompt(server, 50, ""))
    assert alone.status in (200, 400), alone.body
    other = server.stream(words(40), 1500)
    other.wait_token()
    found = server.post("/completion", media_prompt(server, 50, ""))
    assert found.status == alone.status
    if alone.status == 200:
        assert_equal_tokens(found.json()["tokens"], alone.json()["tokens"], "in company")
    other.ok()
    assert server.post("/completion", media_prompt(server, 50, " and then")).status == 200


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("kind", ["ngram-mod", "ngram-map-k"])
def test_the_drafts_of_all_slots_fit_into_a_batch(
    engine: EngineFactory, oracle: OracleFactory, policy: str, kind: str
) -> None:
    """Four slots whose n-gram drafts together are longer than the batch: the right answers, no abort."""
    prompts = (words(10 + 20 * (seed % 4), seed) for seed in range(60))
    wanted = oracle("llama-loopy").steady(prompts, 4, 300)
    server = engine("llama-loopy", policy, (*EXACT, "-b", "64", "--spec-type", kind))
    for _ in range(3):
        started = [server.start(reference.body) for reference in wanted]
        for exchange, reference in zip(started, wanted, strict=True):
            assert_equal_tokens(exchange.ok().token_ids, reference.tokens, "a drafted answer")
    drafted = sum(exchange.final["timings"].get("draft_n", 0) for exchange in started)
    assert drafted > 0
