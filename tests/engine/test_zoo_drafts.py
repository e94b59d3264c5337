"""Speculation over the zoo: drafts change the speed, never the answer, and a barrier changes no draft.

How many tokens were drafted and accepted makes the state of a draft visible: one that lost or
repeated a hidden state, or saw another sequence's, guesses differently.
"""

from __future__ import annotations

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens
from tests.engine.enginekit.http import Json
from tests.engine.enginekit.oracle import Reference
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server
from tests.engine.enginekit.zooclaims import Feature, Proof, SetUp
from tests.engine.enginekit.zootable import proves

MEMBERS = 4
FLAGS = (*EXACT, "-b", "64")


def _counts(answers: list[Json]) -> list[tuple[int, int]]:
    """Return how many tokens were drafted for each answer, and how many of them accepted."""
    timings = [answer["timings"] for answer in answers]
    return [(t.get("draft_n", 0), t.get("draft_n_accepted", 0)) for t in timings]


def _references(case: SetUp, oracle: OracleFactory) -> list[Reference]:
    """Return single runs without drafts on the unpatched engine, none near a tie."""
    plain = oracle(case.model, FLAGS)
    found = []
    for number in range(MEMBERS):
        prompts = (words(4 + (41 * number) % 170, 300 + 50 * number + s) for s in range(40))
        found += plain.steady(prompts, 1, 60 + 37 * number % 120)
    return found


def _one_by_one(server: Server, bodies: list[Json]) -> list[Json]:
    return [server.post("/completion", body).ok() for body in bodies]


def _assert_tokens(answers: list[Json], wanted: list[Reference], what: str) -> None:
    for number, (answer, reference) in enumerate(zip(answers, wanted, strict=True)):
        assert_equal_tokens(answer["tokens"], reference.tokens, f"{what} {number}")


@proves(Feature.DRAFTS)
def test_zoo_drafts(
    engine: EngineFactory, stock: EngineFactory, oracle: OracleFactory, case: SetUp, policy: str
) -> None:
    """Unequal requests together: the answers of runs without drafts, the counts of single runs with them."""
    wanted = _references(case, oracle)
    # each in a slot of its own: some drafts remember what their slot did before
    bodies = [{**reference.body, "id_slot": slot} for slot, reference in enumerate(wanted)]
    flags = (*FLAGS, *case.flags())
    singles = _one_by_one(stock(case.model, flags), bodies)
    assert sum(drafted for drafted, _ in _counts(singles)) > 0, "nothing is drafted"
    _assert_tokens(singles, wanted, "single run")

    alone = _one_by_one(engine(case.model, policy, flags), bodies)
    _assert_tokens(alone, wanted, "answer alone")
    assert _counts(alone) == _counts(singles)

    server = engine(case.model, policy, (*flags, "--phase-yield-ms", "5"))
    together = [exchange.ok().json() for exchange in [server.start(body) for body in bodies]]
    _assert_tokens(together, wanted, "answer in company")
    assert sum(drafted for drafted, _ in _counts(together)) > 0
    if case.claims[Feature.DRAFTS].proof is Proof.COUNTED:
        assert _counts(together) == _counts(singles)
