"""The table model × feature: tests declare a cell, a pass records it, `--update` renders what was recorded.

    python -m tests.engine.enginekit.zootable [--update]

compares the table in `native-patch/README.md` with what the last run of the zoo contract proved.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.engine.enginekit.models import ROOT
from tests.engine.enginekit.zooclaims import SETUPS, Feature, Proof, SetUp

POLICIES = ("drain", "yield")
README = ROOT / "native-patch" / "README.md"
RECORD = ROOT / "build" / "zoo-table.json"
BEGIN = "<!-- zoo: written by `python -m tests.engine.enginekit.zootable --update` after the engine tests -->"
END = "<!-- zoo end -->"

# features by the name of the test function that proves them
PROVED_BY: dict[Feature, str] = {}


def claimed(feature: Feature) -> list[SetUp]:
    """Return the rows that claim a proof of ``feature``."""
    return [setup for setup in SETUPS if setup.claims[feature].proof is not Proof.NONE]


def proves(feature: Feature) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test for each row that claims ``feature`` and for each policy; its passes prove the cells."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        assert feature not in PROVED_BY, f"{feature} is proved twice"
        PROVED_BY[feature] = test.__name__
        rows = [pytest.param(setup, id=setup.name.replace(" ", "")) for setup in claimed(feature)]
        test = pytest.mark.parametrize("case", rows)(test)
        return pytest.mark.parametrize("policy", POLICIES)(test)

    return decorate


def cell(item: pytest.Item) -> str | None:
    """Return the key of the cell a test belongs to, ``None`` for other tests."""
    name = getattr(item, "originalname", "")
    feature = next((found for found, test in PROVED_BY.items() if test == name), None)
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return f"{params['case'].name}|{feature}|{params['policy']}" if feature else None


def record(passed: dict[str, bool]) -> None:
    """Merge the cells of a run into the record: passed ones with their proof, failed ones out of it."""
    if not passed:
        return
    known = _recorded()
    for key, ok in passed.items():
        name, feature, _ = key.split("|")
        setup = next(found for found in SETUPS if found.name == name)
        known.pop(key, None)
        if ok:
            known[key] = setup.claims[Feature(feature)].proof.value
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(known, indent=1, sort_keys=True))


def _recorded() -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(RECORD.read_text())
    except (OSError, ValueError):
        return {}
    return found


def unproved() -> list[str]:
    """Return the claimed cells that the record does not hold with the claimed proof."""
    known = _recorded()
    wanted = {
        f"{setup.name}|{feature}|{policy}": setup.claims[feature].proof.value
        for feature in Feature
        for setup in claimed(feature)
        for policy in POLICIES
    }
    return [key for key, proof in wanted.items() if known.get(key) != proof]


def render(setups: Iterable[SetUp] = SETUPS) -> str:
    """Return the table and its notes in Markdown, without the markers."""
    notes: list[str] = []
    lines = [
        "| model | " + " | ".join(Feature) + " |",
        "|---" * (1 + len(Feature)) + "|",
    ]
    for setup in setups:
        cells = []
        for feature in Feature:
            claim = setup.claims[feature]
            if claim.why and claim.why not in notes:
                notes.append(claim.why)
            mark = f" <sup>{notes.index(claim.why) + 1}</sup>" if claim.why else ""
            cells.append(f"{claim.proof}{mark}")
        lines.append(f"| {setup.name} | " + " | ".join(cells) + " |")
    listed = [f"{number}. {why}" for number, why in enumerate(notes, 1)]
    return "\n".join([*lines, "", *listed])


def in_readme() -> str:
    """Return what stands between the markers."""
    whole = README.read_text()
    assert BEGIN in whole, f"{README} has no line {BEGIN}"
    return whole.split(BEGIN, 1)[1].split(END, 1)[0].strip()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the table into the README")
    args = parser.parse_args(argv)
    missing = unproved()
    if missing:
        print("not proved by the last runs of tests/engine/test_zoo_*.py:", file=sys.stderr)
        print("\n".join(f"  {key}" for key in missing), file=sys.stderr)
        return 1
    if args.update:
        head, rest = README.read_text().split(BEGIN, 1)
        README.write_text(f"{head}{BEGIN}\n\n{render()}\n\n{END}{rest.split(END, 1)[1]}")
    if in_readme() != render():
        print("the table in native-patch/README.md is old: run this with --update", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
