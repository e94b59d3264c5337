"""Which tests pass unpatched and not patched: what stays of them when both run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.llamacpp.runner import Outcomes

REPEATS = 3
CONFIRM = 5

# runs tests by id and returns their outcomes
Again = Callable[[Sequence[str]], Outcomes]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tests that the patched engine does not pass: `lost` for good, `unsteady` on either engine; id -> reason."""

    lost: dict[str, str]
    unsteady: dict[str, str]


def suspects(reference: Outcomes, found: Outcomes) -> list[str]:
    """Return the ids that pass in `reference` and not in `found`, missing ones included."""
    return [
        name for name, was in reference.items() if was.passed and not (name in found and found[name].passed)
    ]


def _outcome(outcomes: Outcomes, name: str) -> str:
    return outcomes[name].outcome if name in outcomes else "missing"


def _skips_always(rounds: Sequence[tuple[Outcomes, Outcomes]], name: str) -> bool:
    return all(_outcome(now, name) == "skipped" for _, now in rounds)


def _lost(names: Sequence[str], rounds: Sequence[tuple[Outcomes, Outcomes]]) -> list[str]:
    """Return those that pass unpatched in every round, and patched fail any or skip all of them."""
    return [
        name
        for name in names
        if all(_outcome(was, name) == "passed" for was, _ in rounds)
        and (
            {_outcome(now, name) for _, now in rounds} & {"failed", "missing"} or _skips_always(rounds, name)
        )
    ]


def compare(reference: Outcomes, found: Outcomes, unpatched: Again, patched: Again) -> Comparison:
    """Run suspects again on both engines, `REPEATS` times, and what seems lost then `CONFIRM` times more.

    A test is lost when the unpatched engine passes every repetition and the patched one fails any of the first and any
    of the second ones, or skips (some do when they miss the moment they want to see) all of them. Any other hangs on
    the machine's timing and is unsteady: one that fails now and then on either engine may well do so thrice on one.
    """
    names = suspects(reference, found)
    reasons = {name: found[name].reason if name in found else "not run" for name in names}
    lost = names
    for repeats in (REPEATS, CONFIRM):
        asked = lost
        lost = _lost(asked, [(unpatched(asked), patched(asked)) for _ in range(repeats if asked else 0)])
    return Comparison(
        {name: reasons[name] for name in names if name in lost},
        {name: reasons[name] for name in names if name not in lost},
    )
