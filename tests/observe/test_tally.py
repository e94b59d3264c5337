"""Counting tokens from samples: against the truth of a random engine, and by table."""

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.backends.slots import SlotsReport
from proxy.observe.records import Counters, Record, Sample
from proxy.observe.sampler import Sampler
from proxy.observe.tally import Source, Tally, counters_went_back
from proxy.observe.tasks import in_progress
from proxy.types import MemberState, PhaseEvent, SlotView
from tests.observe.sim import Sim

M = MemberState


class SimAsker:
    """Answers the sampler's questions out of a `Sim` that goes on between any two of them."""

    def __init__(self, sim: Sim, *, native: bool, counters: bool, restless: float = 0.3) -> None:
        self.sim, self.native, self.counting, self.restless = sim, native, counters, restless
        self.truth: list[tuple[int, int, int]] = []

    def clock(self) -> float:
        return self.sim.now_us / 1e6

    def _meanwhile(self) -> None:
        while self.sim.rng.random() < self.restless:
            self.sim.step()

    async def props(self) -> None:
        return None

    async def slots(self, since: int) -> tuple[float, float, SlotsReport]:
        asked = self.clock()
        self._meanwhile()
        report = self.sim.view(since, native=self.native)
        shown = sum(slot.processed_tokens for slot in report.slots if in_progress(slot))
        # tokens of cancelled prompts that no slot shows any more and no counter yet
        hidden = max(0, self.sim.queued - shown)
        self.truth.append((self.sim.computed, self.sim.sampled, hidden))
        self._meanwhile()
        return asked, self.clock(), report

    async def counters(self) -> Counters | None:
        if not self.counting:
            return None
        found = self.sim.counters(self.clock())
        self._meanwhile()
        return found


def watched(seed: int, *, native: bool, counters: bool, rest_first: bool = True, samples: int = 25, **more):
    """Sample a random engine; return the points, the truth at each of them, and what was hidden at the first.

    It is at rest in the end.
    """
    rng = random.Random(seed)
    sim = Sim(rng, barrier=native, **more)
    for _ in range(rng.randint(0, 30)):
        sim.step()
    if rest_first:
        sim.drain()
    asker = SimAsker(sim, native=native, counters=counters)
    tally, points, truth = Tally(), [], []

    def emit(record: Record) -> None:
        if isinstance(record, Sample):
            points.append(tally.add(record))
            truth.append(asker.truth[-1])

    sampler = Sampler(0, asker, clock=asker.clock, started_s=0, interval_s=1, counters=counters, emit=emit)

    async def go() -> None:
        for number in range(samples):
            if number and rng.random() < 0.8:
                # short pauses and long ones, in which whole tasks come and go
                for _ in range(rng.choice((1, 3, 30))):
                    sim.step()
            await sampler._sample()
        sim.drain()
        asker.restless = 0
        await sampler._sample()

    asyncio.run(go())
    first = truth[0]
    hidden = first[2] if counters else 0
    return points, [(p - first[0], g - first[1]) for p, g, _ in truth], hidden


seeds = st.integers(0, 2**32)


