"""In which order waiting tickets are offered: the policy, and nothing else. Pure.

Strict within a priority: grant order is arrival order. Exceptions are declared where they are made
(`decide`): tickets that take no slot pass, and a wide ticket at the head lets others by for a while.
"""

from collections.abc import Callable, Sequence

from proxy.admission.state import Entry

Order = Callable[[Sequence[Entry], float], Sequence[Entry]]
"""`(waiting tickets in arrival order, now)` → the order in which they are offered."""


def by_class_then_arrival(queue: Sequence[Entry], now: float) -> Sequence[Entry]:
    """Greater priority first, then arrival."""
    _ = now
    return sorted(queue, key=lambda entry: (-entry.spec.priority, entry.number))
