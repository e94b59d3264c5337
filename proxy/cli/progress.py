"""How long work is shown: one bar on a terminal, a plain line every few seconds elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY_S = 5.0


class ConsoleProgress:
    """Listener for long work (`step`, `note`), written to standard error. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._text = ""
        self._began = 0.0
        self._shown = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def note(self, text: str) -> None:
        """Print one line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, done: int, total: int, text: str) -> None:
        """Show `done` of `total` (0: unknown) of the work called `text`."""
        if text != self._text:
            self._begin(text)
        if self._console.is_terminal:
            self._draw(done, total)
        else:
            self._tell(done, total)
        if total and done >= total:
            self._end()

    def _begin(self, text: str) -> None:
        self._end()
        self._text = text
        self._began = time.monotonic()
        self._shown = 0.0

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._task = self._bar.add_task(self._text, total=total or None)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total or None)

    def _tell(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < PLAIN_EVERY_S and not (total and done >= total):
            return
        self._shown = now
        spent = now - self._began
        left = f", about {spent / done * (total - done):.0f} s left" if total and done and spent > 1 else ""
        of = f" of {total}" if total else ""
        self.note(f"{self._text}: {done}{of} ({spent:.0f} s{left})")

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._text = ""
