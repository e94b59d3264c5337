"""What the engine commands share: options, errors shown to people, tables."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import click
from rich.console import Console
from rich.table import Table

from proxy.engine import EngineToolError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

P = ParamSpec("P")

_PIPE_WIDTH = 240

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output."
)
series_option = click.option(
    "--series-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Patch directory instead of the one that came with this program.",
)


def plain_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Show an EngineToolError as one message and end with its exit code; end a signal's work like Ctrl-C does."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        with contextlib.suppress(ValueError):  # not in the main thread: the caller's signals are not ours
            signal.signal(signal.SIGTERM, _interrupt)
        try:
            function(*args, **kwargs)
        except EngineToolError as error:
            _fail(error, as_json=bool(kwargs.get("as_json", False)))
        except KeyboardInterrupt:
            click.echo("interrupted; the next run continues", err=True)
            sys.exit(ExitCode.INTERRUPTED)

    return wrapper


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _fail(error: EngineToolError, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"ok": False, "error": error.message, "exit_code": int(error.exit_code)}))
    click.echo(f"error: {error.message}", err=True)
    sys.exit(error.exit_code)


def new_table(*columns: str) -> Table:
    """A borderless table that folds long cells instead of cutting them."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_table(table: Table) -> None:
    """Print on standard output, wide enough for two hashes where that is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    console.print(table)
