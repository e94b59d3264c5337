"""What had changed in an engine while nothing was seen of it: told once, when its slots are seen again.

While the view is stale, admission goes on with what it knows of its own grants; the first fresh snapshot puts
its books right. This compares them before and after that one step.
"""

from dataclasses import dataclass, field
from typing import Any

from proxy import logs
from proxy.admission import Admission
from proxy.http.hub import EventHub
from proxy.metrics import Metrics
from proxy.types import BackendKey, Snapshot

_log = logs.get("app")


@dataclass(frozen=True, slots=True)
class Difference:
    """`moved` is state before and after by ticket, `ended` what the engine had let go of unseen.

    `foreign` is the number of slots at work for nobody that we know.
    """

    moved: dict[str, tuple[str, str]] = field(default_factory=dict)
    ended: tuple[str, ...] = ()
    foreign: int = 0

    def __bool__(self) -> bool:
        return bool(self.moved or self.ended or self.foreign)

    def told(self) -> dict[str, Any]:
        """Return it as JSON values."""
        moved = {ticket: f"{before} -> {after}" for ticket, (before, after) in self.moved.items()}
        return {"moved": moved, "ended": list(self.ended), "foreign": self.foreign}


class Reconciler:
    """Hands snapshots to admission and tells what a fresh one set right after a time in the dark."""

    def __init__(self, admission: Admission, metrics: Metrics, hub: EventHub, stale_after_s: float) -> None:
        self._admission, self._metrics, self._hub = admission, metrics, hub
        self._stale_after_s = stale_after_s
        self._seen: dict[BackendKey, float] = {}

    def take(self, snapshot: Snapshot) -> None:
        """Give admission a snapshot."""
        key = snapshot.key
        seen = self._seen.get(key)
        self._seen[key] = snapshot.taken_at
        if seen is None or snapshot.taken_at - seen <= self._stale_after_s:
            self._admission.snapshot(snapshot)
            return
        before = self._states(key)
        self._admission.snapshot(snapshot)
        after = self._states(key)
        found = Difference(
            moved={
                ticket: (state, after[ticket])
                for ticket, state in before.items()
                if after.get(ticket, state) != state
            },
            ended=tuple(ticket for ticket in before if ticket not in after),
            foreign=next((b.foreign for b in self._admission.view(key.model).backends if b.key == key), 0),
        )
        blind_s = round(snapshot.taken_at - seen, 3)
        facts = {"model": key.model, "backend": key.backend, "generation": key.generation, "blind_s": blind_s}
        if found:
            self._metrics.mirror_mismatch.labels(key.model, key.backend).inc()
        (_log.warning if found else _log.info)("view of the engine is back", **facts, **found.told())
        self._hub.publish("reconciled", {**facts, **found.told()})

    def forget(self, key: BackendKey) -> None:
        """A generation is gone."""
        self._seen.pop(key, None)

    def _states(self, key: BackendKey) -> dict[str, str]:
        return {view.id: view.state.value for view in self._admission.tickets() if view.backend == key}
