"""`llama-proxy bench engine` from outside: whole matrices, interruptions, other configurations, runs that go wrong."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.wait import until

DEADLINE_S = 120
SMALL = ("--dry-run", "--lengths", "16,96", "--batch", "32", "--ubatch", "16")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "proxy", "bench", "engine", *arguments]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def evidence(out: Path) -> list[Path]:
    return sorted((out / "runs").glob("*.json")) if (out / "runs").is_dir() else []


def test_a_whole_matrix(dry_harness: Path, tmp_path: Path) -> None:
    """Every run leaves its evidence; the summary is printed, written, and the same again without a run."""
    out = tmp_path / "out"
    arguments = (*SMALL, "--harness", str(dry_harness), "--out", str(out), "--json")
    done = bench(*arguments)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["ok"] is True
    assert summary["runs"]["planned"] == summary["runs"]["ok"] == len(evidence(out)) == 24
    assert summary["verdict"]["invariants"] is True
    assert json.loads((out / "summary.json").read_text()) == summary
    assert "barrier-fair" in (out / "summary.txt").read_text()
    assert len(list((out / "plots").glob("*.svg"))) == 5
    before = {path: path.stat().st_mtime_ns for path in evidence(out)}
    again = bench(*arguments)
    assert again.stdout == done.stdout
    assert {path: path.stat().st_mtime_ns for path in evidence(out)} == before


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_matrix_goes_on_and_gives_the_same_summary(
    dry_harness: Path, tmp_path: Path, program: Callable[[str], Path], how: signal.Signals
) -> None:
    """Evidence from before the interruption is kept as it is, and the summary is that of an uninterrupted matrix."""
    # the sixth run waits until it is allowed to go on
    held = program(
        f'if [ -e "$0.held" ] && [ "$(ls {tmp_path}/cut/runs/*.json | wc -l)" = 5 ]; then\n'
        f'echo $$ > "$0.pid"; exec sleep 100; fi\nexec {dry_harness} "$@"'
    )
    (tmp_path / "manifest.json").write_text('{"key": "same"}')
    (tmp_path / "program.held").touch()
    common = (*SMALL, "--harness", str(held))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(command(*common, "--out", str(cut)), stdout=log, stderr=log)
    try:
        until("the sixth run", lambda: _read(tmp_path / "program.pid"), DEADLINE_S)
        running.send_signal(how)
        assert running.wait(DEADLINE_S) != 0
    finally:
        running.kill()
        running.wait(DEADLINE_S)
        pid = int(_read(tmp_path / "program.pid"))
        if how is signal.SIGKILL:
            # this stand-in knows nothing of its runner; the harness ends with it
            os.kill(pid, signal.SIGKILL)
    until("the end of the sixth run", lambda: not _alive(pid), DEADLINE_S)
    (tmp_path / "program.held").unlink()
    kept = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in evidence(cut)}
    assert len(kept) == 5
    assert not (cut / "summary.json").exists()
    resumed = bench(*common, "--out", str(cut))
    assert resumed.returncode == 0, resumed.stderr
    assert len(evidence(cut)) == 24
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in kept} == kept
    assert bench(*common, "--out", str(whole)).returncode == 0
    for name in ("summary.json", "summary.txt", "matrix.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_a_run_ends_with_its_runner(dry_harness: Path) -> None:
    """A harness whose runner is gone does not begin: a run that goes on alone would disturb the next one."""
    environment = os.environ | {"LLAMA_PHASE_HARNESS_RUNNER": "1"}
    done = subprocess.run(
        [str(dry_harness), "--dry-run", "--lengths", "4"], env=environment, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 1


def test_another_configuration_is_refused(dry_harness: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    common = (*SMALL, "--repetitions", "1", "--harness", str(dry_harness), "--out", out)
    assert bench(*common).returncode == 0
    other = bench(*common, "--predict", "9", "--json")
    assert other.returncode == 1
    assert "configuration.predict is 8 there, 9 here" in other.stderr
    assert json.loads(other.stdout)["ok"] is False
    assert bench(*common).returncode == 0


def test_one_writer_at_a_time(dry_harness: Path, tmp_path: Path, program: Callable[[str], Path]) -> None:
    out = tmp_path / "out"
    waiting = program('echo $$ > "$0.pid"; exec sleep 100')
    common = (*SMALL, "--out", str(out))
    with (tmp_path / "log").open("wb") as log:
        first = subprocess.Popen(command(*common, "--harness", str(waiting)), stdout=log, stderr=log)
    try:
        pid = int(until("the first run", lambda: _read(tmp_path / "program.pid"), DEADLINE_S))
        second = bench(*common, "--harness", str(waiting))
        assert second.returncode == 1
        assert "another measurement" in second.stderr
    finally:
        first.send_signal(signal.SIGINT)
        first.wait(DEADLINE_S)
    assert not _alive(pid)


def test_a_run_that_hangs_is_stopped_and_recorded(tmp_path: Path, program: Callable[[str], Path]) -> None:
    hangs = program('echo $$ > "$0.pid"; exec sleep 100')
    out = tmp_path / "out"
    arguments = (*SMALL, "--policies", "mixed", "--repetitions", "1", "--harness", str(hangs))
    done = bench(*arguments, "--timeout-s", "0.5", "--out", str(out), "--json")
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert summary["runs"]["timeout"] == 2
    assert {item["name"] for item in summary["failures"]} == {"deadline"}
    assert not _alive(int(_read(tmp_path / "program.pid")))


def test_a_killed_run_is_a_memory_failure(tmp_path: Path, program: Callable[[str], Path]) -> None:
    """What the kernel kills for its memory leaves no report; it is recorded, and the matrix goes on."""
    killed = program("kill -9 $$")
    out = tmp_path / "out"
    done = bench(*SMALL, "--repetitions", "1", "--harness", str(killed), "--out", str(out), "--json")
    summary = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert summary["runs"]["memory"] == 8
    assert "8 of 8 runs: memory" in done.stderr


def test_failed_runs_can_be_done_again(dry_harness: Path, tmp_path: Path) -> None:
    """A run whose program was broken is kept as it failed, until --retry."""
    program = tmp_path / "harness"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    (tmp_path / "manifest.json").write_text('{"key": "same"}')
    out = tmp_path / "out"
    common = (*SMALL, "--repetitions", "1", "--harness", str(program), "--out", str(out), "--json")
    assert json.loads(bench(*common).stdout)["runs"]["failed"] == 8
    program.unlink()
    program.symlink_to(dry_harness)
    kept = bench(*common)
    assert kept.returncode == 1
    assert json.loads(kept.stdout)["runs"]["failed"] == 8
    retried = bench(*common, "--retry")
    assert retried.returncode == 0, retried.stderr
    assert json.loads(retried.stdout)["runs"]["ok"] == 8


def test_damaged_evidence_is_named(dry_harness: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    common = (*SMALL, "--repetitions", "1", "--harness", str(dry_harness), "--out", str(out))
    assert bench(*common).returncode == 0
    damaged = evidence(out)[2]
    damaged.write_text("{")
    done = bench(*common)
    assert done.returncode == 1
    assert str(damaged) in done.stderr
    assert "delete it" in done.stderr
    damaged.unlink()
    assert bench(*common).returncode == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--dry-run", "--lengths", "16;96"), "--lengths"),
        (("--lengths", "16,96"), "--model"),
        (("--dry-run", "--policies", "drain"), "--policies"),
        (("--dry-run", "--policies", "mixed", "--base", "barrier-fair"), "--base"),
        (("--dry-run", "--tensor-split", "a"), "--tensor-split"),
        (("--dry-run", "--batch", "1"), "--batch"),
        (("--dry-run", "--ctx", "8"), "--ctx"),
        (("--dry-run", "--cache", "q8_0", "--flash-attn", "off"), "--cache"),
    ],
)
def test_bad_flags_are_named_and_nothing_is_recorded(
    dry_harness: Path, tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    out = tmp_path / "out"
    done = bench(*flags, "--harness", str(dry_harness), "--out", str(out))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {named}")
    assert evidence(out) == []
    # a directory without a run is nobody's yet
    if (out / "matrix.json").exists():
        good = ("--dry-run", "--repetitions", "1", "--harness", str(dry_harness), "--out", str(out))
        assert bench(*good).returncode == 0


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
