"""A model of one patched llama-server: slots, the phase barrier, cohorts, and how long things take.

It follows the machine of `native-patch/overlay` and the facts the project measured, in simulated seconds:

- a prompt is read in decode calls of at most `batch_tokens`, shared between the members of the cohort by
  water-filling (shortest remaining first, each at most its equal share of the room left);
- no first token before every live member has been read; the first to finish seals the cohort;
- arrivals during a decode call are taken in after it; without a free slot they are deferred, and a release
  moves the oldest deferred one into the slot before the next cohort forms;
- `drain` forms the next cohort when the last member has finished, `yield` pauses the members once the
  generation has run for the quantum while somebody queues;
- a queued member's gather hint holds the next cohort open that long, unless every slot is taken.

Between two things that can happen, generation is computed in one piece, so a run costs microseconds per
request and not per token.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.types import BackendKey, EnginePhase, MemberState, PhasePolicy, SlotView, Snapshot

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per prompt token, and per decode step: `step_s` for one member, `step_slot_s` for each more."""

    prompt_token_s: float
    step_s: float
    step_slot_s: float
    batch_tokens: int = 2048

    def step(self, members: int) -> float:
        """Seconds of one decode step of so many members."""
        return self.step_s + self.step_slot_s * (members - 1)


@dataclass(slots=True, eq=False)
class Task:
    """One request on the engine. `prompt` is what has to be read, `output` what will be generated."""

    tag: str
    prompt: int
    output: int
    gather_s: float = 0.0
    read: int = 0
    generated: int = 0
    member: MemberState = MemberState.NONE
    admitted_at: float = 0.0
    cohort: int | None = None


@dataclass(slots=True)
class Cohort:
    """One prefill phase: who was read together, and when it began and opened."""

    number: int
    began: float
    tags: list[str] = field(default_factory=list)
    opened: float | None = None


