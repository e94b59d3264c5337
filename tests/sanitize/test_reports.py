"""Reports of sanitizers are told apart, and none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sanitize.plants import PLANTS, plant
from tests.sanitize.reports import cut, read_reports

PATCH_DIR = Path(__file__).resolve().parents[2] / "native-patch"

FREED = """\
=================================================================
==7==ERROR: AddressSanitizer: heap-use-after-free on address 0x602000000018 at pc 0x1 bp 0x2 sp 0x3
READ of size 4 at 0x602000000018 thread T0
    #0 0x55 in phase_open() /x/phase-hooks.inc:9
==7==ABORTING
"""
RACE = """\
==================
WARNING: ThreadSanitizer: data race (pid=7)
  Read of size 4 at 0x55 by main thread:
    #0 advance() <null>
==================
"""
OVERFLOW = """\
/x/phase-server.cpp:60:12: runtime error: signed integer overflow: 2147483647 + 1 cannot be represented in type 'int'
    #0 0x7f in server_phase_metrics::update()
"""


def test_one_of_each() -> None:
    """Headlines name tool and kind; the text goes up to the next report."""
    found = cut(FREED + RACE + OVERFLOW)
    assert [report.headline.split(" on ")[0] for report in found] == [
        "AddressSanitizer: heap-use-after-free",
        "ThreadSanitizer: data race (pid=7)",
        "UndefinedBehaviorSanitizer: /x/phase-server.cpp:60:12: signed integer overflow: 2147483647 + 1 cannot be "
        "represented in type 'int'",
    ]
    assert "phase_open" in found[0].text
    assert "advance" not in found[0].text


def test_the_same_defect_counts_once(tmp_path: Path) -> None:
    """Process numbers and addresses make no difference; another stack does."""
    (tmp_path / "tsan.7").write_text(RACE + RACE)
    (tmp_path / "tsan.8").write_text(RACE.replace("pid=7", "pid=8").replace("0x55", "0x66"))
    (tmp_path / "tsan.9").write_text(RACE.replace("advance", "settle"))
    assert len(read_reports(tmp_path)) == 2


def test_logs_are_searched(tmp_path: Path) -> None:
    """What UBSan wrote into an engine's log is found there; the rest of a log is no report."""
    (tmp_path / "reports").mkdir()
    loud, quiet = tmp_path / "loud.log", tmp_path / "quiet.log"
    loud.write_text("model loaded\n" + OVERFLOW + "all slots idle\n" + OVERFLOW)
    quiet.write_text("model loaded\n")
    found = read_reports(tmp_path / "reports", [loud, quiet])
    assert [report.headline.split(":")[0] for report in found] == ["UndefinedBehaviorSanitizer"]


def test_what_is_not_understood_is_a_report() -> None:
    """A text without a known headline is not taken for silence; an empty file is."""
    assert [report.text for report in cut("LeakSanitizer has encountered a fatal error.\n")]
    assert cut("\n") == []


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_plants_find_their_place(tmp_path: Path, name: str) -> None:
    """Each planted defect still fits the overlay, and the repository's stays as it is."""
    before = {path: path.read_bytes() for path in (PATCH_DIR / "overlay").iterdir()}
    plant(PATCH_DIR, tmp_path / "copy", PLANTS[name].edits)
    for edit in PLANTS[name].edits:
        assert edit.new in (tmp_path / "copy" / "overlay" / edit.file).read_text()
    assert before == {path: path.read_bytes() for path in (PATCH_DIR / "overlay").iterdir()}
