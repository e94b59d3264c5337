"""Fixtures: the harness without an engine, compiled in seconds; programs that misbehave."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HARNESS = Path(__file__).resolve().parents[2] / "native-patch" / "harness"
SOURCES = ("drive", "flags", "invariants", "main", "record", "schedule")
COMPILE_TIMEOUT_S, RUN_TIMEOUT_S = 240, 60

Harness = Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]


@pytest.fixture(scope="session")
def dry_harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama-phase-harness built without llama.cpp: its flags, schedules, invariants and reports, for --dry-run."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++) found")
    target = tmp_path_factory.mktemp("harness") / "llama-phase-harness"
    built = subprocess.run(
        [
            *(compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror"),
            *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DHARNESS_WITHOUT_ENGINE"),
            *(str(HARNESS / f"{name}.cpp") for name in SOURCES),
            *("-o", str(target)),
        ],
        capture_output=True,
        text=True,
        timeout=COMPILE_TIMEOUT_S,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return target


@pytest.fixture
def dry(dry_harness: Path, tmp_path: Path) -> Harness:
    """Run the harness with --dry-run; returns the ended process and its report."""

    def run(*flags: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        done = subprocess.run(
            [str(dry_harness), "--dry-run", "--json", str(report), *flags],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        return done, json.loads(report.read_text()) if report.exists() else {}

    return run


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Path]:
    """Write a shell script that stands in for a harness that goes wrong from outside."""

    def write(body: str) -> Path:
        path = tmp_path / "program"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return write
