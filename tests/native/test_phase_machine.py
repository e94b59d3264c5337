"""The phase machine alone: unit tests and exhaustive exploration, compiled with g++ in seconds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native-patch"
COMPILE_TIMEOUT_S, RUN_TIMEOUT_S = 120, 540
MUTATIONS = {
    1: "a finished member does not wait for its companions",
    2: "a member that leaves is forgotten while the others wait for it",
    3: "latecomers are let into a sealed cohort",
}


def _build(name: str, folder: Path, *flags: str) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++) found")
    target = folder / name
    command = [
        *(compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", *flags),
        *("-I", str(NATIVE / "overlay")),
        *(str(NATIVE / "tests" / f"{name}.cpp"), str(NATIVE / "overlay" / "phase-machine.cpp")),
        *("-o", str(target)),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    assert built.returncode == 0, built.stderr
    return target


def _run(target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(target)], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)


def test_each_sentence_of_the_contract(tmp_path: Path) -> None:
    """The unit tests of the machine pass, under the sanitizers."""
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    done = _run(_build("test_phase_machine", tmp_path, *flags))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_every_interleaving_of_small_scopes(tmp_path: Path) -> None:
    """Never mixed, never early, never late in, always live, no leak, exact mirror."""
    done = _run(_build("explore_phase_machine", tmp_path, "-O2"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") >= 15, done.stdout


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda number: f"mutation{number}")
def test_planted_mutations_are_caught(mutation: int, tmp_path: Path) -> None:
    """The exploration fails in every exclusive scope when a fault is planted."""
    target = _build("explore_phase_machine", tmp_path, "-O1", f"-DPHASE_MUTATION={mutation}")
    done = _run(target)
    assert done.returncode == 1, f"not caught: {MUTATIONS[mutation]}\n{done.stdout}"
    passed = [line for line in done.stdout.splitlines() if line.startswith("ok ")]
    assert all(line.startswith("ok mixed") for line in passed), passed
