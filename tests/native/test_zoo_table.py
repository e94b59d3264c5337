"""The table of what is proved with which model: complete, reasoned, and the one in the README."""

from __future__ import annotations

from tests.engine import test_zoo_beside, test_zoo_drafts, test_zoo_pictures, test_zoo_text
from tests.engine.enginekit import zootable
from tests.engine.enginekit.models import ZOO
from tests.engine.enginekit.zooclaims import SETUPS, Feature, Proof

MODULES = (test_zoo_beside, test_zoo_drafts, test_zoo_pictures, test_zoo_text)


def test_the_readme_holds_the_table_that_the_tests_declare() -> None:
    """Whoever changes a claim renders the table again, which needs the tests to have passed."""
    assert zootable.in_readme() == zootable.render()


def test_every_column_has_its_test() -> None:
    """No feature is claimed without a test function that is parametrized by its claims."""
    tests = {name for module in MODULES for name in vars(module) if name.startswith("test_")}
    assert set(zootable.PROVED_BY) == set(Feature)
    assert set(zootable.PROVED_BY.values()) == tests


def test_every_row_proves_something_and_every_gap_has_a_reason() -> None:
    """A cell is a proof, or says why there is none; weaker proofs say why as well."""
    for setup in SETUPS:
        assert set(setup.claims) == set(Feature), setup.name
        assert any(claim.proof is not Proof.NONE for claim in setup.claims.values()), setup.name
        for feature, claim in setup.claims.items():
            assert claim.why or claim.proof is not Proof.NONE, (setup.name, feature)


def test_every_model_of_the_zoo_is_in_a_row() -> None:
    """A new recipe needs a claim."""
    described = (ZOO / "README.md").read_text().splitlines()
    cells = "".join(line.split("|")[1] for line in described if line.startswith("| `"))
    models = set(cells.replace("`", "").replace(",", " ").split())
    used = {setup.model for setup in SETUPS} | {name for setup in SETUPS for _, name in setup.sidecars}
    assert models == used
