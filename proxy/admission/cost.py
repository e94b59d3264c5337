"""How much of an engine a request takes: tasks, counted from its body as llama-server counts them.

llama-server posts one task per prompt (`tokenize_input_prompts`), `n` of each (`n_cmpl`, alias `n`;
limited to its slots, else 400), one per embedding input and one per rerank document. Pure.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FREE = frozenset(
    {
        "tokenize",
        "detokenize",
        "apply-template",
        "messages/count_tokens",
        "chat/completions/input_tokens",
        "responses/input_tokens",
        "models",
        "props",
        "slots",
        "health",
        "metrics",
    }
)
_PROMPTS = frozenset({"completion", "completions"})
_EMBEDDINGS = frozenset({"embedding", "embeddings"})
_RERANK = frozenset({"rerank", "reranking"})
_WITH_N = frozenset({"completion", "completions", "chat/completions", "responses", "infill"})
"""Endpoints that hand `n` on to the engine's sampling; the conversion of `messages` drops it."""

_INT32 = 1 << 32
_JSON_INTEGERS = 1 << 64
"""From here on the engine reads a number as floating point, which it then refuses as a count."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tasks of one request (0: takes no slot) and the completions it asks for per prompt."""

    tasks: int
    n: int = 1


def count_work(endpoint: str, body: Mapping[str, Any] | None) -> Work:
    """Count a request's tasks.

    `endpoint` is the path, with or without `/` and `v1/`; `body` the parsed JSON object (None when
    there is none, as in multipart forms: one task). A body that the engine will refuse counts as the
    least it could mean; the refusal is the engine's to give. Unknown endpoints count as one task.
    """
    name = endpoint.strip("/").removeprefix("v1/")
    if name in _FREE:
        return Work(0)
    if body is None:
        return Work(1)
    if name in _EMBEDDINGS:
        given = body["input"] if "input" in body else body.get("content")
        return Work(_prompts(given))
    if name in _RERANK:
        documents = body.get("documents")
        if documents is None:
            documents = body.get("texts")
        return Work(max(1, len(documents)) if isinstance(documents, list) else 1)
    n = _n(body) if name in _WITH_N else 1
    prompts = _prompts(body.get("prompt")) if name in _PROMPTS else 1
    return Work(prompts * n, n)


def charge(tasks: int, n: int, slots: int) -> int:
    """Return the slots a request is charged for: `min(tasks, slots)`.

    A request with `n` above the slots is charged nothing: the engine answers it with a 400 before it
    takes a slot, so it has nothing to wait for.
    """
    return 0 if n > slots else min(tasks, slots)


def is_wide(tasks: int, n: int, slots: int) -> bool:
    """Whether a request has more tasks than the engine has slots, and therefore needs it alone."""
    return n <= slots < tasks


def _n(body: Mapping[str, Any]) -> int:
    """`n_cmpl` wins over its alias `n`; null is absent; what is no positive integer is refused later.

    The engine keeps the low 32 bits of an integer: 4294967298 means 2 to it, and has to mean 2 here.
    """
    for name in ("n_cmpl", "n"):
        value = body.get(name)
        if isinstance(value, int) and abs(value) < _JSON_INTEGERS:
            return max(1, (value + _INT32 // 2) % _INT32 - _INT32 // 2)
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            return max(1, int(value))
        if value is not None:
            return 1
    return 1


def _prompts(prompt: Any) -> int:
    """Count prompts: an array with any integer in it is one prompt of tokens (and pieces of text)."""
    if not isinstance(prompt, list) or not prompt:
        return 1
    if any(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return 1
    return len(prompt)
