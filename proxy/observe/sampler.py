"""Samples one server for as long as it is told to, through restarts and silence.

Samples fall on a grid of the observer's clock that all samplers share, so that several servers are asked at the same instants. A
question that takes longer than the interval skips ticks, it is never doubled. When the server does not answer, the sampler says so once,
comes back with growing pauses, and begins a new run unless the server was merely silent: a process that was replaced counts anew.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from proxy.clock import Clock
from proxy.observe.ask import Asker, UnansweredError
from proxy.observe.clocks import ClockMap
from proxy.observe.records import Counters, Event, Mark, Record, Sample, ServerState
from proxy.observe.tally import counters_went_back
from proxy.types import EngineInfo

STOCK_INTERVAL_S: Final = 1.2
"""An engine without the patch notices clients that left after one second without any result, and answers to us are
results: asked more often, it would let answers run on that nobody reads."""
_RETRY_S: Final = (0.25, 0.5, 1.0, 2.0, 5.0)
_SETTLE_TRIES: Final = 5

NO_PHASES: Final = f"no phases: an engine without the patch; sampled every {STOCK_INTERVAL_S:g} s at most, transitions are not seen"
NO_COUNTERS: Final = (
    "token counters are not read: of prompts that no sample saw it is told how many tokens are unsure"
)
NO_COUNTERS_STOCK: Final = (
    "token counters are not read: tasks that begin and end between two samples are not counted"
)
MISSING: Final = " (the engine offers none: start it with --metrics)"


class Sampler:
    """One server's samples, told to `emit` in order of time."""

    def __init__(
        self,
        server: int,
        asker: Asker,
        *,
        clock: Clock,
        started_s: float,
        interval_s: float,
        counters: bool,
        emit: Callable[[Record], None],
    ) -> None:
        """`started_s` is where the grid begins; `counters`: whether to read them where the server has them."""
        self._server = server
        self._asker = asker
        self._clock = clock
        self._started_s = started_s
        self._interval_s = interval_s
        self._may_count = counters
        self._emit = emit
        self._run = 0
        self._counting = False
        self._last: Sample | None = None
        self._clocks = ClockMap()
        self._state: ServerState | None = None
        self._up = Mark(server, 0, started_s, ServerState.UP)

    async def run(self) -> None:
        """Sample until cancelled."""
        failures = 0
        while True:
            try:
                await self._sample()
            except UnansweredError as missed:
                self._missed(missed)
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
            else:
                failures = 0
                await self._next_tick()

    async def _sample(self) -> None:
        if self._last is None:
            await self._begin()
            return
        counters = await self._counters()
        asked, answered, report = await self._asker.slots(self._last.report.seq or 0)
        sample = Sample(self._server, self._run, asked, answered, report, counters)
        if counters_went_back(self._last, sample) or report.native != self._last.report.native:
            self._last = None
            await self._begin()
            return
        self._took(sample)

    async def _begin(self) -> None:
        """Begin a run. Its first sample is what later ones are counted from: nothing may end while it is taken."""
        info = await self._asker.props()
        self._counting = self._may_count
        before = await self._counters()
        asked, answered, report = await self._asker.slots(0)
        settled = await self._counters()
        for _ in range(_SETTLE_TRIES):
            if before is None or settled is None or _same(before, settled):
                break
            before = settled
            asked, answered, report = await self._asker.slots(0)
            settled = await self._counters()
        self._run += 1
        self._clocks = ClockMap()
        self._came_up(asked, info, native=report.native)
        # what happened before this run is not ours to count
        report = replace(report, events=(), lost=0)
        self._took(Sample(self._server, self._run, asked, answered, report, before, settled))

    async def _counters(self) -> Counters | None:
        if not self._counting:
            return None
        found = await self._asker.counters()
        self._counting = found is not None
        return found

    def _took(self, sample: Sample) -> None:
        report = sample.report
        if self._state is not ServerState.UP:
            # it was only silent: the same process answers again
            self._mark(replace(self._up, at_s=sample.asked_s))
        if report.engine_us is not None:
            self._clocks.observe(sample.asked_s, sample.answered_s, report.engine_us)
            for event in report.events:
                at, error = self._clocks.ours(event.t_us)
                self._emit(Event(sample.server, sample.run, at, error, event))
        self._last = sample
        self._emit(sample)

    def _came_up(self, at_s: float, info: EngineInfo | None, *, native: bool) -> None:
        notes = []
        if not native:
            notes.append(NO_PHASES)
        if not self._counting:
            notes.append(
                (NO_COUNTERS if native else NO_COUNTERS_STOCK) + (MISSING if self._may_count else "")
            )
        self._up = Mark(
            *(self._server, self._run, at_s, ServerState.UP),
            native=native,
            counters=self._counting,
            policy=info.policy.value if info is not None and native else "",
            build=info.build if info is not None else "",
            series=info.series if info is not None else "",
            model=info.model_path.rsplit("/", 1)[-1] if info is not None else "",
            note="; ".join(notes),
        )
        self._mark(self._up)

    def _missed(self, missed: UnansweredError) -> None:
        if missed.state is not ServerState.SILENT:
            self._last = None
        if self._state is not missed.state:
            self._mark(Mark(self._server, self._run, self._clock(), missed.state, missed.why))

    def _mark(self, mark: Mark) -> None:
        self._state = mark.state
        self._emit(mark)

    async def _next_tick(self) -> None:
        """Wait for the grid's next instant, for a stock engine the first one after a long enough pause."""
        stock = self._last is not None and not self._last.report.native
        rest = max(self._interval_s, STOCK_INTERVAL_S) if stock else 0.0
        earliest = self._clock() + rest
        ticks = math.floor((earliest - self._started_s) / self._interval_s) + 1
        await asyncio.sleep(max(0.0, self._started_s + ticks * self._interval_s - self._clock()))


def _same(before: Counters, after: Counters) -> bool:
    return (before.prompt, before.generated) == (after.prompt, after.generated)
