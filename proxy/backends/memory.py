"""Whether a model may be loaded now, or what has to go first. Pure: sizes and idle times in, a plan out.

A pool is one kind of memory. What is free in it is the smaller of what was measured and of what its budget leaves
after every resident and every load in progress; what is not known does not limit. A load that does not fit lets idle
models go, the cheapest first, never a busy one, and none that has just been loaded (`min_residency_s`, or models
would push each other out). After `swap_patience_s` it also drains busy ones. When nothing could be had by waiting,
it is tried: the engine's own error is better than a wait for ever.

What a load in progress has taken already is known for RAM only. Of GPU memory its whole reservation counts until it is
done, beside what the measurement already misses; nobody is let go for what is only counted twice.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Pool(StrEnum):
    """Kinds of memory."""

    RAM = "ram"
    VRAM = "vram"


Sizes = Mapping[Pool, int]
"""Bytes by pool; a pool that is missing is not needed, or not known."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits. `budgets` are the most that all models together may take, by pool."""

    budgets: Sizes
    min_residency_s: float = 60.0
    swap_patience_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded. `idle_s` is None while it is busy; `reload_s` is what loading it again takes."""

    model: str
    need: Sizes
    resident_s: float
    idle_s: float | None
    reload_s: float = 1.0

    @property
    def cost(self) -> float:
        """What letting it go is expected to cost: long idle and quick to load again is cheap."""
        return self.reload_s / (1.0 + (self.idle_s or 0.0))


@dataclass(frozen=True, slots=True)
class Go:
    """Load now. `blind`: it does not fit, and nothing would be gained by waiting."""

    blind: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for these; `words` say what for."""

    words: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Let these models go first; `busy` ones are drained."""

    models: tuple[str, ...]
    busy: bool = False


Plan = Go | Wait | Evict


def plan(
    need: Sizes,
    residents: Sequence[Resident],
    loading: Sequence[Sizes],
    measured: Sizes,
    *,
    rules: Rules,
    waited_s: float,
) -> Plan:
    """Decide on one load. `loading` is what loads in progress have still to take; `measured` is free memory."""
    short = shortage(need, residents, loading, measured, rules.budgets)
    if not short:
        return Go()
    words = ", ".join(f"{size} bytes of {pool.value}" for pool, size in short.items())
    if set(short) == {Pool.VRAM} and _counted_twice(need, residents, loading, measured, rules.budgets):
        return Wait(f"{words} too little are free until loads in progress are done")
    settled = [r for r in residents if r.resident_s >= rules.min_residency_s]
    idle = _cheapest(short, [r for r in settled if r.idle_s is not None])
    if idle:
        return Evict(idle)
    if waited_s >= rules.swap_patience_s and (busy := _cheapest(short, settled)):
        return Evict(busy, busy=True)
    helpful = _cheapest(short, residents)
    if helpful or loading:
        return Wait(f"{words} too little are free")
    return Go(blind=True)


def shortage(
    need: Sizes, residents: Sequence[Resident], loading: Sequence[Sizes], measured: Sizes, budgets: Sizes
) -> dict[Pool, int]:
    """Return the bytes that are missing, by pool."""
    short = {}
    for pool in Pool:
        wanted = need.get(pool, 0)
        if not wanted:
            continue
        coming = sum(sizes.get(pool, 0) for sizes in loading)
        free = []
        if pool in measured:
            free.append(measured[pool] - coming)
        if pool in budgets:
            free.append(budgets[pool] - coming - sum(r.need.get(pool, 0) for r in residents))
        missing = wanted - min(free, default=wanted)
        if missing > 0:
            short[pool] = missing
    return short


def concerned(
    need: Sizes,
    residents: Sequence[Resident],
    loading: Sequence[Sizes],
    budgets: Sizes,
    near: Container[str],
) -> list[Resident]:
    """Return the residents with what of them counts for this load.

    The budget for GPU memory is one for all. Where it is kept, and only the GPUs that the load would use are full,
    models on other GPUs have nothing to give; `near` are those on the same ones.
    """
    if Pool.VRAM in shortage(need, residents, loading, {}, budgets):
        return list(residents)
    return [
        r
        if r.model in near
        else replace(r, need={pool: size for pool, size in r.need.items() if pool is not Pool.VRAM})
        for r in residents
    ]


def _counted_twice(
    need: Sizes, residents: Sequence[Resident], loading: Sequence[Sizes], measured: Sizes, budgets: Sizes
) -> bool:
    """Whether it would fit if loads in progress had all their GPU memory already."""
    within_budget = not shortage(need, residents, loading, {}, budgets)
    return bool(loading) and within_budget and not shortage(need, residents, (), measured, {})


def _cheapest(short: Sizes, candidates: Sequence[Resident]) -> tuple[str, ...]:
    """Return the cheapest models that free enough, none of them for nothing; empty when all are not enough."""
    chosen: list[Resident] = []
    for candidate in sorted(candidates, key=lambda r: (r.cost, r.model)):
        if _covers(short, chosen):
            break
        if any(candidate.need.get(pool, 0) for pool in short):
            chosen.append(candidate)
    if not chosen or not _covers(short, chosen):
        return ()
    for candidate in sorted(chosen, key=lambda r: r.cost, reverse=True):
        rest = [r for r in chosen if r is not candidate]
        if rest and _covers(short, rest):
            chosen = rest
    return tuple(r.model for r in chosen)


def _covers(short: Sizes, residents: Sequence[Resident]) -> bool:
    return all(sum(r.need.get(pool, 0) for r in residents) >= size for pool, size in short.items())
