"""One simulated proxy: real admission decisions, simulated engines and clients, one event heap."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from proxy.admission import TicketSpec
from proxy.admission.core import step
from proxy.admission.events import (
    Arrived,
    BackendReady,
    Committed,
    Configured,
    Ended,
    Event,
    FirstByte,
    Granted,
    Recall,
    Released,
    Reported,
    Requeued,
    Seen,
    Tick,
)
from proxy.admission.records import Grant, Limits
from proxy.admission.state import State
from proxy.admission.views import broken_rules
from proxy.errors import ErrorCode
from proxy.types import BackendKey, EngineInfo, Outcome, PhasePolicy, Reason
from tests.simulation.engine import Engine, Speed, Task
from tests.simulation.workload import Ask

MODEL = "m"
FIFO = Limits(
    max_queue=None,
    max_queued_bytes=None,
    queue_timeout_s=None,
    fair_share=False,
    age_after_s=None,
    recall=False,
)
"""Arrival order, nothing else."""
DEFAULT = replace(FIFO, fair_share=True, age_after_s=60.0, recall=True)
"""The proxy's defaults without bounds."""


@dataclass(frozen=True, slots=True)
class Lags:
    """Seconds between machines: a hop, until a snapshot shows a change, until an engine sees a closed socket."""

    hop_s: float = 0.002
    look_s: float = 0.05
    idle_look_s: float = 2.0
    cancel_s: float = 1.0


@dataclass(slots=True, eq=False)
class Client:
    """One request's life, as its client and the observer saw it."""

    ask: Ask
    sent: float = 0.0
    """When it was last sent: a refused client sends again."""
    grants: list[float] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    first: float | None = None
    second: float | None = None
    done: float | None = None
    refused: list[tuple[float, float]] = field(default_factory=list)
    """When, and after how many seconds it was told to come back."""
    error: ErrorCode | None = None
    recalls: int = 0
    held: dict[Reason, float] = field(default_factory=dict)

    @property
    def wait(self) -> float:
        """Seconds from its last sending to its first token (inf when there was none)."""
        return float("inf") if self.first is None else self.first - self.sent

    @property
    def to_second(self) -> float:
        """Seconds from its arrival to its second token, or to the first where there is only one."""
        at = self.second if self.second is not None and self.ask.output > 1 else self.first
        return float("inf") if at is None else at - self.ask.at

    @property
    def tokens(self) -> int:
        """Tokens of work, prompt and output."""
        return self.ask.prompt + self.ask.output


