"""Run llama.cpp's server tests, as the source package has them, against one llama-server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.engine.cache import cache_from_environment
from proxy.engine.fetch import fetch, source_archive
from proxy.engine.pin import find_native_patch, read_upstream
from proxy.engine.progress import SilentProgress
from proxy.engine.source import ArchiveSource
from tests.engine.enginekit.server import die_with_parent
from tests.llamacpp.stand_ins import StandIns

TESTS = "tools/server/tests"
# the tests read chat templates and a picture by paths relative to theirs
NEEDED = (f"{TESTS}/", "models/templates/", "tools/mtmd/test-1.jpeg")
CONFTEST = Path(__file__).with_name("offline.py")
TEST_TIMEOUT_S = 120
STOP_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test: `passed`, `failed` or `skipped`, its seconds, and why it did not pass."""

    outcome: str
    seconds: float
    reason: str

    @property
    def passed(self) -> bool:
        """Whether it ran and passed."""
        return self.outcome == "passed"


Outcomes = dict[str, Outcome]


def unpack(folder: Path) -> Path:
    """Write the tests of the pinned source, with our conftest.py, below `folder`; return where they run.

    The archive is fetched where the cache lacks it; its hash is checked. Raises EngineToolError.
    """
    archive = source_archive(read_upstream(find_native_patch()))
    for file in ArchiveSource(fetch(cache_from_environment(), archive, SilentProgress())).files():
        if file.path.startswith(NEEDED):
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.data)
    tests = folder / TESTS
    shutil.copyfile(CONFTEST, tests / "conftest.py")
    (tests / "tmp").mkdir()
    return tests


@dataclass(frozen=True, slots=True)
class Suite:
    """The unpacked tests (see `unpack`) and the local files in the place of downloads."""

    source: Path
    stand_ins: StandIns

    def run(
        self,
        server: Path,
        folder: Path,
        *,
        policy: str = "",
        only: Sequence[str] = (),
        timeout_s: float = 1200.0,
    ) -> Outcomes:
        """Run all tests, or those with the ids `only`, in a copy of their own below `folder`.

        `policy` is the engine's default (`LLAMA_ARG_PHASE_POLICY`), empty for an engine without phases. Raises
        AssertionError with the end of the output when the tests cannot be collected, TimeoutExpired after `timeout_s`.
        """
        shutil.copytree(self.source, folder)
        tests, report = folder / TESTS, folder / "report.jsonl"
        log = folder / "output.txt"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider",
                 "-p", "pytest_timeout", f"--timeout={TEST_TIMEOUT_S}", *(only or ("unit",))],
                cwd=tests, env=self._environment(server, folder, report, policy), stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
            try:
                code = process.wait(timeout_s)
            finally:
                _end(process)
        # 0: all passed, 1: some failed; anything else is a run that did not happen as meant
        assert code in (0, 1), f"exit code {code}:\n{log.read_text(errors='replace')[-3000:]}"
        return read_report(report)

    def _environment(self, server: Path, folder: Path, report: Path, policy: str) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "PYTEST_"))
        }
        scratch, hub = folder / "scratch", folder / "hub"
        scratch.mkdir()
        self.stand_ins.write_hub(hub)
        own = {
            "LLAMA_SERVER_BIN_PATH": str(server),
            "LLAMA_ARG_THREADS": "1",
            "LLAMA_CACHE": str(hub),
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "SUITE_FILES": json.dumps(self.stand_ins.downloads),
            "SUITE_MODELS": json.dumps(self.stand_ins.presets),
            "SUITE_REPORT": str(report),
            "TMPDIR": str(scratch),
        }
        return kept | own | ({"LLAMA_ARG_PHASE_POLICY": policy} if policy else {})


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a run: it is a session of its own, so its group is all of it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)


def read_report(report: Path) -> Outcomes:
    """Read the lines that our conftest.py wrote."""
    found: Outcomes = {}
    for line in report.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        found[item["id"]] = Outcome(item["outcome"], item["seconds"], item["reason"])
    return found
