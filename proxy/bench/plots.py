"""The pictures of a measurement, as SVG text. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.bench.evidence import Measured, Result
from proxy.bench.matrix import Matrix, Policy
from proxy.bench.stats import spread
from proxy.bench.summary import METRICS, PRIMARY, order_name
from proxy.bench.svg import MUTED, SERIES, Axis, Drawing

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH, _LEFT, _RIGHT, _TOP = 820, 130, 790, 76
_ROW, _BAND, _LANE = 20, 14, 16
_PROMPT, _GENERATED, _FIRST = SERIES[0], SERIES[1], "#1f2328"
_TITLES = {
    PRIMARY: "Total prefill time",
    "makespan_ms": "Makespan",
    "ttft_ms": "Time to first token, every request",
    "barrier_wait_ms": "Wait at the barrier, every request",
}


def plots(matrix: Matrix, results: Sequence[Result]) -> dict[str, str]:
    """File name to SVG; empty where nothing was measured."""
    if not any(result.measured for result in results):
        return {}
    unit = "tokens / 1000 (dry run)" if matrix.configuration.dry_run else "ms"
    pictures = {
        f"{name.removesuffix('_ms')}.svg": _metric(matrix, results, name, title, unit)
        for name, title in _TITLES.items()
    }
    return pictures | {"timeline.svg": _timeline(matrix, results, unit)}


def _subtitle(matrix: Matrix) -> str:
    setup = matrix.configuration
    return (
        f"{matrix.model.split(' ')[0]}, prompts {order_name(setup.lengths)}, {setup.predict} tokens each, "
        f"batch {setup.batch}/{setup.ubatch}, cache {setup.cache}, {setup.threads} thread(s)"
    )


def _metric(matrix: Matrix, results: Sequence[Result], name: str, title: str, unit: str) -> str:
    """One row per policy and order: every value a dot, the quartiles a bar, the median a stroke."""
    take = METRICS[name]
    samples = {
        (policy, order): [
            value
            for result in results
            if result.measured and (result.run.policy, result.run.order) == (policy, order)
            for value in take(result.measured)
        ]
        for policy in matrix.policies
        for order in matrix.orders
    }
    axis = Axis(max((value for values in samples.values() for value in values), default=1.0), _LEFT, _RIGHT)
    drawing = Drawing(_WIDTH, title)
    _heading(drawing, title, _subtitle(matrix))
    bottom = _TOP + len(matrix.policies) * (len(matrix.orders) * _ROW + _BAND)
    axis.draw(drawing, _TOP, bottom, unit)
    y = float(_TOP) + _BAND / 2
    for policy in matrix.policies:
        drawing.text(_LEFT - 10, y + len(matrix.orders) * _ROW / 2 + 4, policy, anchor="end")
        for index, order in enumerate(matrix.orders):
            _sample(drawing, axis, y + _ROW / 2, samples[policy, order], SERIES[index])
            y += _ROW
        y += _BAND
    x = float(_LEFT)
    for index, order in enumerate(matrix.orders):
        drawing.rect(x, bottom + 24, 10, 10, SERIES[index])
        drawing.text(x + 15, bottom + 33, f"prompts {order_name(order)}", size=11, colour=MUTED)
        x += 170
    return drawing.render(bottom + 46)


def _sample(drawing: Drawing, axis: Axis, y: float, values: Sequence[float], colour: str) -> None:
    found = spread(values)
    if found is None:
        drawing.text(axis.x(0) + 6, y + 4, "no run ended well", size=11, colour=MUTED)
        return
    drawing.line((axis.x(found.low), y), (axis.x(found.high), y), colour, 1)
    drawing.line((axis.x(found.q1), y), (axis.x(found.q3), y), colour, 4)
    drawing.line((axis.x(found.median), y - 7), (axis.x(found.median), y + 7), colour, 3)
    for value in values:
        drawing.dot(axis.x(value), y, colour)


def _heading(drawing: Drawing, title: str, subtitle: str) -> None:
    drawing.text(16, 28, title, size=17)
    drawing.text(16, 48, subtitle, size=12, colour=MUTED)


def _timeline(matrix: Matrix, results: Sequence[Result], unit: str) -> str:
    """What each slot did when, in each policy's median run of the given order; a stroke marks a first token."""
    order = matrix.orders[0]
    chosen = {policy: _typical(results, policy, order) for policy in matrix.policies}
    top = max((found.makespan_us / 1000 for found in chosen.values() if found), default=1.0)
    axis = Axis(top, _LEFT, _RIGHT)
    drawing = Drawing(_WIDTH, "Time line")
    _heading(drawing, f"Slots over time, prompts {order_name(order)}", _subtitle(matrix))
    slots = matrix.configuration.slots
    bottom = _TOP + len(matrix.policies) * (slots * _LANE + _BAND)
    axis.draw(drawing, _TOP, bottom, unit)
    y = float(_TOP) + _BAND / 2
    for policy in matrix.policies:
        drawing.text(_LEFT - 10, y + slots * _LANE / 2 + 4, policy, anchor="end")
        found = chosen[policy]
        if found is None:
            drawing.text(axis.x(0) + 6, y + 12, "no run ended well", size=11, colour=MUTED)
        else:
            _lanes(drawing, axis, y, found)
        y += slots * _LANE + _BAND
    x = float(_LEFT)
    for colour, words in ((_PROMPT, "prompt"), (_GENERATED, "generated"), (_FIRST, "first token")):
        drawing.rect(x, bottom + 24, 10, 10, colour)
        drawing.text(x + 15, bottom + 33, words, size=11, colour=MUTED)
        x += 110
    return drawing.render(bottom + 46)


def _lanes(drawing: Drawing, axis: Axis, y: float, found: Measured) -> None:
    for span in found.spans:
        start, end = axis.x(span.start_us / 1000), axis.x(span.end_us / 1000)
        colour = _PROMPT if span.prompt else _GENERATED
        # a gap of a third of a pixel between batches keeps them apart where there is room
        drawing.rect(start, y + span.slot * _LANE + 2, end - start - 0.3, _LANE - 4, colour)
    for request in found.requests:
        drawing.rect(axis.x(request.ttft_us / 1000) - 1, y + request.slot * _LANE, 2, _LANE, _FIRST)


def _typical(results: Sequence[Result], policy: Policy, order: tuple[int, ...]) -> Measured | None:
    """The run in the middle by prefill time."""
    found = sorted(
        (
            result.measured
            for result in results
            if result.measured and (result.run.policy, result.run.order) == (policy, order)
        ),
        key=lambda measured: measured.prefill_us,
    )
    return found[len(found) // 2] if found else None
