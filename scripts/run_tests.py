"""Run every test that needs no GPU, cheap ones first, and print where the time went.

Stages run in order; a failed stage does not hide the later ones, except that nothing which needs an
engine runs without one. Exit code 0 only when every stage passed.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
BUDGET_S = 80 * 60
NOT_ENGINE = "not engine and not engine_build and not interop and not gpu and not soak"
WITH_ENGINE = "(engine or engine_build or interop) and not gpu and not soak"


@dataclass
class Run:
    """What has run so far, and the environment that later stages get."""

    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    rows: list[tuple[str, float, str]] = field(default_factory=list)

    def stage(self, name: str, *command: str, needs: str = "") -> bool:
        """Run one command and record it; skipped when the stage named by `needs` failed."""
        if needs and any(row[0] == needs and row[2] != "ok" for row in self.rows):
            self.rows.append((name, 0.0, f"not run: {needs} failed"))
            return False
        print(f"\n== {name}: {' '.join(command)}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=self.env, check=False).returncode
        self.rows.append((name, time.monotonic() - began, "ok" if code == 0 else f"exit code {code}"))
        return code == 0

    def engine(self, name: str, variable: str, *flags: str) -> bool:
        """Build an engine (or find it in the cache) and export its llama-server under `variable`."""
        if self.env.get(variable):
            print(f"\n== {name}: {variable}={self.env[variable]}", flush=True)
            return True
        if not self.stage(name, PYTHON, "-m", "proxy", "engine", "build", *flags):
            return False
        done = subprocess.run(
            [PYTHON, "-m", "proxy", "engine", "path", "--json", *flags],
            cwd=ROOT, env=self.env, check=True, capture_output=True, text=True,
        )  # fmt: skip
        self.env[variable] = str(json.loads(done.stdout)["server"])
        return True

    def table(self) -> str:
        """Return the stages with their seconds, as text."""
        width = max(len(name) for name, _, _ in self.rows)
        total = sum(seconds for _, seconds, _ in self.rows)
        lines = [f"{name:<{width}}  {seconds:7.1f} s  {verdict}" for name, seconds, verdict in self.rows]
        return "\n".join([*lines, f"{'total':<{width}}  {total:7.1f} s  of {BUDGET_S} s"])


def main() -> int:
    """Run all stages; returns the exit code."""
    run = Run()
    run.env["PYTHONUNBUFFERED"] = "1"
    run.stage("lint", PYTHON, "-m", "ruff", "check", ".")
    run.stage("format", PYTHON, "-m", "ruff", "format", "--check", ".")
    run.stage("types", PYTHON, "-m", "mypy")
    run.stage("fast tests", PYTHON, "-m", "pytest", "-q", "-m", NOT_ENGINE)
    run.engine("pristine engine", "LLAMA_SERVER_STOCK", "--stock")
    run.engine("patched engine", "LLAMA_SERVER_BIN")
    run.stage(
        "engine tests",
        PYTHON,
        "-m",
        "pytest",
        "-q",
        "-m",
        WITH_ENGINE,
        "tests/engine",
        needs="patched engine",
    )
    run.stage(
        "proxy tests", PYTHON, "-m", "pytest", "-q", "-m", WITH_ENGINE,
        "--ignore=tests/engine", "tests", needs="patched engine",
    )  # fmt: skip
    print("\n" + run.table())
    late = sum(seconds for _, seconds, _ in run.rows) > BUDGET_S
    if late:
        print(f"over the budget of {BUDGET_S} s")
    return int(late or any(verdict != "ok" for _, _, verdict in run.rows))


if __name__ == "__main__":
    sys.exit(main())
