"""The barrier contract over the zoo: every architecture, alone and in company, against the unpatched engine.

Each test proves one column of the table in `native-patch/README.md`, for each row that claims it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens, barrier_holds
from tests.engine.enginekit.http import Json
from tests.engine.enginekit.oracle import MIN_GAP, Reference
from tests.engine.enginekit.phase import PhaseEvent
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server, greedy
from tests.engine.enginekit.zooclaims import Feature, Proof, SetUp
from tests.engine.enginekit.zootable import proves

MANY = 8
ROUNDS = 20
SMALL_BATCH = (*EXACT, "-b", "64")
PAUSES = ("--phase-yield-ms", "5")
GATHER = {"x_phase_gather_ms": "60"}


def _prompt(case: SetUp, count: int, seed: int) -> str:
    """Return ``count`` words; what the row inserts stands after the first half."""
    if not case.insert:
        return words(count, seed)
    return f"{words(count // 2, seed)} {case.insert} {words(count - count // 2, seed + 1)}"


def _bodies(case: SetUp, count: int) -> list[dict[str, Any]]:
    return [dict(body) for body in islice(cycle(case.bodies), count)]


def _references(case: SetUp, oracle: OracleFactory, count: int) -> list[Reference]:
    """Return single runs of very different lengths on the unpatched engine, without drafts, none near a tie."""
    ask = oracle(case.model, (*EXACT, *case.adapters()))
    found = []
    for number, body in enumerate(_bodies(case, count)):
        prompts = (_prompt(case, 3 + (37 * number) % 190, 60 * number + s) for s in range(40))
        n_predict = 20 + 53 * number % 160
        if case.exact:
            found += ask.steady(prompts, 1, n_predict, **body)
        else:
            found.append(ask.ask(next(prompts), n_predict, **body))
    if not case.bodies[0].get("ignore_eos", True):
        assert any(len(r.tokens) < r.body["n_predict"] for r in found), "none ends by itself"
    return found


def assert_answers(case: SetUp, found: list[Json], wanted: list[Reference], what: str) -> None:
    """Same tokens, or where rounding differs from batch to batch the same length."""
    for number, (answer, reference) in enumerate(zip(found, wanted, strict=True)):
        if case.exact:
            assert_equal_tokens(answer["tokens"], reference.tokens, f"{what} {number}")
        else:
            assert len(answer["tokens"]) == len(reference.tokens), answer


@proves(Feature.ALONE)
def test_zoo_alone(engine: EngineFactory, oracle: OracleFactory, case: SetUp, policy: str) -> None:
    """One request after the other: the tokens of the unpatched engine, whatever the number format."""
    flags = (*SMALL_BATCH, *case.flags())
    # the same number of slots, so that even inexact models compute the same
    ask = oracle(case.model, (*flags, "-np", "4"))
    server = engine(case.model, policy, flags)
    for number, body in enumerate(_bodies(case, 4)):
        wanted = ask.ask(_prompt(case, 5 + 45 * number, 7 + number), 60, **body)
        found = server.post("/completion", {**wanted.body, "n_probs": 2}).ok()
        assert_equal_tokens(found["tokens"], wanted.tokens, f"answer {number}")
        assert found["content"] == wanted.text


@proves(Feature.COMPANY)
def test_zoo_in_company(engine: EngineFactory, oracle: OracleFactory, case: SetUp, policy: str) -> None:
    """Eight unequal requests on four slots: each answer is the single one; some wait, some are paused."""
    wanted = _references(case, oracle, MANY)
    server = engine(case.model, policy, (*SMALL_BATCH, *case.flags(), *PAUSES))
    since = 0
    for _ in range(ROUNDS):
        started = [server.start(reference.body) for reference in wanted]
        assert_answers(case, [exchange.ok().json() for exchange in started], wanted, "answer")
        events = server.events(since)
        since = events[-1].seq
        if _waited_behind_answers(events, policy):
            return
    pytest.fail(f"in {ROUNDS} rounds nobody came while answers ran")


def _waited_behind_answers(events: list[PhaseEvent], policy: str) -> bool:
    """Whether a request queued while others generated, and under ``yield`` paused them."""
    generates = False
    for event in events:
        match event.event:
            case "open":
                generates = True
            case "idle":
                generates = False
            case "pause":
                return True
            case "admit" if generates and event.cohort == 0 and policy == "drain":
                return True
    return False


@proves(Feature.BARRIER)
def test_zoo_barrier(engine: EngineFactory, case: SetUp, policy: str) -> None:
    """One stream of unequal prompts: each prompt is whole before the first token of any."""
    server = engine(case.model, policy, (*SMALL_BATCH, *case.flags()))
    prompts = [_prompt(case, count, seed) for seed, count in enumerate((120, 20, 260))]
    stream = server.stream(prompts, 6, **case.bodies[0]).ok()
    assert len([event for event in stream.events if event.data.get("stop")]) == len(prompts)
    assert barrier_holds(stream)


@proves(Feature.CHOICES)
def test_zoo_several_choices(engine: EngineFactory, oracle: OracleFactory, case: SetUp, policy: str) -> None:
    """A parent and two children, beside a stranger: all give the single answer."""
    family, other = _references(case, oracle, 5)[3:]
    server = engine(case.model, policy, (*SMALL_BATCH, *case.flags(), *PAUSES))
    started = [server.start({**family.body, "n_cmpl": 3}), server.start(other.body)]
    choices = started[0].ok().json()
    assert len(choices) == 3
    assert_answers(case, choices, [family] * 3, "choice")
    assert_answers(case, [started[1].ok().json()], [other], "companion")


TAILS = ("", " and the boats", " and the mill", " then rain")


def _talk(case: SetUp, n_predict: int = 8) -> list[Json]:
    base = _prompt(case, 220, 3)
    body = {"cache_prompt": True, "id_slot": 1, "n_probs": 2, **case.bodies[0]}
    return [greedy(base + tail, n_predict, **body) for tail in TAILS]


def _gap(answer: Json) -> float:
    tops = [step["top_logprobs"] for step in answer["completion_probabilities"]]
    return min((t[0]["logprob"] - t[1]["logprob"] for t in tops if len(t) > 1), default=1.0)


def _reuse(answer: Json) -> tuple[int, int]:
    return answer["timings"]["cache_n"], answer["timings"]["prompt_n"]


@proves(Feature.REUSE)
def test_zoo_cache_reuse(engine: EngineFactory, stock: EngineFactory, case: SetUp, policy: str) -> None:
    """Four turns that share a beginning: as many tokens reused as by the unpatched engine, also in company."""
    flags = (*EXACT, *case.flags())
    plain = stock(case.model, flags)
    talk = _talk(case)
    wanted = [plain.post("/completion", body).ok() for body in talk]
    assert max(_reuse(answer)[0] for answer in wanted) > 0, "the unpatched engine reuses nothing"

    alone = engine(case.model, policy, flags)
    for turn, (body, reference) in enumerate(zip(talk, wanted, strict=True)):
        found = alone.post("/completion", body).ok()
        assert _reuse(found) == _reuse(reference), f"turn {turn}"
        assert_equal_tokens(found["tokens"], reference["tokens"], f"turn {turn}")

    shared = engine(case.model, policy, (*flags, *PAUSES))
    for turn, (body, reference) in enumerate(zip(talk, wanted, strict=True)):
        others = [
            shared.start(greedy(words(90 + 60 * n, 50 + turn), 12, id_slot=2 * n), **GATHER) for n in (0, 1)
        ]
        found = shared.start(body, **GATHER).ok().json()
        assert _reuse(found) == _reuse(reference), f"turn {turn} in company"
        if case.exact and _gap(reference) >= MIN_GAP:
            assert_equal_tokens(found["tokens"], reference["tokens"], f"turn {turn} in company")
        for other in others:
            other.ok()


CREATED = re.compile(r"created context checkpoint")


@proves(Feature.CHECKPOINTS)
def test_zoo_checkpoints(engine: EngineFactory, stock: EngineFactory, case: SetUp, policy: str) -> None:
    """Shares of a batch cut prompts more often near their end, but make no more checkpoints."""
    flags = (*EXACT, "-b", "128", "-ub", "128", "-lv", "5", *case.flags())
    prompts = [_prompt(case, count, 80 + count) for count in (30, 150, 220, 300)]
    plain = stock(case.model, flags)
    for prompt in prompts:
        plain.complete(prompt, 4, cache_prompt=True)
    single = len(CREATED.findall(plain.log()))
    server = engine(case.model, policy, flags)
    server.stream(prompts, 4, cache_prompt=True).ok()
    together = len(CREATED.findall(server.log()))
    if case.claims[Feature.CHECKPOINTS].proof is Proof.MAKES_NONE:
        assert (together, single) == (0, 0)
    else:
        assert 0 < together <= single, f"{together} in company, {single} alone"


@proves(Feature.SLOTS)
def test_zoo_slot_save_and_restore(
    engine: EngineFactory, stock: EngineFactory, case: SetUp, policy: str, tmp_path: Path
) -> None:
    """A slot saved and restored into another: same sizes, same reuse, same tokens as on the unpatched engine."""
    base, tail = _prompt(case, 150, 5), " and then the mill"

    def run(start: Callable[..., Server], *where: str) -> list[Any]:
        folder = tmp_path / (where[0] if where else "stock")
        folder.mkdir()
        server = start(case.model, *where, args=(*EXACT, *case.flags(), "--slot-save-path", str(folder)))
        body = {"cache_prompt": True, **case.bodies[0]}
        server.complete(base, 1, id_slot=0, **body)
        saved = server.post("/slots/0?action=save", {"filename": "talk.bin"}).ok()
        restored = server.post("/slots/2?action=restore", {"filename": "talk.bin"}).ok()
        found = server.complete(base + tail, 16, id_slot=2, **body)
        erased = server.post("/slots/2?action=erase", {}).ok()
        return [saved["n_saved"], restored["n_restored"], _reuse(found), found["tokens"], erased["n_erased"]]

    assert run(engine, policy) == run(stock)
