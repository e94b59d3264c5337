"""Progress of long work on a terminal (a bar with an estimate) and elsewhere (a plain line every few seconds)."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from rich.console import Console

_PLAIN_INTERVAL_S = 5.0


class BarProgress:
    """Draws one bar per kind of work on ``console``; use as a context manager."""

    def __init__(self, console: Console) -> None:
        """Draw on ``console``, which must be a terminal."""
        self._bars = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._text = ""
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        """Start drawing."""
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        """Stop drawing and clear the bar."""
        self._bars.stop()

    def step(self, done: int, total: int, text: str) -> None:
        """Move the bar called ``text``; a new text starts a new bar."""
        if self._task is None or text != self._text:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task(text, total=total or None)
            self._text = text
        self._bars.update(self._task, completed=done, total=total or None)

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._bars.console.print(text, markup=False, highlight=False)


class LineProgress:
    """Prints a plain line when the work changes and then every few seconds, for logs and pipes."""

    def __init__(self, console: Console, interval_s: float = _PLAIN_INTERVAL_S) -> None:
        """Print on ``console`` at most every ``interval_s`` seconds."""
        self._console = console
        self._interval_s = interval_s
        self._text = ""
        self._started = self._printed = 0.0
        self._finished = False

    def step(self, done: int, total: int, text: str) -> None:
        """Print the step when it is time to."""
        now = time.monotonic()
        if text != self._text:
            self._text, self._started, self._printed, self._finished = text, now, -math.inf, False
        finished = 0 < total <= done
        if finished == self._finished and now - self._printed < self._interval_s:
            return
        self._printed, self._finished = now, finished
        count = f" {done}/{total}" if total else f" {done}" if done else ""
        self.note(f"{text}{count}{self._estimate(done, total, now)}")

    def _estimate(self, done: int, total: int, now: float) -> str:
        spent = now - self._started
        if not total or not 0 < done < total or spent < self._interval_s:
            return ""
        left = spent / done * (total - done)
        return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def progress_on(console: Console) -> Iterator[BarProgress | LineProgress]:
    """A bar where ``console`` is a terminal, plain lines elsewhere."""
    if console.is_terminal:
        with BarProgress(console) as bar:
            yield bar
    else:
        yield LineProgress(console)
