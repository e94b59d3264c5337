"""How many tokens one server has processed between its samples. Pure: samples in, cumulative points out.

Why not simply add up what `/slots` shows: a slot's counters start again with each task, a task may begin and end between two
samples, and children of one prompt carry a copy of their parent's prompt counter. Three sources are combined, each for what
it is exact in:

- *Generated tokens, phase-aware engine: transitions.* A `release` tells how many tokens its answer had, and the view that
  brings it tells the tokens of every answer still running, both of the same instant. So between two views the engine sampled
  exactly Σ released + Σ running now - Σ running before, whatever came and went in between, cancelled answers included. This
  needs all transitions (`lost` = 0). The engine's own `tokens_predicted_total` is no substitute: it moves only when an answer ends.
- *Prompt tokens, phase-aware engine: samples and transitions* (`tasks`). Exact for every prompt that a sample saw once. What no
  sample saw (how much of a prompt came from the cache, how far a cancelled one got) is told as `unsure`, not guessed,
- *unless the engine's counter can be read.* `prompt_tokens_total` knows all of it, but moves only at a batch that samples something,
  or at rest. Both it and the sum of what was seen can only be too low, never too high, so the larger of the two is
  taken; at rest it is exact. The counters are read before the slots: read later they would hold tokens that the next sample
  adds once more.

A stock engine has no transitions. With its counters, the growth of prompts in progress and of running answers is added to what they
say; without them only what samples show is counted, and tasks between two samples are missed.

When a watch begins amid prompts, how much of them the counter holds already is not known and is told as unsure. One case stays
open: tokens of a prompt that was cancelled just before, which are on no slot any more and not yet in the counter, count as ours.

A server that was gone in between starts a new run; nothing is counted across the gap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from proxy.backends.slots import SlotsReport
from proxy.observe.records import Counters, Sample
from proxy.observe.tasks import TaskBook, in_progress
from proxy.types import SlotView


class Source(StrEnum):
    """What a number was counted from."""

    TRANSITIONS = "transitions"
    COUNTERS = "counters"
    SAMPLES = "samples"


@dataclass(frozen=True, slots=True)
class Point:
    """Tokens of one server up to one sample, counted from its first.

    `prompt` and `generated` never fall. `unsure` prompt tokens may have come on top; `lost` transitions were overrun,
    so that `generated` may be too low from then on. Nothing is counted between points of different runs.
    """

    server: int
    run: int
    asked_s: float
    answered_s: float
    prompt: int
    generated: int
    unsure: int
    lost: int
    busy: int
    prompt_from: Source
    generated_from: Source

    @property
    def at_s(self) -> float:
        """The middle of the request."""
        return (self.asked_s + self.answered_s) / 2


@dataclass(frozen=True, slots=True)
class _Base:
    """A run's beginning: what its counters stood at, and what had been counted before."""

    counted: int
    level: int

    def reached(self, level: int) -> int:
        return self.counted + level - self.level


class Tally:
    """Counts one server. Samples come in order of time."""

    def __init__(self) -> None:
        self._last: Sample | None = None
        self._prompt = self._generated = 0
        self._unsure = self._lost = 0
        self._prompt_base: _Base | None = None
        self._generated_base: _Base | None = None
        self._tasks: TaskBook | None = None

    def add(self, sample: Sample) -> Point:
        """Count up to this sample."""
        last, report = self._last, sample.report
        prompt_from = generated_from = Source.SAMPLES
        if last is None or last.run != sample.run:
            self._begin(sample)
        else:
            generated_from = self._add_generated(last, sample)
            prompt_from = self._add_prompt(last, sample)
            self._lost += report.lost
        self._last = sample
        return Point(
            *(sample.server, sample.run, sample.asked_s, sample.answered_s),
            prompt=self._prompt,
            generated=self._generated,
            unsure=self._unsure,
            lost=self._lost,
            busy=report.busy,
            prompt_from=prompt_from,
            generated_from=generated_from,
        )

    def _begin(self, sample: Sample) -> None:
        report = sample.report
        self._tasks = TaskBook(report) if report.native else None
        self._prompt_base = self._generated_base = None
        # what was read after the slots: whatever ended in between must not count as progress later
        settled = sample.settled
        if settled is not None:
            # how much of the prompts in progress the counter holds already is not known
            begun = sum(_processed(slot) for slot in report.slots if in_progress(slot))
            self._unsure += begun
            self._prompt_base = _Base(self._prompt, settled.prompt + begun)
            self._generated_base = _Base(self._generated, settled.generated + _running(report))

    def _add_generated(self, last: Sample, sample: Sample) -> Source:
        report = sample.report
        source = Source.SAMPLES
        if report.native and report.seq is not None and not report.lost:
            ended = sum(event.tokens for event in report.events if event.event == "release")
            self._generated += max(0, ended + _running(report) - _running(last.report))
            source = Source.TRANSITIONS
        else:
            self._generated += _growth(last.report, report, _decoded)
        if self._generated_base is not None and sample.counters is not None:
            # adds nothing to what transitions told, unless some of them were lost now or before
            told = self._generated_base.reached(sample.counters.generated + _running(report))
            self._generated = max(self._generated, told)
            source = Source.COUNTERS if source is Source.SAMPLES else source
        return source

    def _add_prompt(self, last: Sample, sample: Sample) -> Source:
        report, unsure = sample.report, 0
        if self._tasks is not None:
            computed, unsure = self._tasks.advance(report)
        else:
            counting = self._prompt_base is not None
            computed = _growth(last.report, report, _prompt_in_progress if counting else _processed)
        self._prompt += computed
        if self._prompt_base is None:
            self._unsure += unsure
            return Source.SAMPLES if self._tasks is None else Source.TRANSITIONS
        if sample.counters is not None:
            self._prompt = max(self._prompt, self._prompt_base.reached(sample.counters.prompt))
        return Source.COUNTERS


def counters_went_back(last: Sample, sample: Sample) -> bool:
    """Whether a sample is of another process than the one before it, although nobody saw the change."""
    before, now = last.report, sample.report
    if before.seq is not None and now.seq is not None and now.seq < before.seq:
        return True
    return last.counters is not None and sample.counters is not None and _less(sample.counters, last.counters)


def _less(now: Counters, before: Counters) -> bool:
    return now.prompt < before.prompt or now.generated < before.generated


def _processed(slot: SlotView) -> int:
    return (slot.processed_tokens or 0) if slot.busy else 0


def _prompt_in_progress(slot: SlotView) -> int:
    return _processed(slot) if in_progress(slot) else 0


def _decoded(slot: SlotView) -> int:
    return (slot.decoded_tokens or 0) if slot.busy else 0


def _running(report: SlotsReport) -> int:
    return sum(_decoded(slot) for slot in report.slots)


def _growth(before: SlotsReport, now: SlotsReport, count: Callable[[SlotView], int]) -> int:
    """Add up what the slots' counters surely grew: by the difference in the same task, by all in another one."""
    known = {slot.id: slot for slot in before.slots if slot.busy}
    grown = 0
    for slot in now.slots:
        if not slot.busy:
            continue
        old = known.get(slot.id)
        value, was = count(slot), 0 if old is None or old.task != slot.task else count(old)
        # a prompt that had to make room begins again
        grown += value - was if value >= was else value
    return grown
