"""`mixed` is the unpatched engine: same tokens, probabilities, statuses and JSON.

Only the listed keys are added. Times, ids and dates are compared by type.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.conftest import EngineFactory
from tests.engine.enginekit.http import Answer, request
from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server, greedy

ADDED = {"queue_ms", "barrier_ms", "paused_ms", "phase", "build"}
VOLATILE = {"id", "created", "created_at", "completed_at", "id_task", "id_slot"}
VOLATILE |= {"system_fingerprint", "build_info", "media_marker"}
TIMES = ("_ms", "_per_second", "_second")
PATHS = {"model_path", "path", "model", "name", "model_alias"}

MESSAGES = [{"role": "user", "content": "count the boats"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "completion": ("POST", "/completion", greedy(words(30), 12)),
    "probabilities": ("POST", "/completion", greedy(words(30), 6, n_probs=4)),
    "stream": ("POST", "/completion", greedy(words(90), 12, stream=True)),
    "timings-per-token": (
        "POST",
        "/completion",
        greedy(words(30), 4, stream=True, timings_per_token=True),
    ),
    "family": ("POST", "/completion", greedy(words(30), 8, n_cmpl=3, temperature=1, seed=5)),
    "array": ("POST", "/completion", greedy([words(30), words(4, 1)], 8)),
    "stop-word": ("POST", "/completion", greedy("river", 80, stop=["e"])),
    "empty-prompt": ("POST", "/completion", greedy("", 5)),
    "zero-tokens": ("POST", "/completion", greedy("river", 0)),
    "token-ids": ("POST", "/completion", greedy([40, 41, 42, 300], 5)),
    "grammar": ("POST", "/completion", greedy("river", 30, grammar='root ::= "ab" [c-f]+')),
    "bad-grammar": ("POST", "/completion", greedy("river", 5, grammar="root ::= (")),
    "bad-json": ("POST", "/completion", b"{"),
    "bad-type": ("POST", "/completion", {"prompt": {"a": 1}}),
    "no-prompt": ("POST", "/completion", {}),
    "bad-n": ("POST", "/completion", greedy("river", 5, n_cmpl=9)),
    "too-long": ("POST", "/completion", greedy(words(4000), 5)),
    "too-long-stream": ("POST", "/completion", greedy(words(4000), 5, stream=True)),
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat-stream": ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
    "chat-usage": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat-logprobs": (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 3},
    ),
    "chat-no-messages": ("POST", "/v1/chat/completions", {}),
    "completions": (
        "POST",
        "/v1/completions",
        {"prompt": "river", "max_tokens": 8, "temperature": 0},
    ),
    "messages": ("POST", "/v1/messages", {**CHAT, "model": "m"}),
    "messages-stream": ("POST", "/v1/messages", {**CHAT, "model": "m", "stream": True}),
    "responses": (
        "POST",
        "/v1/responses",
        {"input": "river", "max_output_tokens": 8, "temperature": 0},
    ),
    "infill": (
        "POST",
        "/infill",
        {"input_prefix": "the ", "input_suffix": " mill", "n_predict": 8, "temperature": 0},
    ),
    "tokenize": ("POST", "/tokenize", {"content": words(20)}),
    "detokenize": ("POST", "/detokenize", {"tokens": [40, 41, 300]}),
    "template": ("POST", "/apply-template", {"messages": MESSAGES}),
    "embedding-refused": ("POST", "/v1/embeddings", {"input": "river"}),
    "adapters": ("GET", "/lora-adapters", None),
    "models": ("GET", "/v1/models", None),
    "health": ("GET", "/health", None),
    "props": ("GET", "/props", None),
    "slots": ("GET", "/slots", None),
    "save-refused": ("POST", "/slots/0?action=save", {"filename": "x.bin"}),
    "unknown": ("GET", "/nothing", None),
}


def _plain(value: Any, key: str = "") -> Any:
    """Return ``value`` without the added keys, and with volatile values replaced by types."""
    if isinstance(value, dict):
        return {k: _plain(v, k) for k, v in sorted(value.items()) if k not in ADDED}
    if isinstance(value, list):
        return [_plain(item, key) for item in value]
    if key in VOLATILE or key in PATHS or key.endswith(TIMES):
        return type(value).__name__ if not isinstance(value, int) else "number"
    return value


def _events(answer: Answer) -> Any:
    if "text/event-stream" not in answer.headers.get("content-type", ""):
        try:
            return _plain(json.loads(answer.body))
        except ValueError:
            return answer.body.decode()
    lines = [line for line in answer.body.decode().splitlines() if line]
    return [_plain(json.loads(line[5:])) if line.startswith("data: {") else line for line in lines]


def _same(ours: Answer, theirs: Answer) -> None:
    assert ours.status == theirs.status
    assert ours.headers.get("content-type") == theirs.headers.get("content-type")
    assert _events(ours) == _events(theirs)


def _ask(server: Server, name: str) -> Answer:
    method, path, body = REQUESTS[name]
    return request(server.port, method, path, body)


@pytest.fixture
def pair(engine: EngineFactory, stock: EngineFactory) -> Callable[..., tuple[Server, Server]]:
    """Return a factory of a patched engine under `mixed` and an unpatched one, same flags."""

    def start(model: str = "llama", args: tuple[str, ...] = EXACT) -> tuple[Server, Server]:
        return engine(model, "mixed", args), stock(model, args)

    return start


def test_every_request_is_answered_alike(pair: Callable[..., tuple[Server, Server]]) -> None:
    """One request after the other, all endpoints, errors included; then all of them again."""
    ours, theirs = pair()
    for _ in range(2):
        for name in REQUESTS:
            try:
                _same(_ask(ours, name), _ask(theirs, name))
            except AssertionError as error:
                msg = f"{name}: {error}"
                raise AssertionError(msg) from error


@pytest.mark.parametrize("policy", ["drain", "yield"])
def test_alone_every_request_is_answered_alike(
    engine: EngineFactory, stock: EngineFactory, policy: str
) -> None:
    """An exclusive policy changes nothing for a request that is alone.

    But for what `/slots` remembers of refused ones: they are refused before they touch a slot.
    """
    ours, theirs = engine("llama", policy, EXACT), stock("llama", EXACT)
    for name in (name for name in REQUESTS if name != "slots"):
        try:
            _same(_ask(ours, name), _ask(theirs, name))
        except AssertionError as error:
            msg = f"{name}: {error}"
            raise AssertionError(msg) from error


def test_only_the_listed_keys_are_added(pair: Callable[..., tuple[Server, Server]]) -> None:
    """And they are really there."""
    ours, theirs = pair()
    found = ours.complete("river", 3)
    wanted = theirs.complete("river", 3)
    assert set(found) == set(wanted)
    added = set(found["timings"]) - set(wanted["timings"])
    assert added == {"queue_ms", "barrier_ms", "paused_ms"}
    assert set(ours.slots()[3]) - set(theirs.slots()[3]) == {"phase"}
    assert set(ours.get("/props").ok()) - set(theirs.get("/props").ok()) == {"phase", "build"}
    assert set(theirs.metrics()) <= set(ours.metrics())
    missing = set(theirs.metrics()) - set(ours.metrics())
    assert not missing


def test_lora_answers_are_alike(pair: Callable[..., tuple[Server, Server]]) -> None:
    """Adapters by request and by default."""
    args = (*EXACT, "--lora", str(zoo("lora-a")), "--lora", str(zoo("lora-b")))
    ours, theirs = pair(args=args)
    for scales in (None, (1, 0), (0, 1), (0.5, 0.25), (0, 0)):
        more: dict[str, Any] = (
            {} if scales is None else {"lora": [{"id": i, "scale": scale} for i, scale in enumerate(scales)]}
        )
        body = greedy(words(20), 12, n_probs=2, **more)
        _same(ours.post("/completion", body), theirs.post("/completion", body))


@pytest.mark.parametrize(
    ("model", "flag", "path", "body"),
    [
        ("bert-embed", "--embeddings", "/v1/embeddings", {"input": ["a river", "the mill"]}),
        ("bert-embed", "--embeddings", "/v1/embeddings", {"input": [words(3000)]}),
        ("bert-rerank", "--rerank", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("llama", "--embeddings", "/v1/embeddings", {"input": ["a river", "the mill"]}),
    ],
    ids=["embeddings", "too-long", "rerank", "decoder"],
)
def test_pooled_answers_are_alike(
    pair: Callable[..., tuple[Server, Server]], model: str, flag: str, path: str, body: Any
) -> None:
    """Embeddings and rerank scores, bit for bit."""
    pooling = ("--pooling", "last") if model == "llama" else ()
    ours, theirs = pair(model, (flag, "-b", "2048", "-ub", "2048", *pooling))
    _same(ours.post(path, body), theirs.post(path, body))


@pytest.mark.parametrize("model", ["llama", "mamba", "qwen35-mtp", "gemma3-swa", "llama-spm"])
def test_conversations_are_alike(pair: Callable[..., tuple[Server, Server]], model: str) -> None:
    """Cache reuse, branching and checkpoints: the same answers and the same reuse counts."""
    ours, theirs = pair(model)
    base = words(220)
    for tail in ("", " and the boats", " and the mill", " then rain"):
        body = greedy(base + tail, 8, cache_prompt=True, n_probs=2, id_slot=1)
        _same(ours.post("/completion", body), theirs.post("/completion", body))


def test_mixed_batches_are_counted(engine: EngineFactory) -> None:
    """Under `mixed` the counter of mixed batches moves, so that 0 elsewhere means something."""
    server = engine("llama-mid", "mixed", ("-b", "64"))
    running = server.stream(words(9), 200)
    running.wait_token()
    server.complete(words(300, 1), 5)
    running.ok()
    metrics = server.metrics()
    assert metrics["decode_mixed_batches_total"] > 0
    assert any(view.mixed for view in server.trace())
    traced = server.trace()
    assert metrics["decode_mixed_batches_total"] == sum(view.mixed for view in traced)
    assert metrics["decode_prompt_batches_total"] == sum(view.prompt > 0 for view in traced)
    assert metrics["decode_generate_batches_total"] == sum(view.generated > 0 for view in traced)


def test_mixed_tells_the_members_too(engine: EngineFactory) -> None:
    """The phase only describes what runs; nobody queues or waits."""
    server = engine("llama-mid", "mixed", ("-b", "64"))
    running = server.stream(words(9), 600, tag="running")
    running.wait_token()
    other = server.stream(words(500, 1), 5, tag="other")
    other.wait_progress()
    assert sorted(server.members()) == ["generate", "none", "none", "prefill"]
    other.ok()
    running.ok()
    timings = running.final["timings"]
    assert (timings["queue_ms"], timings["barrier_ms"], timings["paused_ms"]) == (0, 0, 0)
