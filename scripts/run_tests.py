"""Run every test that needs no GPU, cheap ones first, and print where the time went.

With `--soak` the long runs instead, on the same engines.

Stages run in order; a failed stage does not hide the later ones, except that nothing which needs an
engine runs without one. Exit code 0 only when every stage passed.

A stage that passed is not run again while nothing changed in the checkout: an interrupted run goes on
where it was, and a run after a green one takes seconds. `FORCE=1` runs everything, and so does CI.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAMP = ROOT / "build" / "tests-passed.json"
PYTHON = sys.executable
BUDGET_S = 80 * 60
NOT_ENGINE = "not engine and not engine_build and not interop and not gpu and not soak"
WITH_ENGINE = "(engine or engine_build or interop) and not gpu and not soak"
INTERRUPTED = 130


def digest() -> str:
    """Hash every file of the checkout that git does not ignore, the interpreter and its packages.

    Returns an empty text where that cannot be told: then everything runs.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=False
    )
    if listed.returncode != 0 or os.environ.get("FORCE") or os.environ.get("CI"):
        return ""
    packages = sorted(
        path.name for path in Path(PYTHON).parent.parent.glob("lib/*/site-packages/*.dist-info")
    )
    engines = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("LLAMA_")]
    total = hashlib.sha256(repr((sys.version, packages, engines)).encode())
    for name in sorted(set(listed.stdout.split(b"\0")) - {b""}):
        file = ROOT / os.fsdecode(name)
        if file.is_file():
            total.update(name + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


@dataclass
class Run:
    """What has run so far, what need not run again, and the environment that later stages get."""

    digest: str
    passed: set[str]
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    rows: list[tuple[str, float, str]] = field(default_factory=list)

    def stage(self, name: str, *command: str, needs: str = "", again: bool = False) -> bool:
        """Run one command and record it.

        Skipped when the stage named by `needs` failed, and, unless `again`, when it passed before.
        """
        if needs and any(row[0] == needs and row[2] != "ok" for row in self.rows):
            self.rows.append((name, 0.0, f"not run: {needs} failed"))
            return False
        if name in self.passed and not again:
            self.rows.append((name, 0.0, "ok"))
            print(f"== {name}: passed before, nothing changed since (FORCE=1 runs it again)", flush=True)
            return True
        print(f"\n== {name}: {' '.join(command)}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, env=self.env, check=False).returncode
        self.rows.append((name, time.monotonic() - began, "ok" if code == 0 else f"exit code {code}"))
        if code == 0:
            self.passed.add(name)
            self._remember()
        return code == 0

    def engine(self, name: str, variable: str, *flags: str, program: str = "server") -> bool:
        """Build an engine (or find it in the cache) and export one of its programs under `variable`."""
        if self.env.get(variable):
            print(f"\n== {name}: {variable}={self.env[variable]}", flush=True)
            return True
        if not self.stage(name, PYTHON, "-m", "proxy", "engine", "build", *flags, again=True):
            return False
        done = subprocess.run(
            [PYTHON, "-m", "proxy", "engine", "path", "--json", *flags],
            cwd=ROOT, env=self.env, check=True, capture_output=True, text=True,
        )  # fmt: skip
        self.env[variable] = str(json.loads(done.stdout)[program])
        return True

    def table(self) -> str:
        """Return the stages with their seconds, as text."""
        width = max(len(name) for name, _, _ in self.rows)
        total = sum(seconds for _, seconds, _ in self.rows)
        lines = [f"{name:<{width}}  {seconds:7.1f} s  {verdict}" for name, seconds, verdict in self.rows]
        return "\n".join([*lines, f"{'total':<{width}}  {total:7.1f} s  of {BUDGET_S} s"])

    def _remember(self) -> None:
        if self.digest:
            STAMP.parent.mkdir(exist_ok=True)
            new = STAMP.with_suffix(".new")
            new.write_text(json.dumps({"digest": self.digest, "passed": sorted(self.passed)}))
            new.replace(STAMP)


def begin() -> Run:
    """Return a run that knows which stages passed with these very files."""
    now = digest()
    try:
        known = json.loads(STAMP.read_text())
        passed = set(known["passed"]) if now and known["digest"] == now else set()
    except (OSError, ValueError, KeyError, TypeError):
        passed = set()
    return Run(now, passed)


def soak(run: Run) -> None:
    """Run the long, seeded load; its size is in the environment (SOAK_SEED and the others)."""
    run.engine("pristine engine", "LLAMA_SERVER_STOCK", "--stock")
    run.engine("patched engine", "LLAMA_SERVER_BIN")
    run.stage("soak", PYTHON, "-m", "pytest", "-q", "-s", "-m", "soak", needs="patched engine", again=True)


def stages(run: Run) -> None:
    """Run all stages in order."""
    run.stage("lint", PYTHON, "-m", "ruff", "check", ".")
    run.stage("format", PYTHON, "-m", "ruff", "format", "--check", ".")
    run.stage("types", PYTHON, "-m", "mypy")
    run.stage("fast tests", PYTHON, "-m", "pytest", "-q", "-m", NOT_ENGINE)
    run.engine("pristine engine", "LLAMA_SERVER_STOCK", "--stock")
    run.engine("patched engine", "LLAMA_SERVER_BIN")
    run.engine("engine harness", "LLAMA_PHASE_HARNESS", "--harness", program="harness")
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
        "--ignore=tests/engine", "--ignore=tests/llamacpp", "tests", needs="patched engine",
    )  # fmt: skip
    run.stage(
        "llama.cpp's tests", PYTHON, "-m", "pytest", "-q", "-s", "-m", WITH_ENGINE, "tests/llamacpp",
        needs="patched engine",
    )  # fmt: skip
    for sanitizer in ("address", "thread"):
        run.stage(f"{sanitizer} sanitizer", PYTHON, "-m", "tests.sanitize", sanitizer, needs="patched engine")


def main() -> int:
    """Run what has to run; returns the exit code."""
    run = begin()
    run.env["PYTHONUNBUFFERED"] = "1"
    try:
        (soak if "--soak" in sys.argv[1:] else stages)(run)
    except KeyboardInterrupt:
        print("\ninterrupted; what passed is remembered, the next run goes on from there")
        return INTERRUPTED
    print("\n" + run.table())
    late = "--soak" not in sys.argv[1:] and sum(seconds for _, seconds, _ in run.rows) > BUDGET_S
    if late:
        print(f"over the budget of {BUDGET_S} s")
    return int(late or any(verdict != "ok" for _, _, verdict in run.rows))


if __name__ == "__main__":
    sys.exit(main())
