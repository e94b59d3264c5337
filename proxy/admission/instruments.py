"""Admission's metrics: counters from effects as they happen, gauges from the state when asked."""

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from proxy.admission.events import Effect, Finished, Granted, Mismatch, Returned, Waited
from proxy.admission.state import State
from proxy.admission.views import shares
from proxy.metrics import LABELLED_KEYS, OTHER, Metrics
from proxy.types import Outcome, Reason, TicketState

_LIVE = tuple(state for state in TicketState if state is not TicketState.DONE)


class Instruments:
    """Writes the queue, hold and in-flight metrics of one proxy.

    `models`, `priorities` and `keys` are the configured names: their series exist from the start, at 0.
    A wait that is not over is counted as far as it has come whenever the metrics are read.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._models: tuple[str, ...] = ()
        self._priorities: tuple[str, ...] = ()
        self._keys: tuple[str, ...] = ()
        self._counted: dict[str, float] = {}
        """Seconds of present waits that were counted already, by ticket."""

    def configure(self, models: Iterable[str], priorities: Iterable[str], keys: Iterable[str] = ()) -> None:
        """Set the closed vocabularies of the labels; of the keys `LABELLED_KEYS` have a series of their own."""
        self._models = tuple(models)
        self._priorities = tuple(priorities)
        self._keys = tuple(islice(keys, LABELLED_KEYS))
        for model in self._models:
            self._metrics.wide_requests.labels(model)
            self._metrics.recalls.labels(model)
            for reason in Reason:
                self._metrics.hold_seconds.labels(model, reason)

    def note(self, effect: Effect) -> None:
        """Count one effect."""
        metrics = self._metrics
        match effect:
            case Waited(ticket, model, reason, seconds):
                rest = seconds - self._counted.pop(ticket, 0.0)
                metrics.hold_seconds.labels(model, reason).inc(max(0.0, rest))
            case Granted(grant=grant, wide=True):
                metrics.wide_requests.labels(grant.key.model).inc()
            case Returned(model=model):
                metrics.recalls.labels(model).inc()
            case Mismatch(key=key):
                metrics.mirror_mismatch.labels(key.model, key.backend).inc()
            case Finished(ending=ending) if ending.queued_s > 0 or ending.outcome is not Outcome.REJECTED:
                spec = ending.spec
                wait = metrics.queue_wait.labels(spec.model, spec.priority_name, ending.outcome)
                wait.observe(ending.queued_s)
            case _:
                pass

    def refresh(self, state: State, now: float) -> None:
        """Set the gauges to what is true now."""
        metrics = self._metrics
        self._count_waits(state, now)
        inflight = Counter((entry.spec.model, entry.state) for entry in state.tickets.values())
        size: Counter[tuple[str, str]] = Counter()
        held: Counter[tuple[str, str]] = Counter()
        oldest: dict[tuple[str, str], float] = {}
        for entry in state.waiting():
            key = (entry.spec.model, entry.spec.priority_name)
            size[key] += 1
            held[key] += entry.spec.body_bytes
            oldest[key] = max(oldest.get(key, 0.0), now - entry.arrived_at)
        self._refresh_keys(state)
        for model in self._models:
            for place in _LIVE:
                metrics.inflight.labels(model, place).set(inflight[model, place])
            for priority in self._priorities:
                key = (model, priority)
                metrics.queue_size.labels(*key).set(size[key])
                metrics.queue_bytes.labels(*key).set(held[key])
                metrics.queue_oldest.labels(*key).set(oldest.get(key, 0.0))

    def _count_waits(self, state: State, now: float) -> None:
        for entry in state.tickets.values():
            if entry.reason is None:
                continue
            seconds = now - entry.since
            fresh = seconds - self._counted.get(entry.spec.id, 0.0)
            if fresh > 0:
                self._counted[entry.spec.id] = seconds
                self._metrics.hold_seconds.labels(entry.spec.model, entry.reason).inc(fresh)

    def _refresh_keys(self, state: State) -> None:
        """Show the keys' counters; of all who have no series of their own the one that is furthest ahead."""
        counters = shares(state)
        for key in self._keys:
            self._metrics.key_counter.labels(key).set(counters.pop(key, 0.0))
        self._metrics.key_counter.labels(OTHER).set(max(counters.values(), default=0.0))
