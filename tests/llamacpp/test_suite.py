"""llama.cpp's own server tests: what the unpatched engine passes, the patched one passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.engine.enginekit.models import EXTRA_ENV, extra_model
from tests.llamacpp.compare import Again, Comparison, compare
from tests.llamacpp.known import DIFFERENT_UNDER_DRAIN, PASS_UNPATCHED_AT_LEAST
from tests.llamacpp.runner import Outcomes, Suite, unpack
from tests.llamacpp.stand_ins import STORIES, stand_ins

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

# runs the suite, or the named tests of it, in a folder of its own
Run = Callable[..., Outcomes]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a runner of llama.cpp's tests; skips where their model is absent."""
    stories = extra_model(STORIES)
    if stories is None:
        pytest.skip(f"no {STORIES}: put llama.cpp's test model into the folder {EXTRA_ENV} names")
    base = tmp_path_factory.mktemp("llamacpp")
    unpack(base / "source")
    suite, numbers = Suite(base / "source", stand_ins(stories)), count()

    def start(server: Path, policy: str, only: Sequence[str] = ()) -> Outcomes:
        return suite.run(server, base / f"run{next(numbers)}", policy=policy, only=only)

    return start


@pytest.fixture(scope="module")
def unpatched(run: Run, stock_binary: Path) -> Again:
    """Return a runner on the unpatched engine."""
    return partial(run, stock_binary, "")


@pytest.fixture(scope="module")
def reference(unpatched: Again) -> Outcomes:
    """Return what the unpatched engine makes of all tests."""
    return unpatched(())


def _compare(run: Run, reference: Outcomes, unpatched: Again, engine: Path, policy: str) -> Comparison:
    patched = partial(run, engine, policy)
    found = patched(())
    result = compare(reference, found, unpatched, patched)
    passed = sum(outcome.passed for outcome in found.values())
    print(f"\n{policy}: {passed} of {len(found)} pass; unpatched: {_passed(reference)} of {len(reference)}")
    for name, reason in result.unsteady.items():
        print(f"  unsteady: {name}: {reason[:200]}")
    return result


def _passed(outcomes: Outcomes) -> int:
    return sum(outcome.passed for outcome in outcomes.values())


def test_the_reference_is_whole(reference: Outcomes) -> None:
    """The unpatched engine passes as many tests as it did, so that the others compare something."""
    assert _passed(reference) >= PASS_UNPATCHED_AT_LEAST


def test_mixed_loses_nothing(run: Run, reference: Outcomes, unpatched: Again, engine_binary: Path) -> None:
    """Under `mixed` every test that passes unpatched passes."""
    assert _compare(run, reference, unpatched, engine_binary, "mixed").lost == {}


def test_drain_differs_only_where_meant(
    run: Run, reference: Outcomes, unpatched: Again, engine_binary: Path
) -> None:
    """Under `drain` exactly the listed tests fail that pass unpatched."""
    lost = _compare(run, reference, unpatched, engine_binary, "drain").lost
    unknown = {name: reason for name, reason in lost.items() if name not in DIFFERENT_UNDER_DRAIN}
    assert unknown == {}
    assert set(DIFFERENT_UNDER_DRAIN) == set(lost), "listed, but passes: take it off the list"
