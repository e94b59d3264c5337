"""A measurement's summary for people: a table, and sentences about what is not as it should be."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from proxy.bench import PRIMARY

_WIDTH = 220
_RATIOS = {PRIMARY: "prefill", "prefill_cpu_ms": "CPU"}
_HEADINGS = {
    PRIMARY: "total prefill",
    "prefill_cpu_ms": "prefill CPU",
    "makespan_ms": "makespan",
    "ttft_ms": "TTFT",
    "barrier_wait_ms": "barrier wait",
}


def render(summary: dict[str, Any]) -> str:
    """The table: medians in milliseconds with the quartiles, pooled and per order, and the ratio of prefill medians."""
    table = Table(box=None, pad_edge=False, header_style="")
    for column in ("policy", "prompts", "runs", *_HEADINGS.values()):
        table.add_column(column, justify="left" if column in ("policy", "prompts") else "right")
    for name in _RATIOS.values():
        table.add_column(f"{name} / {summary['base'].removeprefix('barrier-')}", justify="right")
    for policy in summary["policies"]:
        ratios = [policy["ratio"][name] for name in _RATIOS]
        rows = [
            ("both" if len(policy["orders"]) > 1 else "", policy["pooled"], [_ratio(each) for each in ratios])
        ]
        if len(policy["orders"]) > 1:
            rows += [
                (name, metrics, [_number(each["orders"][name]) for each in ratios])
                for name, metrics in policy["orders"].items()
            ]
        for index, (order, metrics, over_base) in enumerate(rows):
            primary = metrics[PRIMARY]
            table.add_row(
                policy["policy"] if index == 0 else "",
                order,
                str(primary["n"]) if primary else "0",
                *(_cell(metrics[name]) for name in _HEADINGS),
                *over_base,
            )
    out = io.StringIO()
    Console(file=out, width=_WIDTH, color_system=None).print(table)
    setup = summary["matrix"]["configuration"]
    runs = summary["runs"]
    head = (
        f"{summary['matrix']['model']}, batch {setup['batch']}/{setup['ubatch']}, cache {setup['cache']}, "
        f"{setup['threads']} thread(s), {setup['predict']} tokens per request; {runs['ok']} of {runs['planned']} runs\n"
        f"medians [quartiles] in {'thousand tokens' if setup['dry_run'] else 'ms'}; a ratio is of medians [quartiles of the ratios of neighbouring runs]"
    )
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    return "\n".join([head, "", *lines])


def _cell(sample: dict[str, float] | None) -> str:
    if sample is None:
        return "-"
    return f"{_number(sample['median'])} [{_number(sample['q1'])}, {_number(sample['q3'])}]"


def _ratio(ratios: dict[str, Any]) -> str:
    pairs = ratios["pairs"]
    spread = f" [{_number(pairs['q1'])}, {_number(pairs['q3'])}]" if pairs else ""
    return f"{_number(ratios['pooled'])}{spread}"


def _number(value: float | None) -> str:
    """Three figures that mean something."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def explain(summary: dict[str, Any]) -> list[str]:
    """What a reader must know before using the numbers; empty when all is well."""
    verdict, runs = summary["verdict"], summary["runs"]
    lines = [
        f"{runs[name]} of {runs['planned']} runs: {name}"
        for name in ("memory", "invariant", "timeout", "failed")
        if runs[name]
    ]
    if not verdict["equal_work"]:
        lines.append("the policies did not do the same work: their times cannot be compared")
    for order, found in verdict["orders"].items():
        if found["equal"]:
            continue
        who = "mixed and the barrier policies" if found["equal_barrier"] else "the barrier policies"
        lines.append(
            f"prompts {order}: {who} sampled different tokens (smallest logit gap {found['smallest_gap']:.2g}); where "
            "arithmetic depends on what shares a batch, use --ubatch 1 --flash-attn off, or say --hashes report"
        )
    return lines
