"""How two runs of llama.cpp's tests are compared."""

from __future__ import annotations

from collections.abc import Sequence

from tests.llamacpp.compare import CONFIRM, REPEATS, compare
from tests.llamacpp.runner import Outcome, Outcomes


def _outcomes(**named: str) -> Outcomes:
    return {name: Outcome(outcome, 0.0, "") for name, outcome in named.items()}


def test_what_is_lost_and_what_is_unsteady() -> None:
    """Lost: fails again on the patched engine only, is missing, or always skips. Unsteady: all else."""
    names = ("bad", "gone", "skips", "flaky", "timing")
    reference = _outcomes(good="passed", off="failed", **dict.fromkeys(names, "passed"))
    found = _outcomes(
        good="passed", off="failed", bad="failed", skips="skipped", flaky="failed", timing="failed"
    )
    whole = _outcomes(bad="passed", gone="passed", skips="passed", flaky="passed", timing="failed")
    again = _outcomes(bad="failed", skips="skipped", flaky="passed", timing="failed")
    result = compare(reference, found, lambda _: whole, lambda _: again)
    assert set(result.lost) == {"bad", "gone", "skips"}
    assert set(result.unsteady) == {"flaky", "timing"}


def test_one_failure_in_a_few_is_enough_one_skip_is_not() -> None:
    """A defect that shows now and then, and again, is lost; a moment that was missed once is not."""
    reference, found = _outcomes(rare="passed", shy="passed"), _outcomes(rare="failed", shy="skipped")
    rounds = iter(
        [
            _outcomes(rare="passed", shy="skipped"),
            _outcomes(rare="failed", shy="passed"),
            _outcomes(rare="passed", shy="skipped"),
            *[_outcomes(rare="passed")] * 4,
            _outcomes(rare="failed"),
        ]
    )
    result = compare(reference, found, lambda _: reference, lambda _: next(rounds))
    assert set(result.lost) == {"rare"}
    assert set(result.unsteady) == {"shy"}


def test_what_seems_lost_is_looked_at_again() -> None:
    """By chance one may fail on one engine only; in more repetitions it is what it is, and no other runs again."""
    names = ("chance", "odd", "bad", "shy")
    reference = _outcomes(**dict.fromkeys(names, "passed"))
    found = _outcomes(**dict.fromkeys(names, "failed"))
    asked: list[list[str]] = []

    def patched(wanted: Sequence[str]) -> Outcomes:
        asked.append(list(wanted))
        bad = {"bad", *(("chance", "odd") if len(asked) <= REPEATS else ())}
        return _outcomes(**{name: "failed" if name in bad else "passed" for name in wanted})

    def unpatched(wanted: Sequence[str]) -> Outcomes:
        late = len(asked) == REPEATS + CONFIRM - 1
        return _outcomes(**{name: "failed" if late and name == "odd" else "passed" for name in wanted})

    result = compare(reference, found, unpatched, patched)
    assert set(result.lost) == {"bad"}
    assert set(result.unsteady) == {"chance", "odd", "shy"}
    assert asked == [list(names)] * REPEATS + [["chance", "odd", "bad"]] * CONFIRM


def test_without_a_suspect_nothing_runs_again() -> None:
    """Equal runs end at once."""
    equal = _outcomes(one="passed", two="failed")

    def never(_: object) -> Outcomes:
        raise AssertionError

    assert compare(equal, equal, never, never).lost == {}
