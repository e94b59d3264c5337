"""The barrier contract again and again, while another process burns a core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASSES = 20
PASS_TIMEOUT_S = 2400


@pytest.fixture
def burning_core() -> Iterator[None]:
    """Keep one core busy with something else."""
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        burner.kill()
        burner.wait(10)


@pytest.mark.soak
@pytest.mark.timeout(PASSES * PASS_TIMEOUT_S)
@pytest.mark.usefixtures("burning_core")
def test_twenty_passes_in_a_row(engine_binary: Path) -> None:
    """Timing decides nothing: each of 20 runs of all ``contract`` tests passes."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-k", "contract", "-m", "engine and not soak", str(Path(__file__).parent)]
    for number in range(1, PASSES + 1):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=PASS_TIMEOUT_S, check=False
        )
        print(f"pass {number}: {done.stdout.strip().splitlines()[-1]}", flush=True)
        assert done.returncode == 0, f"pass {number} with {engine_binary}:\n{done.stdout[-4000:]}"
