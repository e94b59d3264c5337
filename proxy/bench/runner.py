"""Running the matrix: one harness process at a time, each bounded, its evidence on disk before the next begins."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proxy.bench.errors import BenchError
from proxy.bench.evidence import FORMAT, Outcome, Result, judge, parse_result
from proxy.bench.matrix import Matrix, Run, plan_runs
from proxy.bench.store import Store, write_json

if TYPE_CHECKING:
    from pathlib import Path

# The harness ends with the process named here: a run that goes on alone would disturb the next one.
_RUNNER_VARIABLE = "LLAMA_PHASE_HARNESS_RUNNER"
_BAD_FLAGS = 2
_KEPT_LOG_BYTES = 65536
_END_GRACE_S = 10.0


class Listener(Protocol):
    """Is told what goes on."""

    def step(self, done: int, total: int, text: str) -> None:
        """``done`` of ``total`` units of the work called ``text``."""

    def note(self, text: str) -> None:
        """One line worth keeping."""


@dataclass(frozen=True, slots=True)
class Program:
    """The harness and its model; ``model`` is None in a dry run. A run longer than ``timeout_s`` is stopped."""

    path: Path
    model: Path | None
    timeout_s: float

    def command(self, matrix: Matrix, run: Run, report: Path) -> list[str]:
        """The command of one run."""
        model = ["--model", str(self.model)] if self.model else []
        order = ",".join(map(str, run.order))
        flags = ["--policy", run.policy, "--lengths", order, *matrix.configuration.flags()]
        return [str(self.path), *model, *flags, "--json", str(report)]


def run_matrix(
    program: Program, matrix: Matrix, store: Store, listener: Listener, *, retry: bool = False
) -> tuple[Result, ...]:
    """Do every run that has no evidence yet, in order, and return all results.

    With ``retry`` runs that did not end well are done again. Interrupting loses the run that is going on, nothing else.
    """
    runs = plan_runs(matrix)
    results: list[Result] = []
    with store.opened(matrix):
        for number, run in enumerate(runs):
            listener.step(number, len(runs), "measure")
            found = store.load(run)
            if found is not None and retry and found.outcome is not Outcome.OK:
                store.evidence(run).unlink()
                found = None
            if found is None:
                found = _do(program, matrix, run, store)
                if found.outcome is not Outcome.OK:
                    listener.note(f"{run.key}: {found.outcome} ({found.name}): {found.message}")
            results.append(found)
        listener.step(len(runs), len(runs), "measure")
    return tuple(results)


def _do(program: Program, matrix: Matrix, run: Run, store: Store) -> Result:
    report_file = store.evidence(run).with_suffix(".report")
    report_file.unlink(missing_ok=True)
    command = program.command(matrix, run, report_file)
    try:
        exit_status = _execute(command, store.log(run), program.timeout_s)
        log = _tail(store.log(run))
        if exit_status == _BAD_FLAGS:
            # the same for every run: nothing was measured, and nothing will be
            last = log.strip().splitlines()[-1] if log.strip() else ""
            raise BenchError(last.removeprefix("error: ") or f"{program.path} refused its flags")
        report = _read_report(report_file)
        outcome, name, message = judge(report, exit_status, log)
        evidence = {
            "format": FORMAT,
            "run": run.key,
            "command": command,
            "exit_status": exit_status,
            "outcome": outcome,
            "name": name,
            "message": message,
            "report": report,
        }
        result = parse_result(evidence, run, run.key)
        write_json(store.evidence(run), evidence)
    finally:
        report_file.unlink(missing_ok=True)
    return result


def _execute(command: list[str], log: Path, timeout_s: float) -> int | None:
    """Run to the end, or to the deadline; returns the exit status, None when it was stopped."""
    with log.open("wb") as out:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {_RUNNER_VARIABLE: str(os.getpid())},
            )
        except OSError as error:
            raise BenchError(f"cannot start {command[0]}: {error.strerror or error}") from error
        try:
            return child.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_END_GRACE_S)


def _read_report(path: Path) -> object:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _KEPT_LOG_BYTES))
        return stream.read().decode(errors="replace")
    return ""
