"""Admission's metrics: counters from effects as they happen, gauges from the state when asked."""

from collections import Counter
from collections.abc import Iterable

from proxy.admission.events import Effect, Finished, Granted, Mismatch, Returned, Waited
from proxy.admission.state import State
from proxy.metrics import Metrics
from proxy.types import Outcome, Reason, TicketState

_LIVE = tuple(state for state in TicketState if state is not TicketState.DONE)


class Instruments:
    """Writes the queue, hold and in-flight metrics of one proxy.

    `models` and `priorities` are the configured names: their series exist from the start, at 0.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._models: tuple[str, ...] = ()
        self._priorities: tuple[str, ...] = ()

    def configure(self, models: Iterable[str], priorities: Iterable[str]) -> None:
        """Set the closed vocabularies of the labels."""
        self._models = tuple(models)
        self._priorities = tuple(priorities)
        for model in self._models:
            self._metrics.wide_requests.labels(model)
            self._metrics.recalls.labels(model)
            for reason in Reason:
                self._metrics.hold_seconds.labels(model, reason)

    def note(self, effect: Effect) -> None:
        """Count one effect."""
        metrics = self._metrics
        match effect:
            case Waited(model=model, reason=reason, seconds=seconds):
                metrics.hold_seconds.labels(model, reason).inc(seconds)
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
        inflight = Counter((entry.spec.model, entry.state) for entry in state.tickets.values())
        size: Counter[tuple[str, str]] = Counter()
        held: Counter[tuple[str, str]] = Counter()
        oldest: dict[tuple[str, str], float] = {}
        for entry in state.waiting():
            key = (entry.spec.model, entry.spec.priority_name)
            size[key] += 1
            held[key] += entry.spec.body_bytes
            oldest[key] = max(oldest.get(key, 0.0), now - entry.arrived_at)
        for model in self._models:
            for place in _LIVE:
                metrics.inflight.labels(model, place).set(inflight[model, place])
            for priority in self._priorities:
                key = (model, priority)
                metrics.queue_size.labels(*key).set(size[key])
                metrics.queue_bytes.labels(*key).set(held[key])
                metrics.queue_oldest.labels(*key).set(oldest.get(key, 0.0))