class Engine:
    """One engine. The caller posts tasks, cancels them, and calls `run(now)` no later than `due`.

    `on_open(task, now, second_at)` tells a task's first token and when its second will come,
    `on_done(task, now)` its end.
    """

    def __init__(
        self,
        key: BackendKey,
        speed: Speed,
        *,
        slots: int = 4,
        policy: PhasePolicy = PhasePolicy.DRAIN,
        yield_s: float = 2.0,
        on_open: Callable[[Task, float, float], None],
        on_done: Callable[[Task, float], None],
    ) -> None:
        self.key = key
        self.speed = speed
        self.policy = policy
        self.yield_s = yield_s
        self.on_open = on_open
        self.on_done = on_done
        self.slots: list[Task | None] = [None] * slots
        self.deferred: deque[Task] = deque()
        self.inbox: list[Task] = []
        self.phase = EnginePhase.IDLE
        self.cohorts: list[Cohort] = []
        self.due: float | None = None
        self.changed = False
        self.busy_s = 0.0
        self._drained_at = 0.0
        self._generating_since = 0.0
        self._mark = 0.0
        self._chunk: list[tuple[Task, int]] = []

    # --- from outside -----------------------------------------------------------------------------

    def post(self, task: Task, now: float) -> None:
        """Take a task in; during a decode call of a prompt it waits for the end of that call."""
        self.changed = True
        if self._chunk:
            self.inbox.append(task)
        else:
            self._admit(task, now)
            self._advance(now)

    def cancel(self, tag: str, now: float) -> None:
        """Let go of a task wherever it is; what it had is gone."""
        self._count(now)
        self.changed = True
        self.inbox = [task for task in self.inbox if task.tag != tag]
        self.deferred = deque(task for task in self.deferred if task.tag != tag)
        for index, task in enumerate(self.slots):
            if task is not None and task.tag == tag:
                self._release(index, now)
        self._advance(now)

    def run(self, now: float) -> None:
        """Do what is due at `now`."""
        if self.due is None or now < self.due - _EPSILON:
            return
        self.changed = True
        if self._chunk:
            self._read()
        else:
            self._count(now)
        for index, task in enumerate(self.slots):
            if task is not None and task.member is MemberState.GENERATE and task.generated >= task.output:
                self._finish(index, now)
        arrived, self.inbox = self.inbox, []
        for task in arrived:
            self._admit(task, now)
        self._advance(now)

    def generated(self, tag: str, now: float) -> int:
        """Return how many tokens of a task were generated by now."""
        self._count(now)
        return next((task.generated for task in self.slots if task is not None and task.tag == tag), 0)

    def snapshot(self, asked_at: float, now: float) -> Snapshot:
        """Return what `/slots` would say."""
        self._count(now)
        views = tuple(self._view(index, task) for index, task in enumerate(self.slots))
        return Snapshot(
            self.key,
            asked_at,
            now,
            views,
            native=True,
            phase=self.phase,
            sealed=self._sealed(),
            cohort=self.cohorts[-1].number if self.cohorts else None,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is here."""
        return not self.inbox and not self.deferred and not any(self.slots)

    # --- the machine ------------------------------------------------------------------------------

    def _admit(self, task: Task, now: float) -> None:
        for index, held in enumerate(self.slots):
            if held is None:
                self.slots[index] = task
                task.admitted_at = now
                if self.phase in (EnginePhase.PREFILL_OPEN, EnginePhase.YIELD_PREFILL) and not self._sealed():
                    self._join(task)
                else:
                    task.member = MemberState.QUEUED
                return
        self.deferred.append(task)

    def _join(self, task: Task) -> None:
        task.member = MemberState.PREFILL
        task.cohort = self.cohorts[-1].number
        self.cohorts[-1].tags.append(task.tag)

    def _sealed(self) -> bool:
        return any(task.member is MemberState.READY for task in self._members())

    def _members(self, *states: MemberState) -> list[Task]:
        return [task for task in self.slots if task is not None and (not states or task.member in states)]

    def _finish(self, index: int, now: float) -> None:
        task = self.slots[index]
        assert task is not None
        self._release(index, now)
        self.on_done(task, now)

    def _release(self, index: int, now: float) -> None:
        self.slots[index] = None
        if self.deferred:
            self._admit(self.deferred.popleft(), now)

    def _advance(self, now: float) -> None:
        """Settle: open, drain, yield or begin a cohort, then say when the next thing happens."""
        if self._chunk:
            return
        while True:
            if self.phase not in (EnginePhase.IDLE, EnginePhase.GENERATE):
                if self._members(MemberState.PREFILL):
                    break
                if not self._open(now):
                    continue
            if self.phase is EnginePhase.GENERATE:
                if not self._members(MemberState.GENERATE):
                    self.phase = EnginePhase.IDLE
                    self._drained_at = now
                    continue
                if self._yields(now):
                    for task in self._members(MemberState.GENERATE):
                        task.member = MemberState.PAUSED
                    self._begin(now, EnginePhase.YIELD_PREFILL)
                    continue
                break
            if self._gathered(now):
                self._begin(now, EnginePhase.PREFILL_OPEN)
                continue
            break
        self._plan(now)

    def _open(self, now: float) -> bool:
        """Open the barrier: first tokens at once, seconds one step later; False when nobody is left."""
        ready = self._members(MemberState.READY)
        for task in self._members(MemberState.READY, MemberState.PAUSED):
            task.member = MemberState.GENERATE
        self.phase = EnginePhase.GENERATE
        self._generating_since = self._mark = now
        if self.cohorts:
            self.cohorts[-1].opened = now
        going = sum(1 for t in self._members(MemberState.GENERATE) if t not in ready or t.output > 1)
        second = now + self.speed.step(max(1, going))
        for task in ready:
            task.generated = 1
            self.on_open(task, now, second)
        for index, task in enumerate(self.slots):
            if task is not None and task.member is MemberState.GENERATE and task.generated >= task.output:
                self._finish(index, now)
        return bool(self._members(MemberState.GENERATE))

    def _yields(self, now: float) -> bool:
        if self.policy is not PhasePolicy.YIELD or not self._members(MemberState.QUEUED):
            return False
        return now >= self._yield_at() - _EPSILON

    def _yield_at(self) -> float:
        oldest = min(task.admitted_at for task in self._members(MemberState.QUEUED))
        at = max(oldest, self._generating_since) + self.yield_s
        step = self.speed.step(len(self._members(MemberState.GENERATE)))
        return self._mark + max(1, math.ceil((at - self._mark) / step - _EPSILON)) * step

    def _gathered(self, now: float) -> bool:
        queued = self._members(MemberState.QUEUED)
        if not queued:
            return False
        return None not in self.slots or now >= self._gather_until(queued) - _EPSILON

    def _gather_until(self, queued: list[Task]) -> float:
        return max(max(task.admitted_at, self._drained_at) + task.gather_s for task in queued)

    def _begin(self, now: float, phase: EnginePhase) -> None:
        self.phase = phase
        self.cohorts.append(Cohort(len(self.cohorts) + 1, now))
        for task in self._members(MemberState.QUEUED):
            self._join(task)

    def _plan(self, now: float) -> None:
        self.due = None
        if self.phase is EnginePhase.GENERATE:
            members = self._members(MemberState.GENERATE)
            step = self.speed.step(len(members))
            ends = self._mark + min(task.output - task.generated for task in members) * step
            self.due = ends
            if self.policy is PhasePolicy.YIELD and self._members(MemberState.QUEUED):
                self.due = min(ends, max(self._yield_at(), now))
        elif self.phase is EnginePhase.IDLE:
            queued = self._members(MemberState.QUEUED)
            if queued:
                self.due = max(now, self._gather_until(queued))
        else:
            self._chunk = self._share()
            tokens = sum(count for _, count in self._chunk)
            self.due = now + tokens * self.speed.prompt_token_s
            self.busy_s += self.due - now

    def _share(self) -> list[tuple[Task, int]]:
        """Fill one batch: shortest remaining first, each at most an equal share of the room left."""
        waiting = sorted(self._members(MemberState.PREFILL), key=lambda task: task.prompt - task.read)
        room = self.speed.batch_tokens
        shares = []
        for index, task in enumerate(waiting):
            count = min(task.prompt - task.read, math.ceil(room / (len(waiting) - index)))
            shares.append((task, count))
            room -= count
        return shares

    def _read(self) -> None:
        for task, count in self._chunk:
            task.read += count
            if task.member is MemberState.PREFILL and task.read >= task.prompt:
                task.member = MemberState.READY
        self._chunk = []
        if self.phase is EnginePhase.PREFILL_OPEN and self._sealed():
            self.phase = EnginePhase.PREFILL_SEALED

    def _count(self, now: float) -> None:
        """Book the whole steps since the last mark."""
        if self.phase is not EnginePhase.GENERATE:
            return
        members = self._members(MemberState.GENERATE)
        if not members:
            return
        step = self.speed.step(len(members))
        steps = int((now - self._mark) / step + 1e-6)
        if steps > 0:
            for task in members:
                task.generated = min(task.output, task.generated + steps)
            self._mark += steps * step
            self.busy_s += steps * step

    def _view(self, index: int, task: Task | None) -> SlotView:
        if task is None:
            return SlotView(index, False)
        return SlotView(
            index,
            True,
            tag=task.tag,
            member=task.member,
            cohort=task.cohort,
            prompt_tokens=task.prompt,
            processed_tokens=task.read,
            decoded_tokens=task.generated,
        )
