"""The environment of `make soak`: bounds with defaults, errors that name the variable."""

from __future__ import annotations

import time

import pytest

from tests.engine.enginekit.soak import read_bounds


def test_given_bounds_are_taken() -> None:
    """Seed, size and time come from the environment; the seed is in the command that repeats the run."""
    given = {"SOAK_SEED": "7", "SOAK_REQUESTS": "50", "SOAK_PASSES": "2", "SOAK_MINUTES": "3"}
    found = read_bounds(given)
    assert (found.seed, found.requests, found.passes) == (7, 50, 2)
    assert found.until_s - time.monotonic() == pytest.approx(180, abs=20)
    assert found.repeat() == "make soak SEED=7 REQUESTS=50"


def test_without_a_seed_each_run_takes_its_own() -> None:
    """Empty means unset, as make hands it on."""
    assert len({read_bounds({"SOAK_SEED": ""}).seed for _ in range(20)}) > 1


@pytest.mark.parametrize("name", ["SOAK_SEED", "SOAK_REQUESTS", "SOAK_PASSES", "SOAK_MINUTES"])
@pytest.mark.parametrize("value", ["-1", "many", "1.5"])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    """An error names the variable and what it holds."""
    with pytest.raises(ValueError, match=rf"{name}='{value}'"):
        read_bounds({name: value})
