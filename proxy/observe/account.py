"""Everything an observation adds up to: per server, all together, phases, gaps. Pure: records in, a summary out.

The live display and the summary of a recording are made by the same `Account`. What it holds is bounded, however long it runs.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

from proxy.backends.phases import PhaseLedger
from proxy.observe.frames import SKEW_LIMIT_S, Aligner, Frame, Progress, difference
from proxy.observe.records import (
    End,
    Event,
    Header,
    LogLine,
    LogNote,
    Mark,
    Record,
    Sample,
    ServerState,
)
from proxy.observe.tally import Point, Tally
from proxy.types import BackendKey, EnginePhase, Snapshot

KEPT: Final = 10_000
"""Gaps and phase intervals that are kept one by one; later ones are only counted."""
RECENT_S: Final = 5.0
"""Span of the rates that are shown live."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a server did not answer. Tokens are counted across it only when `same_run`."""

    server: int
    begin_s: float
    end_s: float
    why: str
    same_run: bool


@dataclass(slots=True)
class Phases:
    """Time in one phase: all of it, and the intervals that were seen from begin to end."""

    seconds: float = 0.0
    intervals: int = 0
    longest_s: float = 0.0


@dataclass(slots=True)
class ServerAccount:
    """One server so far. `recent` are its newest points, `latest` and `mark` what is known of it now, `up` when it last came up."""

    name: str
    tally: Tally = field(default_factory=Tally)
    ledger: PhaseLedger | None = None
    phases: dict[EnginePhase, Phases] = field(default_factory=dict)
    intervals: list[tuple[EnginePhase, float, float]] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)
    lost: list[tuple[float, float, int]] = field(default_factory=list)
    samples: int = 0
    longest_request_s: float = 0.0
    latest: Sample | None = None
    first: Point | None = None
    point: Point | None = None
    recent: deque[Point] = field(default_factory=deque)
    mark: Mark | None = None
    up: Mark | None = None
    down: Mark | None = None
    native: bool = False
    prompt_from: set[str] = field(default_factory=set)
    generated_from: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)


