"""Whatever shares a cohort, each answer is the one the unpatched engine gives to it alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens
from tests.engine.enginekit.http import Exchange
from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.oracle import Oracle, Reference
from tests.engine.enginekit.phase import Story
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server
from tests.engine.enginekit.waiting import eventually

POLICIES = ("drain", "yield")
ALL_POLICIES = ("mixed", "drain", "yield")
RECIPE = ("-ub", "4", "-fa", "off", "--no-kv-unified")


def _prompts(count: int, first_seed: int = 0) -> list[str]:
    """Return prompts of very different lengths: 3 to about 200 words."""
    return [words(3 + (37 * i) % 190, first_seed + i) for i in range(count)]


def _steady(oracle: Oracle, count: int, n_predict: int, seed: int = 0, **more: Any) -> list[Reference]:
    return oracle.steady(_prompts(4 * count + 8, seed), count, n_predict, **more)


def _run_all(server: Server, references: list[Reference], **more: Any) -> list[Exchange]:
    body = {"stream": True, "return_progress": True, **more}
    started = [
        server.start({**reference.body, **body}, tag=f"r{number}")
        for number, reference in enumerate(references)
    ]
    return [exchange.ok() for exchange in started]


def _assert_equal(found: list[Exchange], wanted: list[Reference]) -> None:
    for number, (exchange, reference) in enumerate(zip(found, wanted, strict=True)):
        assert_equal_tokens(exchange.token_ids, reference.tokens, f"answer {number}")


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_contract_concurrent_equals_single(engine: EngineFactory, oracle: OracleFactory, policy: str) -> None:
    """Twelve unequal requests on four slots, streams and not, against single runs."""
    wanted = [_steady(oracle(), 1, 20 + 53 * i % 160, 50 * i)[0] for i in range(12)]
    server = engine(policy=policy, args=(*EXACT, "-b", "64", "--phase-yield-ms", "5"))
    _assert_equal(_run_all(server, wanted), wanted)
    whole = [server.start(reference.body) for reference in wanted]
    _assert_equal([exchange.ok() for exchange in whole], wanted)
    assert (server.metrics()["phase_yield_total"] > 0) == (policy == "yield")


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_the_exactness_recipe(engine: EngineFactory, oracle: OracleFactory, policy: str) -> None:
    """The same with the flags that make results independent of batch composition."""
    wanted = [r for r in _steady(oracle(args=RECIPE), 12, 24, 100) if r.gap > 0.01]
    server = engine(policy=policy, args=(*RECIPE, "-b", "64", "--phase-yield-ms", "5"))
    assert len(wanted) >= 6
    _assert_equal(_run_all(server, wanted), wanted)


LORA_SCALES = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.0), (0.0, 0.0))


def _loras() -> tuple[str, ...]:
    return ("--lora", str(zoo("lora-a")), "--lora", str(zoo("lora-b")))


def _lora_references(oracle: OracleFactory, n_predict: int) -> list[Reference]:
    adapted = oracle(args=(*EXACT, *_loras()))
    found = []
    for number, scales in enumerate(LORA_SCALES):
        lora = [{"id": i, "scale": scale} for i, scale in enumerate(scales)]
        found += _steady(adapted, 1, n_predict, 400 + 50 * number, lora=lora)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_incompatible_groups_in_one_cohort(
    engine: EngineFactory, oracle: OracleFactory, policy: str
) -> None:
    """Four adapters' answers are right, and the groups take turns: nobody is silent for long."""
    wanted = _lora_references(oracle, 150)
    args = (*EXACT, *_loras(), "-b", "64", "--phase-yield-ms", "600000")
    server = engine(policy=policy, args=(*args, "--phase-admit-ms", "20000"))
    _assert_equal(_run_all(server, wanted), wanted)

    cohorts = {Story(server.events()).cohort(f"r{number}") for number in range(4)}
    assert len(cohorts) == 1, "the four did not share a cohort"
    generated = [next(iter(view.slots)) for view in server.trace() if view.generated]
    assert all(len(view.slots) == 1 for view in server.trace()), "adapters shared a batch"
    longest, run = 0, 0
    alive = {slot: generated.count(slot) for slot in set(generated)}
    for before, slot in zip([None, *generated], generated, strict=False):
        alive[slot] -= 1
        run = run + 1 if slot == before else 1
        others = any(left > 0 for other, left in alive.items() if other != slot)
        longest = max(longest, run if others else 0)
    assert 1 <= longest <= 32, f"one group ran {longest} steps while others waited"
    switches = sum(a != b for a, b in zip(generated, generated[1:], strict=False))
    assert switches <= len(generated) / 16 + 8, f"{switches} switches in {len(generated)} steps"


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_activated_adapters_in_one_cohort(
    engine: EngineFactory, oracle: OracleFactory, policy: str
) -> None:
    """Several prompts invoke the adapter at different places: each before it, without it."""
    flags = (*EXACT, "--lora", str(zoo("alora")))
    lora = [{"id": 0, "scale": 1.0}]
    wanted = []
    for number, before in enumerate((40, 5, 120, 0)):
        prompts = (f"{words(before, 30 * number + s)} <tool_call> {words(6, s)}" for s in range(25))
        wanted += oracle(args=flags).steady(prompts, 1, 20, lora=lora)
    plain = oracle(args=flags).ask(wanted[0].body["prompt"], 20, lora=[{"id": 0, "scale": 0.0}])
    assert plain.tokens != wanted[0].tokens, "the adapter does nothing"
    server = engine(policy=policy, args=(*flags, "-b", "64", "--phase-admit-ms", "200"))
    _assert_equal(_run_all(server, wanted), wanted)


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_cached_continuation(engine: EngineFactory, oracle: OracleFactory, policy: str) -> None:
    """A conversation's second turn reuses its first, in company, with the right answer."""
    first = words(120, 500)
    second = oracle().steady((f"{first} {words(4, seed)}" for seed in range(40)), 1, 24)[0]
    server = engine(policy=policy, args=(*EXACT, "-b", "64"))
    server.complete(first, 4, cache_prompt=True)
    others = [server.stream(prompt, 20) for prompt in _prompts(2, 520)]
    found = server.start({**second.body, "cache_prompt": True}).ok()
    assert found.final["timings"]["cache_n"] > 100
    assert_equal_tokens(found.token_ids, second.tokens, "the continuation")
    for other in others:
        other.ok()


