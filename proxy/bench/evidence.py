"""What a run left behind, read back and checked field by field. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from proxy.bench.errors import BenchError
from proxy.bench.matrix import Policy, Run

FORMAT = 1
_MEMORY_WORDS = ("out of memory", "failed to allocate", "bad_alloc", "insufficient memory")
_SIGKILL = 9


class Outcome(StrEnum):
    """How a run ended."""

    OK = "ok"
    MEMORY = "memory"
    INVARIANT = "invariant"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens a run decoded and sampled; equal for all policies."""

    prompt_tokens: int
    sampled_tokens: int
    decoded_generated_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a run; times in microseconds from the start of the timed part."""

    length: int
    slot: int
    ttft_us: int
    barrier_wait_us: int
    end_us: int
    tokens_hash: str
    first_row_hash: str
    drafted: tuple[int, ...]
    smallest_gap: float


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of one batch, for the time line."""

    start_us: int
    end_us: int
    slot: int
    tokens: int
    prompt: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """What a whole run measured. Times are microseconds; ``prefill_us`` sums the decode calls that held prompt tokens."""

    prefill_us: int
    prefill_cpu_us: int
    prefill_span_us: int
    makespan_us: int
    batches: int
    peak_rss_bytes: int
    work: Work
    hash: str
    requests: tuple[Request, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One run and how it ended. ``measured`` is there exactly when it is OK; ``name`` and ``message`` when it is not."""

    run: Run
    outcome: Outcome
    name: str = ""
    message: str = ""
    engine: str = ""
    model: str = ""
    measured: Measured | None = None


def judge(report: object, exit_status: int | None, log: str) -> tuple[Outcome, str, str]:
    """Outcome, name and message of a run that ended; ``exit_status`` None means it was stopped at its deadline.

    A report's own word counts most. A program that was killed, or died with an allocation error as its last words, left
    no report: that is a memory failure too, because a run of ours has no other way to go like that.
    """
    if exit_status is None:
        return Outcome.TIMEOUT, "deadline", "did not end in time and was stopped"
    failure = report.get("failure") if isinstance(report, dict) else None
    if isinstance(failure, dict):
        kind = str(failure.get("kind"))
        outcome = Outcome(kind) if kind in (Outcome.MEMORY, Outcome.INVARIANT) else Outcome.FAILED
        return outcome, str(failure.get("name")), str(failure.get("message"))
    if exit_status == 0 and isinstance(report, dict) and report.get("ok") is True:
        return Outcome.OK, "", ""
    last = log.strip().splitlines()[-1] if log.strip() else "it said nothing"
    if exit_status == -_SIGKILL:
        return Outcome.MEMORY, "killed", f"was killed, as the kernel does when memory runs out; {last}"
    if any(word in log.lower() for word in _MEMORY_WORDS):
        return Outcome.MEMORY, "abort", last
    how = f"signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"
    return Outcome.FAILED, how, last


def parse_result(raw: object, run: Run, origin: str) -> Result:
    """Read an evidence file. Raises BenchError naming ``origin`` and the field when it is not what a run writes."""
    top = _Fields(raw, origin)
    if (found := top.whole("format")) != FORMAT:
        raise BenchError(
            f"{origin}: format {found}, this program reads {FORMAT}; measure into a new directory"
        )
    if (key := top.text("run")) != run.key:
        raise BenchError(f"{origin}: is of run {key!r}, expected {run.key!r}; delete it and run this again")
    try:
        outcome = Outcome(top.text("outcome"))
    except ValueError as error:
        raise BenchError(f"{origin}: outcome must be one of {', '.join(Outcome)}") from error
    name, message = top.text("name"), top.text("message")
    if outcome is not Outcome.OK:
        return Result(run, outcome, name, message)
    report = top.inner("report")
    if Policy(report.inner("config").text("policy")) is not run.policy:
        raise BenchError(f"{origin}: report.config.policy is not {run.policy}; delete it and run this again")
    engine = report.inner("engine")
    return Result(run, outcome, "", "", engine.text("build"), engine.text("model"), _measured(report))


def _measured(report: _Fields) -> Measured:
    times, work = report.inner("times"), report.inner("work")
    return Measured(
        prefill_us=times.whole("total_prefill_us"),
        prefill_cpu_us=times.whole("prefill_cpu_us"),
        prefill_span_us=times.whole("prefill_span_us"),
        makespan_us=times.whole("makespan_us"),
        batches=work.whole("batches"),
        peak_rss_bytes=report.inner("memory").whole("peak_rss_bytes"),
        work=Work(
            work.whole("prompt_tokens"),
            work.whole("sampled_tokens"),
            work.whole("decoded_generated_tokens"),
        ),
        hash=report.text("hash"),
        requests=tuple(_request(item) for item in report.items("requests")),
        spans=tuple(span for batch in report.items("trace") for span in _spans(batch)),
    )


def _request(item: _Fields) -> Request:
    return Request(
        length=item.whole("length"),
        slot=item.whole("slot"),
        ttft_us=item.whole("t_first_token_us"),
        barrier_wait_us=item.whole("barrier_wait_us"),
        end_us=item.whole("t_end_us"),
        tokens_hash=item.text("hash"),
        first_row_hash=item.text("first_row_hash"),
        drafted=item.wholes("drafted"),
        smallest_gap=item.number("smallest_gap"),
    )


def _spans(batch: _Fields) -> list[Span]:
    start, end = batch.whole("t_start_us"), batch.whole("t_end_us")
    return [
        Span(start, end, part.whole("slot"), part.whole("tokens"), part.text("kind") == "prompt")
        for part in batch.items("seqs")
    ]


class _Fields:
    """Typed access to one JSON object; every complaint names the file and the field."""

    def __init__(self, raw: object, origin: str) -> None:
        if not isinstance(raw, dict):
            raise BenchError(f"{origin}: expected a JSON object; delete the file and run this again")
        self._raw: dict[str, Any] = raw
        self._origin = origin

    def inner(self, name: str) -> _Fields:
        return _Fields(self._raw.get(name), f"{self._origin}: {name}")

    def items(self, name: str) -> list[_Fields]:
        value = self._raw.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return [_Fields(item, f"{self._origin}: {name}[{index}]") for index, item in enumerate(value)]

    def wholes(self, name: str) -> tuple[int, ...]:
        value = self._raw.get(name)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self._wrong(name, "a list of whole numbers")
        return tuple(value)

    def whole(self, name: str) -> int:
        value = self._raw.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(name, "a whole number")
        return value

    def number(self, name: str) -> float:
        value = self._raw.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(name, "a number")
        return float(value)

    def text(self, name: str) -> str:
        value = self._raw.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def _wrong(self, name: str, expected: str) -> BenchError:
        found = self._raw.get(name)
        return BenchError(
            f"{self._origin}: {name} must be {expected}, got {found!r}; delete it and run again"
        )
