"""Tables for people: plain columns on a terminal, wide ones into a pipe."""

from collections.abc import Iterable, Sequence
from typing import Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH: Final = 240
_MIN_TEXT: Final = 12
_COLOURS: Final = {
    "ready": "green",
    "done": "green",
    "open": "green",
    "failed": "red",
    "blocked": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "cancelled": "yellow",
    "starting": "cyan",
    "loading": "cyan",
    "running": "cyan",
}


def console(*, err: bool = False) -> Console:
    """Return a console; what is not a terminal gets lines that do not fold."""
    found = Console(stderr=err, highlight=False)
    return found if found.is_terminal else Console(stderr=err, highlight=False, width=_PIPE_WIDTH)


def show(
    columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str, right: Iterable[str] = ()
) -> None:
    """Print a table, or `empty` where it has no rows. Columns in `right` are flush right.

    On a terminal the last column, which is the one of free text, is cut to what is left of the line; elsewhere each
    row is one line, however long.
    """
    target, cells = console(), _cells(rows)
    if target.is_terminal:
        target.print(drawn(columns, cells, empty, right, target.width))
    elif not cells:
        click.echo(empty)
    else:
        numbers, widths = set(right), _widths(columns, cells)
        for row in ([*columns], *cells):
            parts = (
                cell.rjust(width) if column in numbers else cell.ljust(width)
                for column, cell, width in zip(columns, row, widths, strict=True)
            )
            click.echo(" ".join(parts).rstrip())


def drawn(
    columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str, right: Iterable[str], width: int
) -> Table | Text:
    """Return a table for a terminal that is so many characters wide, or `empty` where it has no rows."""
    cells = _cells(rows)
    if not cells:
        return Text(empty)
    numbers, widths = set(right), _widths(columns, cells)
    room = max(_MIN_TEXT, width - sum(widths[:-1]) - len(widths) + 1)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in numbers else "left")
    for *others, last in cells:
        row = (*others, last if len(last) <= room else f"{last[: room - 1]}…")
        table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    return table


def _cells(rows: Iterable[Sequence[str]]) -> list[list[str]]:
    return [[_printable(cell) for cell in row] for row in rows]


def _widths(columns: Sequence[str], cells: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip([*columns], *cells, strict=True)]


def _printable(text: str) -> str:
    """Return a text without line ends and what terminals act on: reasons and errors come from elsewhere."""
    return "".join(char if char.isprintable() else " " for char in text)


def seconds(value: float | None) -> str:
    """Return a duration as people read it, with its unit."""
    if value is None:
        return ""
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def size(value: int | None) -> str:
    """Return bytes as people read them."""
    if value is None:
        return ""
    number = float(value)
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"
