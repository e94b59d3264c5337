"""The summary of an observation, for people."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from proxy.cli.watch_view import clean

_GAPS_SHOWN = 10


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print what `proxy.observe.summary.summarize` returned."""
    _combined(console, summary)
    for server in summary["servers"]:
        _server(console, server)
    urls = summary["header"]["servers"]
    _some(
        console,
        [
            f"gap: {urls[gap['server']]} {gap['begin_s']:.2f} to {gap['end_s']:.2f} s, {gap['why']}"
            + ("" if gap["tokens_counted"] else "; nothing is counted across it")
            for gap in summary["gaps"]
        ],
        summary["more_gaps"],
    )
    for log, count in summary["log_lines"].items():
        _say(console, f"log: {count} lines of {log}")
    _some(console, [f"log: {n['log']} at {n['at_s']:.2f} s: {n['note']}" for n in summary["log_notes"]], 0)
    for note in summary["notes"]:
        _say(console, f"note: {note}")


def _combined(console: Console, summary: dict[str, Any]) -> None:
    found = summary["combined"]
    several = len(summary["servers"]) > 1
    table = Table(
        box=box.SIMPLE_HEAD,
        title="all servers together" if several else None,
        title_justify="left",
        show_edge=False,
        pad_edge=False,
    )
    for name in ("", "tokens", "per second", "per second while busy"):
        table.add_column(name, justify="right" if name else "left")
    counts = {"prompt": found["prompt_tokens"], "generated": found["generated_tokens"]}
    counts["total"] = sum(counts.values())
    for name, count in counts.items():
        table.add_row(name, f"{count:,}", _number(found["rate"][name]), _number(found["busy_rate"][name]))
    console.print(table)
    words = f"over {found['wall_s']:.2f} s, busy {found['busy_s']:.2f} s, {found['frames']} samples"
    if several:
        words += (
            f" of each; skew at most {found['skew_max_s'] * 1000:.1f} ms (mean {found['skew_mean_s'] * 1000:.1f} ms), "
            f"{found['unpaired_samples']} samples had no partner within {found['skew_limit_s']:g} s"
        )
    _say(console, words)


def _server(console: Console, server: dict[str, Any]) -> None:
    about = ", ".join(clean(str(server[key])) for key in ("policy", "model", "build") if server[key])
    _say(console, f"\n{clean(server['url'])}  {server['state']}" + (f"  ({about})" if about else ""))
    unsure = f" (at most {server['prompt_tokens_unsure']:,} more)" if server["prompt_tokens_unsure"] else ""
    least = "at least " if server["generated_is_least"] else ""
    _say(
        console,
        f"  {server['prompt_tokens']:,} prompt tokens{unsure}, {least}{server['generated_tokens']:,} generated, "
        f"in {server['watched_s']:.2f} s and {server['samples']} samples",
    )
    if server["phases"] and server["native"]:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name in ("  phase", "seconds", "share", "whole intervals", "longest"):
            table.add_column(name, justify="left" if name == "  phase" else "right")
        total = sum(phase["seconds"] for phase in server["phases"].values())
        for name, phase in server["phases"].items():
            share = f"{100 * phase['seconds'] / total:.1f} %" if total else ""
            longest = f"{phase['longest_s']:.3f}" if phase["intervals"] else ""
            table.add_row(f"  {name}", f"{phase['seconds']:.3f}", share, str(phase["intervals"]), longest)
        console.print(table)
    if server["prompt_per_prefill_s"] is not None or server["generated_per_generate_s"] is not None:
        _say(
            console,
            f"  {_number(server['prompt_per_prefill_s'])} prompt tokens per second of prefill, "
            f"{_number(server['generated_per_generate_s'])} generated per second of generation",
        )
    if server["events_lost"]:
        _say(console, f"  {server['events_lost']} transitions were overrun before they were read:")
        _some(
            console,
            [
                f"  {item['events']} between {item['begin_s']:.2f} and {item['end_s']:.2f} s"
                for item in server["lost"]
            ],
            0,
        )
    for note in server["notes"]:
        _say(console, f"  {clean(note)}")


def _some(console: Console, lines: list[str], more: int) -> None:
    for line in lines[:_GAPS_SHOWN]:
        _say(console, line)
    if (left := max(0, len(lines) - _GAPS_SHOWN) + more) > 0:
        _say(console, f"  … and {left} more (--json tells all)")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
