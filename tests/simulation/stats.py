"""Numbers from a finished run."""

from collections.abc import Iterable, Sequence

from tests.simulation.world import Client, World


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean, 0 of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest value that at least a fraction `q` of the values does not exceed."""
    found = sorted(values)
    return found[min(len(found) - 1, int(q * len(found)))] if found else 0.0


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 when all have the same, 1/n when one has all."""
    squares = sum(value * value for value in values)
    return 1.0 if squares == 0 else sum(values) ** 2 / (len(values) * squares)


def served(world: World, until: float, decode_weight: float) -> dict[str, float]:
    """Weighted tokens that each key was served by a time: prompts read, and tokens generated so far."""
    found: dict[str, float] = {}
    for client in world.clients.values():
        found.setdefault(client.ask.key, 0.0)
        if client.first is None or client.first > until:
            continue
        made = client.ask.output
        if client.done is None or client.done > until:
            span = (client.done or until) - client.first
            made = round(client.ask.output * (until - client.first) / span) if span > 0 else 0
        found[client.ask.key] += client.ask.prompt + decode_weight * made
    return found


def of_key(world: World, key: str) -> list[Client]:
    """The clients of one key."""
    return [client for client in world.clients.values() if client.ask.key == key]


def cohort_sizes(world: World) -> list[int]:
    """Sizes of all cohorts of all engines, in order of their beginning."""
    cohorts = [cohort for engine in world.engines.values() for cohort in engine.cohorts]
    return [len(cohort.tags) for cohort in sorted(cohorts, key=lambda cohort: cohort.began)]