class World:
    """Runs a workload against engines under limits. Deterministic: a seed and nothing else."""

    def __init__(
        self,
        asks: list[Ask],
        speed: Speed,
        limits: Limits = DEFAULT,
        *,
        slots: int = 4,
        backends: int = 1,
        policy: PhasePolicy = PhasePolicy.DRAIN,
        yield_s: float = 2.0,
        lags: Lags | None = None,
        retry: Callable[[Client, random.Random], float | None] | None = None,
        retry_ids: bool = True,
        check: bool = False,
        seed: int = 0,
    ) -> None:
        """`retry` says after how many seconds a refused client comes back (None: never)."""
        self.now = 0.0
        self.state = State()
        self.lags = lags or Lags()
        self.clients = {ask.name: Client(ask) for ask in asks}
        self.engines: dict[BackendKey, Engine] = {}
        self._retry = retry
        self._retry_ids = retry_ids
        self._check = check
        self._chance = random.Random(f"world-{seed}")
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._running: dict[str, tuple[Engine, str]] = {}
        self._looks: set[BackendKey] = set()
        self._beats: dict[BackendKey, float] = {}
        self.steps = 0
        self._post(Configured(limits))
        for index in range(backends):
            key = BackendKey(MODEL, f"b{index}", 1)
            self.engines[key] = Engine(
                key,
                speed,
                slots=slots,
                policy=policy,
                yield_s=yield_s,
                on_open=self._opened,
                on_done=self._done,
            )
            self._post(BackendReady(key, EngineInfo(slots, 1 << 20, policy)))
            self._look(key, 0.0)
        for ask in asks:
            self._at(ask.at, lambda ask=ask: self._arrive(ask))

    def run(self, until: float = float("inf")) -> "World":
        """Run until nothing can happen any more, or until a time."""
        while True:
            due = [(engine.due, engine) for engine in self.engines.values() if engine.due is not None]
            at, engine = min(due, key=lambda pair: pair[0], default=(float("inf"), None))
            first = self._heap[0][0] if self._heap else float("inf")
            timer = self.state.timer if self.state.timer is not None else float("inf")
            soonest = min(at, first, timer)
            if soonest > until or soonest == float("inf"):
                return self
            self.now = max(self.now, soonest)
            if first <= min(at, timer):
                heapq.heappop(self._heap)[2]()
            elif engine is not None and at <= timer:
                engine.run(self.now)
            else:
                self._post(Tick())
            for key, one in self.engines.items():
                if one.changed:
                    one.changed = False
                    self._look(key, self.lags.look_s)

    # --- what happens -----------------------------------------------------------------------------

    def _arrive(self, ask: Ask) -> None:
        for key, engine in self.engines.items():
            if engine.idle and self.now - self._beats.get(key, 0.0) > 0:
                # polling of an idle engine goes on, it is only not simulated
                self._seen(key)
        self.clients[ask.name].sent = self.now
        self._post(
            Arrived(
                TicketSpec(
                    id=ask.name,
                    model=MODEL,
                    key=ask.key,
                    priority=ask.priority,
                    priority_name=str(ask.priority),
                    tasks=1,
                    stream=True,
                    body_bytes=ask.prompt_bytes + 200,
                    endpoint="/v1/chat/completions",
                    prompt_bytes=ask.prompt_bytes,
                    retry_id=ask.name if self._retry_ids else "",
                )
            )
        )

    def _granted(self, ticket: str, grant: Grant) -> None:
        client = self.clients[ticket]
        client.grants.append(self.now)
        client.tags.append(grant.tag)
        engine = self.engines[grant.key]
        self._running[ticket] = (engine, grant.tag)
        task = Task(grant.tag, client.ask.prompt, client.ask.output, grant.gather_ms / 1000)
        self._at(self.now + self.lags.hop_s, lambda: self._sent(ticket, engine, task))

    def _sent(self, ticket: str, engine: Engine, task: Task) -> None:
        if self._running.get(ticket) == (engine, task.tag):
            engine.post(task, self.now)

    def _opened(self, task: Task, at: float, second: float) -> None:
        ticket = _ticket_of(task.tag)
        client = self.clients[ticket]
        client.first = at
        client.second = second
        self._at(at + self.lags.hop_s, lambda: self._first_byte(ticket, task.tag))

    def _first_byte(self, ticket: str, tag: str) -> None:
        if self._running.get(ticket, (None, ""))[1] == tag:
            self._post(Committed(ticket))
            self._post(FirstByte(ticket))

    def _done(self, task: Task, at: float) -> None:
        ticket = _ticket_of(task.tag)
        self.clients[ticket].done = at
        self._at(at + self.lags.hop_s, lambda: self._leave(ticket, task))

    def _leave(self, ticket: str, task: Task) -> None:
        if self._running.get(ticket, (None, ""))[1] != task.tag:
            return
        self._post(Reported(ticket, task.prompt, 0, task.output))
        del self._running[ticket]
        self._post(Released(ticket, Outcome.COMPLETED))

    def _recalled(self, ticket: str) -> None:
        """The requester learns of a recall: it closes its exchange unless the answer has begun."""
        running = self._running.get(ticket)
        entry = self.state.tickets.get(ticket)
        if running is None or entry is None or not entry.recalling or self.clients[ticket].first is not None:
            return
        engine, tag = self._running.pop(ticket)
        self.clients[ticket].recalls += 1
        lag = self._chance.uniform(0.0, self.lags.cancel_s)
        self._at(self.now + lag, lambda: engine.cancel(tag, self.now))
        self._post(Requeued(ticket))

    def _ended(self, effect: Ended) -> None:
        client = self.clients[effect.ticket]
        if effect.error.retry_after_s is None or client.grants:
            client.error = effect.error.code
            return
        client.refused.append((self.now, effect.error.retry_after_s))
        after = None if self._retry is None else self._retry(client, self._chance)
        if after is None:
            client.error = effect.error.code
        else:
            self._at(self.now + after, lambda: self._arrive(client.ask))

    def _look(self, key: BackendKey, after: float) -> None:
        """Ask for a snapshot unless one is on its way."""
        if key not in self._looks:
            self._looks.add(key)
            self._at(self.now + after, lambda: self._seen(key))

    def _seen(self, key: BackendKey) -> None:
        self._looks.discard(key)
        engine = self.engines[key]
        engine.changed = False
        self._post(Seen(engine.snapshot(self.now - self.lags.hop_s / 4, self.now)))
        beat = self.now + self.lags.idle_look_s
        self._beats[key] = beat
        if self.state.tickets or not engine.idle:
            self._at(beat, lambda: self._look(key, 0.0) if self._beats[key] == beat else None)

    # --- events in, effects out -------------------------------------------------------------------

    def _at(self, at: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at, next(self._order), call))

    def _post(self, event: Event) -> None:
        self.steps += 1
        for ticket, (engine, tag) in self._running.items():
            entry = self.state.tickets.get(ticket)
            if entry is not None and self.clients[ticket].first is not None:
                entry.tokens = engine.generated(tag, self.now)
        effects = step(self.state, event, self.now)
        for effect in effects:
            match effect:
                case Granted(ticket, grant):
                    self._granted(ticket, grant)
                case Recall(ticket):
                    self._at(self.now + self.lags.hop_s, lambda ticket=ticket: self._recalled(ticket))
                case Ended():
                    self._ended(effect)
                case _:
                    pass
        for effect in effects:
            ending = getattr(effect, "ending", None)
            if ending is not None:
                self.clients[ending.id].held = dict(ending.held_s)
        if self._check:
            broken = broken_rules(self.state, self.now)
            assert broken == [], broken


def _ticket_of(tag: str) -> str:
    return tag.split(".", 1)[0]
