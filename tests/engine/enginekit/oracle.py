"""What the unpatched engine answers to a request that is alone: the reference for equality.

Even at temperature 0 a token can change with the batch it is decoded in, when its
two best candidates are closer than the arithmetic noise. The oracle therefore
measures the smallest gap of a reference run, and ``steady`` picks prompts whose gap
is far above the noise (2e-5 with ``EXACT``), so that equality is exact and never luck.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.engine.enginekit.http import Json
from tests.engine.enginekit.server import Server, greedy

MIN_GAP = 1e-3


@dataclass(frozen=True, slots=True)
class Reference:
    """One answer of the unpatched engine: the body sent, its token ids, its smallest gap."""

    body: Json
    tokens: list[int]
    text: str
    gap: float


class Oracle:
    """Asks one unpatched engine, one request at a time, and remembers the answers.

    ``server`` returns that engine, running.
    """

    def __init__(self, server: Callable[[], Server]) -> None:
        self._server = server
        self._known: dict[str, Reference] = {}

    def ask(self, prompt: Any, n_predict: int, **more: Any) -> Reference:
        """Return the reference for one prompt that runs alone."""
        body = greedy(prompt, n_predict, **more)
        key = json.dumps(body, sort_keys=True)
        if key not in self._known:
            asked = {**body, "n_probs": max(2, int(body.get("n_probs", 0)))}
            answer = self._server().post("/completion", asked).ok()
            gap = min((_gap(step) for step in answer["completion_probabilities"]), default=1.0)
            self._known[key] = Reference(body, answer["tokens"], answer["content"], gap)
        return self._known[key]

    def steady(self, prompts: Iterable[str], count: int, n_predict: int, **more: Any) -> list[Reference]:
        """Return references for the first ``count`` prompts without a near tie."""
        found: list[Reference] = []
        for prompt in prompts:
            reference = self.ask(prompt, n_predict, **more)
            if reference.gap >= MIN_GAP:
                found.append(reference)
            if len(found) == count:
                return found
        msg = f"only {len(found)} of {count} prompts have no tie below {MIN_GAP}"
        raise AssertionError(msg)


def _gap(step: Json) -> float:
    top = step.get("top_logprobs") or []
    if len(top) < 2:
        return 1.0
    return float(top[0]["logprob"] - top[1]["logprob"])