@pytest.mark.parametrize("model", ["llama", "mamba", "qwen35-mtp"])
def test_contract_ram_cache_and_checkpoints(engine: EngineFactory, oracle: OracleFactory, model: str) -> None:
    """Three conversations on one slot: each turn comes back from the cache, right."""
    server = engine(model, args=(*EXACT, "-b", "64"), slots=1, context=4096)
    talks = [words(150, 540 + number) for number in range(3)]
    reused = 0
    for turn in range(2):
        for number, talk in enumerate(talks):
            tails = (f"{talk} {words(3 + 5 * turn, 600 + 10 * number + k)}" for k in range(10))
            wanted = oracle(model).steady(tails, 1, 16)[0]
            found = server.post("/completion", {**wanted.body, "cache_prompt": True}).ok()
            reused += found["timings"]["cache_n"]
            assert_equal_tokens(found["tokens"], wanted.tokens, f"turn {turn} of {number}")
    assert reused > 0


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_contract_token_probabilities(engine: EngineFactory, stock: EngineFactory, policy: str) -> None:
    """`n_probs` of every token, the first (from the retained row) included, equal stock's."""
    flags = (*EXACT, "-b", "64")
    patched, plain = engine(policy=policy, args=flags), stock(args=flags)
    for seed in (1, 2, 3):
        for post_sampling in (False, True):
            body = {"n_probs": 5, "post_sampling_probs": post_sampling, "temperature": 0.7}
            found = patched.complete(words(90, seed), 12, seed=seed, **body)
            wanted = plain.complete(words(90, seed), 12, seed=seed, **body)
            assert found["completion_probabilities"] == wanted["completion_probabilities"]


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_probabilities_of_a_waiting_member(engine: EngineFactory, policy: str) -> None:
    """The first token's top candidates are its own row's, although others were decoded since."""
    server = engine("llama-mid", policy, (*EXACT, "-b", "64"))
    alone = server.complete(words(12, 1), 3, n_probs=5)
    long = server.stream(words(500, 2), 3)
    long.wait_progress()
    found = server.complete(words(12, 1), 3, n_probs=5)
    long.ok()
    assert_equal_tokens(found["tokens"], alone["tokens"], "the waiting member's answer")
    for ours, theirs in zip(
        found["completion_probabilities"], alone["completion_probabilities"], strict=True
    ):
        assert [t["id"] for t in ours["top_logprobs"]] == [t["id"] for t in theirs["top_logprobs"]]
        assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["river", "stone"]}},
    "required": ["a", "b"],
}
SAMPLED: dict[str, dict[str, Any]] = {
    "json-schema": {"json_schema": SCHEMA},
    "grammar": {"grammar": 'root ::= ("yes" | "no") " " [a-f]+ "."'},
    "logit-bias": {"logit_bias": [[" river", 4.0], [342, False]], "temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7, "top_k": 30},
    "penalties": {"repeat_penalty": 1.4, "repeat_last_n": 32, "dry_multiplier": 0.8},
    "mirostat": {"mirostat": 2, "temperature": 0.8, "seed": 3},
    "min-keep": {"temperature": 0.9, "seed": 5, "min_p": 0.05, "min_keep": 2, "typical_p": 0.9},
}


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("kind", SAMPLED)
def test_contract_samplers(engine: EngineFactory, stock: EngineFactory, kind: str, policy: str) -> None:
    """Grammar, bias, penalties, seeds: alone, the answer is stock's in every field that counts."""
    flags = (*EXACT, "-b", "64")
    patched, plain = engine(policy=policy, args=flags), stock(args=flags)
    body = {"ignore_eos": False, **SAMPLED[kind]}
    for prompt in (words(70, 8), words(9, 9)):
        found = patched.complete(prompt, 60, **body)
        wanted = plain.complete(prompt, 60, **body)
        for field in ("content", "tokens", "stop_type", "tokens_predicted", "truncated"):
            assert found[field] == wanted[field], field


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_grammars_in_one_cohort(engine: EngineFactory, policy: str) -> None:
    """Members with a grammar wait at the barrier as others do, and end well-formed."""
    server = engine(policy=policy, args=("-b", "64"))
    started = [
        server.start(
            {
                "prompt": words(10 + 90 * i, i),
                "n_predict": 120,
                "json_schema": SCHEMA,
                "temperature": 0,
            }
        )
        for i in range(4)
    ]
    for exchange in started:
        text = exchange.ok().final["content"]
        assert text.strip().startswith("{"), text
        assert text.strip().endswith("}"), text
        assert exchange.final["stop_type"] == "eos"


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_contract_several_choices(engine: EngineFactory, stock: EngineFactory, policy: str) -> None:
    """Parent and children, seeded: the same set as stock's; the children differ."""
    flags = (*EXACT, "-b", "64")
    patched, plain = engine(policy=policy, args=flags), stock(args=flags)
    body = {"n_cmpl": 3, "temperature": 1.0, "seed": 11, "top_k": 40}
    found = patched.complete(words(200, 4), 24, **body)
    wanted = plain.complete(words(200, 4), 24, **body)
    assert [choice["content"] for choice in found] == [choice["content"] for choice in wanted]
    assert len({choice["content"] for choice in found}) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_a_family_in_company(engine: EngineFactory, oracle: OracleFactory, policy: str) -> None:
    """Greedy children and their parent all give the single answer, beside another member."""
    family, other = _steady(oracle(), 2, 30, 900)
    server = engine(policy=policy, args=(*EXACT, "-b", "32"))
    started = [
        server.start({**family.body, "n_cmpl": 3}),
        server.start(other.body),
    ]
    choices = started[0].ok().json()
    assert len(choices) == 3
    for choice in choices:
        assert_equal_tokens(choice["tokens"], family.tokens, "a child's answer")
    assert_equal_tokens(started[1].ok().token_ids, other.tokens, "the companion's answer")


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_contract_context_shift(engine: EngineFactory, oracle: OracleFactory, policy: str) -> None:
    """Answers longer than their context are stock's, although they share and are paused."""
    shift = (*EXACT, "--context-shift")
    prompts = (words(20, seed) for seed in range(60))
    wanted = oracle(args=shift, context=512).steady(prompts, 2, 700)
    args = (*shift, "-b", "64", "--phase-yield-ms", "10", "--phase-admit-ms", "100")
    server = engine(policy=policy, args=args, slots=3, context=1536)
    found = [server.start(reference.body) for reference in wanted]
    while not all(exchange.done for exchange in found):
        server.complete(words(40, 3), 2)
    for exchange, reference in zip(found, wanted, strict=True):
        assert exchange.ok().final["truncated"] is True
        assert_equal_tokens(exchange.token_ids, reference.tokens, "the shifted answer")
    assert (server.metrics()["phase_yield_total"] > 0) == (policy == "yield")


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_streaming_equals_not_streaming(engine: EngineFactory, policy: str) -> None:
    """The same text, tokens and end, from `/completion` and from the chat endpoint."""
    server = engine(policy=policy, args=(*EXACT, "-b", "64"))
    stream = server.stream(words(80, 3), 30).ok()
    whole = server.complete(words(80, 3), 30)
    assert stream.text == whole["content"]
    assert stream.token_ids == whole["tokens"]
    for field in ("stop_type", "tokens_predicted", "tokens_evaluated", "truncated"):
        assert stream.final[field] == whole[field]

    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": words(30, 2)}],
        "max_tokens": 20,
        "temperature": 0,
    }
    plain = server.post("/v1/chat/completions", chat).ok()
    parts = server.start({**chat, "stream": True}, path="/v1/chat/completions").ok()
    deltas = [e.data["choices"][0]["delta"] for e in parts.events if e.data["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert text == plain["choices"][0]["message"]["content"]


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_slot_save_and_restore(
    engine: EngineFactory, oracle: OracleFactory, policy: str, tmp_path: Any
) -> None:
    """A saved slot restored into another continues with the right answer, also in company."""
    folder = tmp_path / "saved"
    folder.mkdir()
    base = words(150, 700)
    wanted = oracle().steady((f"{base} {words(3, seed)}" for seed in range(30)), 1, 20)[0]
    server = engine(policy=policy, args=(*EXACT, "--slot-save-path", str(folder)))
    server.complete(base, 1, cache_prompt=True, id_slot=0)
    saved = server.post("/slots/0?action=save", {"filename": "talk.bin"}).ok()
    assert saved["n_saved"] > 150
    restored = server.post("/slots/2?action=restore", {"filename": "talk.bin"}).ok()
    assert restored["n_restored"] == saved["n_saved"]
    other = server.stream(words(20, 5), 60)
    body = {**wanted.body, "cache_prompt": True, "id_slot": 2}
    found = server.post("/completion", body).ok()
    assert found["timings"]["cache_n"] > 150
    assert_equal_tokens(found["tokens"], wanted.tokens, "the restored conversation")
    other.ok()
    assert server.post("/slots/2?action=erase", {}).ok()["n_erased"] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_embeddings_beside_generation(
    engine: EngineFactory, stock: EngineFactory, policy: str
) -> None:
    """On a server that does both: the vectors are stock's; they wait for a drain, never seal."""
    args = ("-b", "512", "--embeddings", "--pooling", "none", *EXACT)
    plain = stock("llama-mid", args)
    server = engine("llama-mid", policy, (*args, "--phase-yield-ms", "600000"))
    texts = [words(12, seed) for seed in range(3)]
    wanted = [plain.post("/embeddings", {"content": text}).ok() for text in texts]
    running = server.stream(words(10, 1), 1200, tag="running")
    running.wait_token()
    asked = [
        server.start({"content": text}, path="/embeddings", tag=f"e{number}")
        for number, text in enumerate(texts)
    ]
    eventually(lambda: server.members().count("queued") == 3, "they queue")
    running.ok()
    for exchange, reference in zip(asked, wanted, strict=True):
        exchange.ok()
        _assert_close(exchange.json(), reference)
    story = Story(server.events())
    assert not [e for e in story.all("seal") if e.request.startswith("e")]
    for number in range(3):
        joined = [e for e in story.all("admit", f"e{number}") if e.cohort]
        assert joined[0].seq > story.seq("release", "running")


def _assert_close(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        for row, reference in zip(ours["embedding"], theirs["embedding"], strict=True):
            assert row == pytest.approx(reference, abs=1e-4)


@pytest.mark.parametrize("model", ["bert-embed", "bert-rerank"])
def test_contract_pooling_servers_run_mixed(engine: EngineFactory, model: str) -> None:
    """A context that cannot sample has nothing to protect: policy `mixed`, no complaint."""
    kind = "--rerank" if model == "bert-rerank" else "--embeddings"
    server = engine(model, "drain", (kind, "-b", "2048", "-ub", "2048"))
    assert server.get("/props").ok()["phase"]["policy"] == "mixed"
    if model == "bert-rerank":
        body = {"query": "river", "documents": [words(5, seed) for seed in range(12)]}
        answer = server.post("/v1/rerank", body).ok()
        assert len(answer["results"]) == 12
    else:
        answer = server.post("/v1/embeddings", {"input": [words(5, s) for s in range(12)]}).ok()
        assert [len(item["embedding"]) for item in answer["data"]] == [64] * 12


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_backend_samplers(engine: EngineFactory, oracle: OracleFactory, policy: str) -> None:
    """Sampling on the backend gives the same tokens, the first one (from the row) included."""
    wanted = _steady(oracle(), 6, 30, 800)
    server = engine(policy=policy, args=(*EXACT, "-b", "64", "--backend-sampling"))
    _assert_equal(_run_all(server, wanted, backend_sampling=True), wanted)