class Account:
    """Takes the records of one observation in order."""

    def __init__(self, header: Header, skew_limit_s: float = SKEW_LIMIT_S) -> None:
        self.header = header
        self.skew_limit_s = skew_limit_s
        self.servers = [ServerAccount(name) for name in header.servers]
        self.progress = Progress()
        self.recent: deque[Frame] = deque()
        self.gaps: list[Gap] = []
        self.more_gaps = 0
        self.log_lines = [0] * len(header.logs)
        self.log_last = [""] * len(header.logs)
        self.log_notes: deque[LogNote] = deque(maxlen=100)
        self.end: End | None = None
        self._aligner = Aligner(len(header.servers), skew_limit_s)
        self._until_s = header.started_s

    def add(self, record: Record) -> None:
        """Take the next record. A server or log that the header does not know raises `ValueError`."""
        match record:
            case Sample():
                self._sample(self._server(record.server), record)
            case Mark():
                self._mark(self._server(record.server), record)
            case LogLine():
                self._until_s = max(self._until_s, record.read_s)
                if not 0 <= record.log < len(self.log_lines):
                    raise ValueError(f"log {record.log} is not in the header")
                self.log_lines[record.log] += 1
                self.log_last[record.log] = record.line
            case LogNote():
                self.log_notes.append(record)
            case End():
                self.end = record
                self._until_s = max(self._until_s, record.at_s)
            case Event() | Header():
                pass  # a sample brings its events

    def close(self) -> None:
        """No more records will come: pair what is left, and end the gaps that are open."""
        for frame in self._aligner.flush():
            self._frame(frame)
        for number, server in enumerate(self.servers):
            if server.down is not None:
                self._gap(Gap(number, _since(server), self._until_s, _why(server.down), same_run=False))
                server.down = None

    @property
    def unpaired(self) -> list[int]:
        """Samples per server that had no other server's near enough."""
        return self._aligner.unpaired

    def _server(self, number: int) -> ServerAccount:
        if not 0 <= number < len(self.servers):
            raise ValueError(f"server {number} is not in the header")
        return self.servers[number]

    def _mark(self, server: ServerAccount, mark: Mark) -> None:
        self._until_s = max(self._until_s, mark.at_s)
        if mark.note:
            server.notes[mark.note] = None
        if mark.state is ServerState.UP:
            server.up = mark
        elif server.down is None and server.latest is not None:
            server.down = mark
        server.mark = mark

    def _sample(self, server: ServerAccount, sample: Sample) -> None:
        self._until_s = max(self._until_s, sample.answered_s)
        before = server.latest
        new_run = before is None or before.run != sample.run
        if before is not None and (new_run or server.down is not None):
            why = _why(server.down) if server.down else "restarted"
            self._gap(Gap(sample.server, before.answered_s, sample.asked_s, why, same_run=not new_run))
        server.down = None
        server.latest, server.samples = sample, server.samples + 1
        server.native = sample.report.native
        server.longest_request_s = max(server.longest_request_s, sample.answered_s - sample.asked_s)
        if sample.report.lost and before is not None:
            server.lost.append((before.answered_s, sample.answered_s, sample.report.lost))
            del server.lost[KEPT:]
        server.events.update(event.event for event in sample.report.events)
        self._phases(server, sample, new_run=new_run)
        point = server.tally.add(sample)
        if not new_run:
            server.prompt_from.add(point.prompt_from.value)
            server.generated_from.add(point.generated_from.value)
        server.first, server.point = server.first or point, point
        if new_run:
            server.recent.clear()
        _keep(server.recent, point)
        for frame in self._aligner.add(point):
            self._frame(frame)

    def _frame(self, frame: Frame) -> None:
        self.progress.add(frame)
        del self.progress.broken[KEPT:]
        if self.recent and any(
            a.run != b.run for a, b in zip(self.recent[-1].points, frame.points, strict=True)
        ):
            self.recent.clear()
        _keep(self.recent, frame)

    def _gap(self, gap: Gap) -> None:
        if len(self.gaps) < KEPT:
            self.gaps.append(gap)
        else:
            self.more_gaps += 1

    @staticmethod
    def _phases(server: ServerAccount, sample: Sample, *, new_run: bool) -> None:
        if new_run or server.ledger is None:
            server.ledger = PhaseLedger(engine_is_ours=False)
        report = sample.report
        seen = server.ledger.observe(
            Snapshot(
                key=BackendKey(server.name, str(sample.server), sample.run),
                asked_at=sample.asked_s,
                taken_at=sample.answered_s,
                slots=report.slots,
                native=report.native,
                phase=report.phase,
                sealed=report.sealed,
                cohort=report.cohort,
                decode_running_ms=report.decode_running_ms,
                seq=report.seq or 0,
                lost=report.lost,
                events=report.events,
            ),
            report.engine_us,
        )
        for phase, seconds in seen.phase_seconds.items():
            server.phases.setdefault(phase, Phases()).seconds += seconds
        for phase, begin, end in seen.intervals:
            whole = server.phases.setdefault(phase, Phases())
            whole.intervals += 1
            whole.longest_s = max(whole.longest_s, end - begin)
            if len(server.intervals) < KEPT:
                server.intervals.append((phase, begin, end))


def rates(recent: deque[Frame]) -> tuple[float, float] | None:
    """Return prompt and generated tokens per second of all servers over the newest frames, None while unknown."""
    if len(recent) < 2 or recent[-1].at_s <= recent[0].at_s:
        return None
    step = difference(recent[0], recent[-1])
    return step.prompt / step.wall_s, step.generated / step.wall_s


def _keep(recent: deque[Any], item: Point | Frame) -> None:
    recent.append(item)
    while len(recent) > 2 and recent[1].at_s <= item.at_s - RECENT_S:
        recent.popleft()


def _since(server: ServerAccount) -> float:
    return server.latest.answered_s if server.latest is not None else 0.0


def _why(mark: Mark) -> str:
    return f"{mark.state.value}: {mark.why}" if mark.why else mark.state.value
