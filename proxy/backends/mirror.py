"""Keeps the newest snapshot of one ready engine: fast while busy, slow while idle, soon when poked.

One poller per ready backend generation. It only lives while the backend is ready, so it never wakes or pins
a model, and every poll has a hard timeout: an engine answers `/slots` in milliseconds even during a long
decode call, so silence means trouble (`silent_polls` counts it; the snapshot simply grows old).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from proxy import logs
from proxy.backends.client import ProbeError
from proxy.backends.phases import Observations, PhaseLedger
from proxy.backends.slots import SlotsReport
from proxy.clock import Clock
from proxy.metrics import Metrics
from proxy.types import BackendKey, EnginePhase, MemberState, Snapshot

NATIVE_BUSY_S: Final = 0.05
STOCK_BUSY_S: Final = 1.2
"""A stock engine looks for clients that left after one second without any result, and a `/slots` answer
is a result: polled faster, it would never notice (the patched engine does, see notice-lost-clients)."""
RETRY_S: Final = 0.2
"""After a poll that got no answer: nothing that an engine could take for a result."""
IDLE_S: Final = 1.5
MIN_GAP_S: Final = 0.01
"""Between two polls even when poked: a burst of grants costs one poll, not one each."""
SETTLE_S: Final = 0.005
"""From a poke to its poll. A request that was just granted is on no slot before its body has gone out, and the
poll would only stand in its way; members that end in one decode step are seen together."""
SLOT_STATES: Final = (
    "idle",
    "busy",
    *(state.value for state in MemberState if state is not MemberState.NONE),
)

_log = logs.get("backends")
Fetch = Callable[[int | None], Awaitable[SlotsReport]]


class Mirror:
    """The poller. `fetch(since)` asks the engine (with its own timeout) and raises `ProbeError`."""

    def __init__(
        self,
        key: BackendKey,
        fetch: Fetch,
        *,
        clock: Clock,
        metrics: Metrics,
        on_snapshot: Callable[[Snapshot], None],
        on_failed_polls: Callable[[int, ProbeError, float], None] | None = None,
        engine_is_ours: bool = True,
        working: Callable[[], int] = lambda: 0,
    ) -> None:
        """`on_failed_polls` is told how many polls in a row got no usable answer, the last reason, and when it was asked.

        `working` tells how many of our requests are with the engine: one that has just been sent is on
        no slot yet, and its first moments are worth watching.
        """
        self.key = key
        self.latest: Snapshot | None = None
        self.failed_polls = 0
        self.silent_polls = 0
        self._fetch = fetch
        self._clock = clock
        self._metrics = metrics
        self._on_snapshot = on_snapshot
        self._on_failed_polls = on_failed_polls
        self._working = working
        self._ledger = PhaseLedger(engine_is_ours=engine_is_ours)
        self._poked = asyncio.Event()
        self._since = 0
        self._started_at = clock()
        self._task: asyncio.Task[None] | None = None
        self._labels = (key.model, key.backend)
        self._troubled = False
        self._answered = False
        """Whether the last poll got an answer that shows no slots: the next one will hardly say more."""

    def start(self) -> None:
        """Begin polling."""
        self._metrics.mirror_age.labels(*self._labels).set_function(self.age)
        self._task = asyncio.create_task(self._run(), name=f"mirror:{self.key.model}:{self.key.generation}")

    async def stop(self) -> None:
        """End polling and drop the gauges of this backend. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait((task,))
        for gauge in (self._metrics.mirror_age, self._metrics.engine_phase, self._metrics.engine_slots):
            gauge.remove_by_labels({"model": self.key.model, "backend": self.key.backend})

    def poke(self) -> None:
        """Ask for a poll within milliseconds; one sent before this call does not count."""
        self._poked.set()

    def age(self) -> float:
        """Seconds since the newest snapshot was taken (or polling began)."""
        return self._clock() - (self.latest.taken_at if self.latest else self._started_at)

    async def _run(self) -> None:
        while True:
            self._poked.clear()
            try:
                await self.poll()
            except Exception:
                # whoever listens failed, not the engine: the next poll must still come
                _log.exception("snapshot was not taken in", model=self.key.model)
            await asyncio.sleep(MIN_GAP_S)
            # asyncio.timeout: wait_for may lose a cancel that comes together with the poke
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval()):
                    await self._poked.wait()
            if self._poked.is_set():
                await asyncio.sleep(SETTLE_S)

    def _interval(self) -> float:
        if self.silent_polls:
            # a whole timeout has passed already: three of them in a row are the wedge signal
            return 0.0
        if self._answered:
            return IDLE_S
        if self.latest is None or self.failed_polls:
            return RETRY_S
        if self.latest.busy == 0 and not self._working():
            return IDLE_S
        return NATIVE_BUSY_S if self.latest.native else STOCK_BUSY_S

    async def poll(self) -> Snapshot | None:
        """Poll once; return the new snapshot, None when there was no usable answer."""
        asked = self._clock()
        try:
            report = await self._fetch(self._since)
            if report.seq is not None and report.seq < self._since:
                # a remote engine that was restarted counts anew
                self._since = 0
                report = await self._fetch(0)
        except ProbeError as error:
            self.failed_polls += 1
            self.silent_polls = self.silent_polls + 1 if error.timed_out else 0
            self._answered = error.answered
            self._trouble(error, asked)
            return None
        taken = self._clock()
        self.failed_polls = self.silent_polls = 0
        self._answered = False
        if self._troubled:
            self._troubled = False
            _log.info("slots answered again", model=self.key.model, generation=self.key.generation)
        if report.seq is not None:
            self._since = report.seq
        snapshot = Snapshot(
            key=self.key,
            asked_at=asked,
            taken_at=taken,
            slots=report.slots,
            native=report.native,
            phase=report.phase,
            sealed=report.sealed,
            cohort=report.cohort,
            decode_running_ms=report.decode_running_ms,
            seq=self._since,
            lost=report.lost,
            events=report.events,
        )
        self.latest = snapshot
        self._metrics.mirror_poll.labels(*self._labels).observe(taken - asked)
        self._gauge(snapshot)
        self._count(self._ledger.observe(snapshot, report.engine_us))
        self._on_snapshot(snapshot)
        return snapshot

    def _trouble(self, error: ProbeError, asked: float) -> None:
        """Say it once: a dead engine is reported by its exit, a silent one by the watchdog."""
        if not self._troubled:
            self._troubled = True
            _log.warning(
                "no usable slots", model=self.key.model, generation=self.key.generation, error=str(error)
            )
        if self._on_failed_polls is not None:
            self._on_failed_polls(self.failed_polls, error, asked)

    def _gauge(self, snapshot: Snapshot) -> None:
        for phase in EnginePhase:
            self._metrics.engine_phase.labels(*self._labels, phase.value).set(phase is snapshot.phase)
        counts = dict.fromkeys(SLOT_STATES, 0)
        for slot in snapshot.slots:
            if not slot.busy:
                counts["idle"] += 1
            else:
                counts["busy" if slot.member is MemberState.NONE else slot.member.value] += 1
        for state, count in counts.items():
            self._metrics.engine_slots.labels(*self._labels, state).set(count)

    def _count(self, seen: Observations) -> None:
        metrics, model = self._metrics, self.key.model
        for phase, seconds in seen.phase_seconds.items():
            metrics.engine_phase_seconds.labels(*self._labels, phase.value).inc(seconds)
        for phase, seconds in seen.durations:
            metrics.cohort_duration.labels(model, phase.value).observe(seconds)
        for sealed in seen.seals:
            metrics.cohorts.labels(model).inc()
            metrics.cohort_size.labels(model).observe(sealed.size)
            metrics.cohort_prompt_tokens.labels(model).observe(sealed.prompt_tokens)
        for values, histogram in (
            (seen.barrier_waits, metrics.barrier_wait),
            (seen.native_queues, metrics.native_queue),
            (seen.paused, metrics.paused),
        ):
            for value in values:
                histogram.labels(model).observe(value)
