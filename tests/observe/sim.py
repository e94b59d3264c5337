"""A llama-server's bookkeeping as a small random machine: the truth to hold the observer's counting against.

It keeps what the real one keeps, in the real one's way: prompt tokens reach the counter only at a batch with an output or at rest,
generated ones when an answer ends; children wait and then carry a copy of their parent's counter; a prompt without room begins again.
"""

import random
from dataclasses import dataclass, field

from proxy.backends.slots import SlotsReport
from proxy.observe.records import Counters
from proxy.types import EnginePhase, MemberState, PhaseEvent, SlotView

M = MemberState


@dataclass
class Task:
    id: int
    total: int
    cached: int
    answer: int
    tag: str
    parent: "Task | None" = None
    state: MemberState = M.QUEUED
    begun: bool = False
    processed: int = 0
    generated: int = 0


@dataclass
class Sim:
    rng: random.Random
    slots: int = 4
    ring: int = 1_000_000
    children: bool = True
    barrier: bool = True
    now_us: int = 1_000_000
    seq: int = 0
    tasks: dict[int, Task] = field(default_factory=dict)
    events: list[PhaseEvent] = field(default_factory=list)
    computed: int = 0
    sampled: int = 0
    counted_prompt: int = 0
    counted_generated: int = 0
    queued: int = 0
    ids: int = 0
    cohort: int = 0

    def note(self, event: str, slot: int, cohort: int, tokens: int) -> None:
        self.seq += 1
        tag = self.tasks[slot].tag if slot in self.tasks else ""
        self.events.append(PhaseEvent(self.seq, self.now_us, event, slot, cohort, tag, tokens))

    def step(self) -> None:
        """Let one thing happen."""
        self.now_us += self.rng.randint(1, 50_000)
        self.rng.choice(
            (self.admit, self.batch, self.batch, self.batch, self.batch, self.leave, self.make_room)
        )()

    def admit(self) -> None:
        free = [slot for slot in range(self.slots) if slot not in self.tasks]
        if not free:
            return
        total = self.rng.randint(1, 60)
        cached = self.rng.choice((0, self.rng.randint(0, total - 1)))
        answer = self.rng.randint(1, 8)
        family = self.rng.randint(1, min(3, len(free))) if self.children and self.rng.random() < 0.3 else 1
        parent = None
        straight = self.rng.random() < 0.4
        for slot in self.rng.sample(free, family):
            self.ids += 1
            task = Task(
                self.ids, total, cached, answer, f"r{self.ids}" if parent is None else parent.tag, parent
            )
            parent = parent or task
            self.tasks[slot] = task
            if straight:
                task.state = M.PREFILL
                self.note("admit", slot, self.cohort, total)
            else:
                self.note("admit", slot, 0, total)

    def batch(self) -> None:
        """One decode: queued ones join, some prompts move on, those that are whole open, answers grow."""
        self.cohort += 1
        for slot, task in self.tasks.items():
            if task.state is M.QUEUED and self.rng.random() < 0.7:
                task.state = M.PREFILL
                self.note("admit", slot, self.cohort, task.total)
        output = False
        for slot, task in list(self.tasks.items()):
            if slot not in self.tasks:
                continue
            if task.state is M.PREFILL and not self._waits(task) and self.rng.random() < 0.7:
                task.begun = True
                chunk = self.rng.randint(1, task.total - task.cached - task.processed)
                task.processed += chunk
                self.computed += chunk
                self.queued += chunk
                if task.cached + task.processed == task.total:
                    output = True
                    self._whole(slot, task)
            elif task.state is M.READY and self.rng.random() < 0.7:
                task.state = M.GENERATE
                self._token(slot, task)
            elif task.state is M.GENERATE and self.rng.random() < 0.8:
                output = True
                for _ in range(self.rng.randint(1, 3)):
                    if slot in self.tasks:
                        self._token(slot, task)
        if output:
            self._flush()

    def leave(self) -> None:
        if self.tasks and self.rng.random() < 0.5:
            self._release(self.rng.choice(list(self.tasks)))

    def make_room(self) -> None:
        begun = [s for s, t in self.tasks.items() if t.state is M.PREFILL and t.begun and t.parent is None]
        if begun and self.rng.random() < 0.2:
            slot = self.rng.choice(begun)
            task = self.tasks[slot]
            if any(other.parent is task for other in self.tasks.values()):
                return
            task.state, task.begun, task.processed, task.cached = M.QUEUED, False, 0, 0
            self.note("admit", slot, 0, task.total)

    def drain(self) -> None:
        """Go on until nobody is at work."""
        while self.tasks:
            self.now_us += 1000
            self.batch()

    def _waits(self, task: Task) -> bool:
        return task.parent is not None and task.parent in self.tasks.values() and not _done(task.parent)

    def _whole(self, slot: int, task: Task) -> None:
        for at, other in ((slot, task), *((s, t) for s, t in list(self.tasks.items()) if t.parent is task)):
            if other.state is M.PREFILL or (other is not task and not _done(other)):
                if other.state is M.QUEUED:
                    self.note("admit", at, self.cohort, other.total)
                other.begun, other.processed, other.cached = True, task.processed, task.cached
                other.state = M.READY
                self.note("ready", at, self.cohort, other.total)
                if not self.barrier:
                    other.state = M.GENERATE
                    self._token(at, other)

    def _token(self, slot: int, task: Task) -> None:
        task.generated += 1
        self.sampled += 1
        if task.generated >= task.answer:
            self._release(slot)

    def _release(self, slot: int) -> None:
        task = self.tasks[slot]
        self.counted_generated += task.generated
        self.note("release", slot, self.cohort, task.generated)
        del self.tasks[slot]
        if not self.tasks:
            self._flush()

    def _flush(self) -> None:
        self.counted_prompt += self.queued
        self.queued = 0

    def counters(self, at: float) -> Counters:
        return Counters(at, at, self.counted_prompt, self.counted_generated)

    def view(self, since: int, *, native: bool = True) -> SlotsReport:
        shown = []
        for slot in range(self.slots):
            task = self.tasks.get(slot)
            if task is None:
                shown.append(SlotView(slot, busy=False))
                continue
            shown.append(
                SlotView(
                    slot,
                    busy=True,
                    task=task.id,
                    member=task.state if native else M.NONE,
                    prompt_tokens=task.total if native else None,
                    processed_tokens=task.processed,
                    cached_tokens=task.cached if task.begun else 0,
                    decoded_tokens=task.generated,
                )
            )
        if not native:
            return SlotsReport(tuple(shown))
        fresh = [event for event in self.events if event.seq > since]
        kept = fresh[-self.ring :]
        return SlotsReport(
            tuple(shown),
            native=True,
            phase=EnginePhase.GENERATE,
            seq=self.seq,
            lost=len(fresh) - len(kept),
            events=tuple(kept),
            engine_us=self.now_us,
        )


def _done(task: Task) -> bool:
    return task.state in (M.READY, M.GENERATE)
