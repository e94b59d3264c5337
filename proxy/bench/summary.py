"""From results to one summary: medians per policy and order, ratios, and whether the policies did the same. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxy.bench.evidence import Measured, Outcome, Result
from proxy.bench.matrix import HashRule, Matrix, Policy
from proxy.bench.stats import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FORMAT = 1
PRIMARY = "total_prefill_ms"

# Each metric's samples of one run, in milliseconds; the first is the primary one.
METRICS: dict[str, Callable[[Measured], list[float]]] = {
    PRIMARY: lambda found: [found.prefill_us / 1000],
    "prefill_cpu_ms": lambda found: [found.prefill_cpu_us / 1000],
    "prefill_span_ms": lambda found: [found.prefill_span_us / 1000],
    "makespan_ms": lambda found: [found.makespan_us / 1000],
    "ttft_ms": lambda found: [request.ttft_us / 1000 for request in found.requests],
    "barrier_wait_ms": lambda found: [request.barrier_wait_us / 1000 for request in found.requests],
}

_WELL = ("complete", "ended_well", "equal_work")
_REQUIRED: dict[HashRule, tuple[str, ...]] = {
    HashRule.ALL: (*_WELL, "equal_hashes"),
    HashRule.BARRIER: (*_WELL, "equal_barrier_hashes"),
    HashRule.REPORT: _WELL,
}


def order_name(order: Sequence[int]) -> str:
    """An order as people write it."""
    return ",".join(map(str, order))


def summarize(
    matrix: Matrix, results: Sequence[Result], base: Policy, rule: HashRule = HashRule.ALL
) -> dict[str, Any]:
    """The summary as plain values. It depends on its arguments only, so the same evidence gives the same bytes.

    ``base`` is what the others are compared with; ``rule`` says whose outputs must be equal for ``ok`` to be true.
    """
    whole = sorted(results, key=lambda result: result.run.key)
    verdict = _verdict(matrix, whole)
    return {
        "format": FORMAT,
        "ok": all(verdict[name] for name in _REQUIRED[rule]),
        "hash_rule": str(rule),
        "matrix": matrix.to_json(),
        "engine": sorted({result.engine for result in whole if result.measured}),
        "model": sorted({result.model for result in whole if result.measured}),
        "primary_metric": PRIMARY,
        "base": str(base),
        "verdict": verdict,
        "runs": _counts(matrix, whole),
        "failures": [
            {
                "run": result.run.key,
                "outcome": str(result.outcome),
                "name": result.name,
                "message": result.message,
            }
            for result in whole
            if result.measured is None
        ],
        "policies": [_policy(matrix, whole, policy, base) for policy in matrix.policies],
    }


def _counts(matrix: Matrix, results: Sequence[Result]) -> dict[str, int]:
    planned = len(matrix.policies) * len(matrix.orders) * matrix.repetitions
    by_outcome = {str(name): sum(result.outcome is name for result in results) for name in Outcome}
    return {"planned": planned, "done": len(results), **by_outcome}


def _verdict(matrix: Matrix, results: Sequence[Result]) -> dict[str, Any]:
    planned = len(matrix.policies) * len(matrix.orders) * matrix.repetitions
    work = {found.work for found in _measured(results)}
    orders = {order_name(order): _hashes(results, order) for order in matrix.orders}
    return {
        "complete": len(results) == planned,
        # Memory that ran out is a finding about the configuration, not a fault of the run.
        "ended_well": all(result.outcome in (Outcome.OK, Outcome.MEMORY) for result in results),
        "invariants": all(result.outcome is not Outcome.INVARIANT for result in results),
        "equal_work": len(work) <= 1,
        "equal_hashes": all(found["equal"] for found in orders.values()),
        "equal_barrier_hashes": all(found["equal_barrier"] for found in orders.values()),
        "orders": orders,
    }


def _hashes(results: Sequence[Result], order: tuple[int, ...]) -> dict[str, Any]:
    mine = [result for result in results if result.run.order == order]
    tokens = {(found.hash, *_drafts(found)) for found in _measured(mine)}
    barrier = {
        (found.hash, *_drafts(found))
        for found in _measured(result for result in mine if result.run.policy is not Policy.MIXED)
    }
    rows = {
        tuple(request.first_row_hash for request in found.requests)
        for found in _measured(result for result in mine if result.run.policy is not Policy.MIXED)
    }
    return {
        "equal": len(tokens) <= 1,
        "equal_barrier": len(barrier) <= 1,
        "equal_first_rows": len(rows) <= 1,
        "smallest_gap": min(
            (request.smallest_gap for found in _measured(mine) for request in found.requests), default=None
        ),
        "hashes": {
            str(policy): sorted(
                {found.hash for found in _measured(result for result in mine if result.run.policy is policy)}
            )
            for policy in dict.fromkeys(result.run.policy for result in mine)
        },
    }


def _drafts(found: Measured) -> tuple[tuple[int, ...], ...]:
    return tuple(request.drafted for request in found.requests)


def _measured(results: Iterable[Result]) -> list[Measured]:
    return [result.measured for result in results if result.measured is not None]


def _policy(matrix: Matrix, results: Sequence[Result], policy: Policy, base: Policy) -> dict[str, Any]:
    mine = [result for result in results if result.run.policy is policy]
    per_order = {
        order_name(order): _metrics([result for result in mine if result.run.order == order])
        for order in matrix.orders
    }
    return {
        "policy": str(policy),
        "pooled": _metrics(mine),
        "orders": per_order,
        "ratio": _ratios(matrix, results, policy, base),
        "peak_rss_bytes": max((found.peak_rss_bytes for found in _measured(mine)), default=None),
        "batches": sorted({found.batches for found in _measured(mine)}),
    }


def _metrics(results: Sequence[Result]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, take in METRICS.items():
        sample = spread([value for measured in _measured(results) for value in take(measured)])
        found[name] = sample.to_json() if sample else None
    return found


def _ratios(matrix: Matrix, results: Sequence[Result], policy: Policy, base: Policy) -> dict[str, Any]:
    """Each metric of ``policy`` over that of ``base``: of pooled and per-order medians, and over pairs.

    A pair is two runs of the same order and repetition, which were done near each other in time.
    """
    found: dict[str, Any] = {}
    for name, take in METRICS.items():
        pooled = _median(results, policy, None, take)
        per_order = {
            order_name(order): _over(
                _median(results, policy, order, take), _median(results, base, order, take)
            )
            for order in matrix.orders
        }
        pairs = spread(
            [
                ratio
                for order in matrix.orders
                for repetition in range(1, matrix.repetitions + 1)
                if (ratio := _pair(results, (policy, base), order, repetition, take)) is not None
            ]
        )
        found[name] = {
            "pooled": _over(pooled, _median(results, base, None, take)),
            "orders": per_order,
            "pairs": pairs.to_json() if pairs else None,
        }
    return found


def _median(
    results: Sequence[Result],
    policy: Policy,
    order: tuple[int, ...] | None,
    take: Callable[[Measured], list[float]],
) -> float | None:
    chosen = [
        result for result in results if result.run.policy is policy and order in (None, result.run.order)
    ]
    sample = spread([value for found in _measured(chosen) for value in take(found)])
    return sample.median if sample else None


def _pair(
    results: Sequence[Result],
    policies: tuple[Policy, Policy],
    order: tuple[int, ...],
    repetition: int,
    take: Callable[[Measured], list[float]],
) -> float | None:
    same = [result for result in results if (result.run.order, result.run.repetition) == (order, repetition)]
    over, under = (_median(same, policy, None, take) for policy in policies)
    return _over(over, under)


def _over(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else round(value / base, 4)