@given(seeds, st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_transitions_count_generated_tokens_exactly(seed: int, counters: bool, rest: bool) -> None:
    """At every sample, whatever began and ended in between, also when the watch begins amid the work."""
    points, truth, hidden = watched(seed, native=True, counters=counters, rest_first=rest)
    assert [point.generated for point in points] == [generated for _, generated in truth]
    assert {point.generated_from for point in points[1:]} == {Source.TRANSITIONS}


@given(seeds, st.booleans())
# two children of a cancelled parent compute the prompt each for itself: one is cut when the other is whole
@example(188292, True)
@settings(max_examples=150, deadline=None)
def test_counters_count_prompts_exactly_at_rest(seed: int, native: bool) -> None:
    """Never too much at any sample, and exact when the engine rests; children and cancelled prompts included."""
    points, truth, hidden = watched(seed, native=native, counters=True)
    for point, (prompt, _) in zip(points, truth, strict=True):
        assert point.prompt <= prompt + hidden
    assert truth[-1][0] - points[-1].unsure <= points[-1].prompt <= truth[-1][0] + hidden
    if points[0].busy == 0 and not hidden:
        assert points[-1].prompt == truth[-1][0]


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_counters_tell_their_doubt_when_begun_amid_prompts(seed: int) -> None:
    """What the counters held of prompts that were in progress at the begin is the only doubt."""
    points, truth, hidden = watched(seed, native=True, counters=True, rest_first=False)
    assert points[-1].prompt - hidden <= truth[-1][0] <= points[-1].prompt + points[-1].unsure


@given(seeds, st.booleans())
@settings(max_examples=150, deadline=None)
def test_counters_count_generated_tokens_of_a_stock_engine(seed: int, rest: bool) -> None:
    """Never too much; exact at rest, when no answer ended while the first sample was taken."""
    points, truth, hidden = watched(seed, native=False, counters=True, rest_first=rest)
    for point, (_, generated) in zip(points, truth, strict=True):
        assert point.generated <= generated
    if points[0].busy == 0:
        assert points[-1].generated == truth[-1][1]


@given(seeds)
# of the children of a cancelled parent two became whole, one of them between two views
@example(3597909532)
@settings(max_examples=150, deadline=None)
def test_without_counters_the_doubt_is_told(seed: int) -> None:
    """The truth lies between what was counted and that plus what is unsure."""
    points, truth, hidden = watched(seed, native=True, counters=False)
    assert points[-1].prompt <= truth[-1][0] <= points[-1].prompt + points[-1].unsure
    assert {point.prompt_from for point in points[1:]} == {Source.TRANSITIONS}


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_without_counters_frequent_samples_leave_no_doubt(seed: int) -> None:
    """A prompt that was seen once is counted exactly, if nobody cancels and nothing makes room."""
    sim = Sim(random.Random(seed))
    sim.leave = sim.make_room = sim.batch
    tally, seq, steps = Tally(), 0, 0
    point = tally.add(Sample(0, 1, 0, 0, sim.view(0)))
    while steps < 60 or sim.tasks:
        (sim.step if steps < 60 else sim.batch)()
        steps += 1
        point = tally.add(Sample(0, 1, steps, steps, sim.view(seq)))
        seq = sim.seq
        assert (point.prompt, point.generated, point.unsure) == (sim.computed, sim.sampled, 0)


@given(seeds)
@settings(max_examples=100, deadline=None)
def test_lost_transitions_are_told_and_never_invent_tokens(seed: int) -> None:
    points, truth, hidden = watched(seed, native=True, counters=True, ring=5)
    for point, (prompt, generated) in zip(points, truth, strict=True):
        assert point.prompt <= prompt + hidden
        assert point.generated <= generated
    if points[0].busy == 0:
        # the counters make up for what was lost
        assert points[-1].generated == truth[-1][1]


@given(seeds, st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_counts_never_fall(seed: int, native: bool, counters: bool) -> None:
    points, _, _ = watched(seed, native=native, counters=counters, rest_first=False)
    for before, after in zip(points, points[1:], strict=False):
        assert after.prompt >= before.prompt
        assert after.generated >= before.generated
        assert after.unsure >= before.unsure


def slot(number: int = 0, task: int = 1, **more) -> SlotView:
    return SlotView(number, busy=True, task=task, **more)


def report(*slots: SlotView, events=(), seq: int = 0, native: bool = True, lost: int = 0) -> SlotsReport:
    return SlotsReport(
        tuple(slots), native=native, seq=seq if native else None, events=tuple(events), lost=lost
    )


def event(
    seq: int, kind: str, tokens: int = 0, cohort: int = 1, number: int = 0, t_us: int = 0
) -> PhaseEvent:
    return PhaseEvent(seq, t_us or seq, kind, number, cohort, "", tokens)


IDLE = SlotView(0, busy=False)

TABLE = {
    "a running answer": (
        [report(IDLE), report(slot(decoded_tokens=7, processed_tokens=3, cached_tokens=0), events=[event(1, "admit", 3)], seq=1)],
        (3, 7, 0)),
    "an answer that ended, with its last tokens": (
        [report(IDLE), report(slot(decoded_tokens=7, processed_tokens=3), events=[event(1, "admit", 3)], seq=1), report(IDLE, events=[event(2, "release", 9)], seq=2)],
        (3, 9, 0)),
    "a slot that went from one task to the next": (
        [report(IDLE),
         report(slot(decoded_tokens=7, processed_tokens=3), events=[event(1, "admit", 3)], seq=1),
         report(slot(task=2, decoded_tokens=2, processed_tokens=5),
                events=[event(2, "release", 9), event(3, "admit", 5)], seq=3)], (8, 11, 0)),
    "a task between two samples, all of whose prompt but one token may have been cached": (
        [report(IDLE),
         report(IDLE, events=[event(1, "admit", 50), event(2, "ready", 50), event(3, "release", 4)], seq=3)],
        (1, 4, 49)),
    "a prompt cancelled between two samples": (
        [report(IDLE), report(IDLE, events=[event(1, "admit", 50), event(2, "release", 0)], seq=2)], (0, 0, 50)),
    "a prompt seen once, whole and gone by the next sample": (
        [report(IDLE),
         report(slot(prompt_tokens=50, processed_tokens=10, cached_tokens=20, member=M.PREFILL),
                events=[event(1, "admit", 50)], seq=1),
         report(IDLE, events=[event(2, "ready", 50), event(3, "release", 1)], seq=3)], (30, 1, 0)),
    "a family that shares one prompt": (
        [report(IDLE, SlotView(1, busy=False)),
         report(slot(0, 1, processed_tokens=10, cached_tokens=0, decoded_tokens=2),
                slot(1, 2, processed_tokens=10, cached_tokens=0, decoded_tokens=3),
                events=[event(1, "admit", 10, 0, 0, t_us=5), event(2, "admit", 10, 0, 1, t_us=5)], seq=2)],
        (10, 5, 0)),
    "a stock slot with another task": (
        [report(slot(decoded_tokens=5, processed_tokens=9), native=False),
         report(slot(task=2, decoded_tokens=2, processed_tokens=4), native=False)], (4, 2, 0)),
    "a family whose admission was not seen": (
        [report(slot(0, 1, processed_tokens=4, member=M.PREFILL), slot(1, 2, processed_tokens=0, member=M.PREFILL)),
         report(slot(0, 1, processed_tokens=7, member=M.PREFILL), slot(1, 2, processed_tokens=0, member=M.PREFILL)),
         report(slot(0, 1, processed_tokens=10, member=M.READY), slot(1, 2, processed_tokens=10, member=M.READY))],
        (3, 0, 0)),
    "a prompt that began again": (
        [report(slot(processed_tokens=90), native=False), report(slot(processed_tokens=30), native=False)], (30, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    reports, wanted = TABLE[name]
    tally = Tally()
    for at, found in enumerate(reports):
        point = tally.add(Sample(0, 1, at, at, found))
    assert (point.prompt, point.generated, point.unsure) == wanted


def test_nothing_is_counted_across_a_restart() -> None:
    """What was counted stays, the new process is counted from its first sample on."""
    tally = Tally()
    zero, some = Counters(0, 0, 0, 0), Counters(2, 2, 40, 11)
    tally.add(Sample(0, 1, 0, 0, report(IDLE), zero, zero))
    tally.add(Sample(0, 1, 1, 1, report(IDLE, events=[event(1, "release", 5)], seq=1), Counters(1, 1, 30, 5)))
    again = tally.add(Sample(0, 2, 2, 2, report(slot(decoded_tokens=3)), some, some))
    assert (again.prompt, again.generated, again.run) == (30, 5, 2)
    last = tally.add(
        Sample(0, 2, 3, 3, report(IDLE, events=[event(4, "release", 4)], seq=4), replace(some, prompt=42))
    )
    assert (last.prompt, last.generated) == (32, 6)


def test_another_process_is_known_by_what_went_back() -> None:
    at = Sample(0, 1, 0, 0, report(IDLE, seq=9), Counters(0, 0, 5, 5))
    assert not counters_went_back(at, replace(at, report=report(IDLE, seq=12)))
    assert counters_went_back(at, replace(at, report=report(IDLE, seq=3)))
    assert counters_went_back(at, replace(at, counters=Counters(0, 0, 4, 5)))
    assert counters_went_back(at, replace(at, counters=Counters(0, 0, 5, 4)))
    assert not counters_went_back(at, replace(at, counters=None))
