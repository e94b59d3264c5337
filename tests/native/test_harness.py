"""The harness's schedules and invariants alone, compiled with g++ in seconds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native-patch"
SOURCES = ("schedule", "invariants", "prompts")
COMPILE_TIMEOUT_S, RUN_TIMEOUT_S = 240, 120


def test_schedules_and_invariants(tmp_path: Path) -> None:
    """Shapes of all policies, thousands of random plans, planted faults, every invariant; under the sanitizers."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++) found")
    target = tmp_path / "test_harness_schedule"
    built = subprocess.run(
        [
            *(compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-g"),
            *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-I", str(NATIVE / "harness")),
            str(NATIVE / "tests" / "test_harness_schedule.cpp"),
            *(str(NATIVE / "harness" / f"{name}.cpp") for name in SOURCES),
            *("-o", str(target)),
        ],
        capture_output=True,
        text=True,
        timeout=COMPILE_TIMEOUT_S,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(target)], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "ok\n"
