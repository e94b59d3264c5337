"""Build an engine with sanitizers, run tests on it, and fail on every report.

    python -m tests.sanitize address            the barrier contract and a slice of the load, ASan + UBSan
    python -m tests.sanitize thread             all views read without pause beside a load, TSan
    python -m tests.sanitize address --planted  build with planted defects and demand that they are found

Exit code 0: the tests passed and nothing was reported (or, with --planted, everything planted was).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.sanitize.plants import PLANTS, Plant, plant
from tests.sanitize.reports import Report, read_reports

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
READERS = "tests/engine/test_readers.py"
SELECTED = {
    "address": ["tests/engine", "-k", "contract or test_load or test_readers"],
    "thread": [READERS, "tests/engine/test_load.py", "-k", "readers or slice"],
}
PLANTED = [READERS, "-k", "drain"]


def main() -> int:
    """Run as asked on the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize", description="Sanitizer runs of the engine."
    )
    parser.add_argument("sanitizer", choices=sorted(SANITIZERS))
    parser.add_argument("--planted", action="store_true", help="with defects that must be found")
    parser.add_argument("tests", nargs="*", help="pytest arguments instead of the usual selection")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sanitize-") as name:
        if chosen.planted:
            return _run_planted(chosen.sanitizer, Path(name))
        server = _engine("--sanitize", SANITIZERS[chosen.sanitizer])
        tests = chosen.tests or SELECTED[chosen.sanitizer]
        code, reports = _run_tests(chosen.sanitizer, server, tests, Path(name) / "reports")
    _show(reports)
    print(f"{chosen.sanitizer}: tests ended with {code}, {len(reports)} different reports")
    return int(bool(code or reports))


def _run_planted(sanitizer: str, scratch: Path) -> int:
    planted = PLANTS[sanitizer]
    patch_dir = scratch / "native-patch"
    plant(ROOT / "native-patch", patch_dir, planted.edits)
    server = _engine("--sanitize", SANITIZERS[sanitizer], "--series-dir", str(patch_dir))
    try:
        _, reports = _run_tests(sanitizer, server, PLANTED, scratch / "reports")
    finally:
        # nobody else may find it in the cache
        shutil.rmtree(server.parent)
    missed = _missed(planted, reports)
    for words in planted.expects:
        print(f"{'missed' if words in missed else 'found'}: {', '.join(words)}")
    if missed:
        _show(reports)
    return int(bool(missed))


def _missed(planted: Plant, reports: Sequence[Report]) -> list[tuple[str, ...]]:
    texts = [report.headline + "\n" + report.text for report in reports]
    return [
        words for words in planted.expects if not any(all(word in text for word in words) for text in texts)
    ]


def _engine(*flags: str) -> Path:
    """Build (or find) an engine; its progress is shown, a failure ends this run."""
    command = [sys.executable, "-m", "proxy", "engine"]
    subprocess.run([*command, "build", *flags], cwd=ROOT, check=True)
    done = subprocess.run(
        [*command, "path", "--json", *flags], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return Path(json.loads(done.stdout)["server"])


def _environment(sanitizer: str, server: Path, reports: Path) -> dict[str, str]:
    env = os.environ | {"LLAMA_SERVER_BIN": str(server), "PYTHONUNBUFFERED": "1"}
    if sanitizer == "address":
        env["ASAN_OPTIONS"] = f"log_path={reports}/asan:detect_leaks=1:detect_stack_use_after_return=1"
        env["LSAN_OPTIONS"] = f"suppressions={HERE}/lsan.supp:print_suppressions=0"
        env["UBSAN_OPTIONS"] = "print_stacktrace=1"
        if not env.get("LLAMA_SERVER_STOCK"):
            env["LLAMA_SERVER_STOCK"] = str(_engine("--stock"))
    else:
        env["TSAN_OPTIONS"] = f"log_path={reports}/tsan:suppressions={HERE}/tsan.supp:history_size=7"
    return env


def _run_tests(sanitizer: str, server: Path, tests: Sequence[str], reports: Path) -> tuple[int, list[Report]]:
    reports.mkdir()
    # every engine's log lies in its test's folder
    folders = reports.with_name("tests")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "engine and not soak",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folders}",
        *tests,
    ]
    began = time.monotonic()
    code = subprocess.run(
        command, cwd=ROOT, env=_environment(sanitizer, server, reports), check=False
    ).returncode
    print(f"{sanitizer}: {time.monotonic() - began:.0f} s", flush=True)
    return code, read_reports(reports, folders.rglob("server.log"))


def _show(reports: Sequence[Report]) -> None:
    for report in reports:
        print(f"\n{report.text.rstrip()}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        # the command has said why
        sys.exit(f"failed: {' '.join(map(str, error.cmd))}")
