"""What backends need to know of requests, and whom they tell of operators' doings; the composition passes what fits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proxy.backends.gates import Gate
from proxy.backends.jobs import Job
from proxy.backends.leases import Lease
from proxy.errors import ProxyError
from proxy.types import BackendKey


@dataclass(frozen=True, slots=True)
class LiveRequests:
    """The requests of one model: ids of those that wait, and of those that hold a grant or still write.

    `tags` are the names under which the engine may still work for one, cancelled ones included; None: not known.
    """

    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    tags: frozenset[str] | None = None


class Requests(Protocol):
    """The books of requests. All but `settled` are synchronous and take effect before they return."""

    def live(self, model: str) -> LiveRequests:
        """Return the model's live requests."""

    def granted(self, key: BackendKey) -> int:
        """Return how many requests hold a grant on an engine."""

    def end(self, model: str, error: ProxyError) -> None:
        """End every request of the model, waiting and running, with this error."""

    def gate(self, model: str, gate: Gate) -> None:
        """Open, drain or block the model for requests from now on; running ones go on.

        A gate that opens lets held requests ask for a load as ever.
        """

    def check(self, model: str) -> tuple[str, ...]:
        """Return what is wrong with the model's books, in words, mended where it can be; no live request is dropped."""

    async def settled(self, model: str, timeout_s: float) -> bool:
        """Wait until nobody is past the queue of this model any more; False when the time passed first."""


class NoRequests:
    """Stands in where nobody keeps books: only open exchanges are known."""

    def live(self, model: str) -> LiveRequests:
        _ = model
        return LiveRequests()

    def granted(self, key: BackendKey) -> int:
        _ = key
        return 0

    def end(self, model: str, error: ProxyError) -> None:
        """Nothing to end."""

    def gate(self, model: str, gate: Gate) -> None:
        """Nobody to tell."""

    def check(self, model: str) -> tuple[str, ...]:
        _ = model
        return ()

    async def settled(self, model: str, timeout_s: float) -> bool:
        _ = model, timeout_s
        return True


@dataclass(frozen=True, slots=True)
class JobChanged:
    """A job began, went on or ended."""

    job: Job


@dataclass(frozen=True, slots=True)
class GateChanged:
    """What holds for new requests of a model changed; `draining` while a job overrides the operator's gate."""

    model: str
    gate: Gate


@dataclass(frozen=True, slots=True)
class LeaseChanged:
    """A lease was granted (`held`), or released or expired."""

    lease: Lease
    held: bool


ControlEvent = JobChanged | GateChanged | LeaseChanged
Listener = Callable[[ControlEvent], None]
"""Told of every change, synchronously and in order. May not block."""
