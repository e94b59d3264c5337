"""Progress of long work on a terminal (a bar with an estimate) and elsewhere (a plain line every few seconds)."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as RichProgress

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_PLAIN_INTERVAL_S = 5.0
_MINUTES_FROM_S = 90


class ConsoleProgress:
    """Shows steps and notes on standard error; use as a context manager around the work."""

    def __init__(self, console: Console | None = None) -> None:
        """Draw a bar where ``console`` (default: standard error) is a terminal, print lines elsewhere."""
        shown = console or Console(stderr=True)
        self._listener = _Bar(shown) if shown.is_terminal else LineProgress(shown)

    def __enter__(self) -> Self:
        """Start; nothing is drawn before the first step."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Clear the bar."""
        if isinstance(self._listener, _Bar):
            self._listener.close()

    def step(self, done: int, total: int, text: str) -> None:
        """``done`` of ``total`` units of the work called ``text``; ``total`` 0 means unknown."""
        self._listener.step(done, total, text)

    def note(self, text: str) -> None:
        """One line worth keeping."""
        self._listener.note(text)


def estimate(done: int, total: int, spent_s: float) -> str:
    """Say how long the rest may take (", about 3 min left"), or nothing while that would be a guess."""
    if not total or not 0 < done < total or spent_s < _PLAIN_INTERVAL_S:
        return ""
    left = spent_s / done * (total - done)
    return f", about {left / 60:.0f} min left" if left >= _MINUTES_FROM_S else f", about {left:.0f} s left"


class _Bar:
    """One bar, for the work that is going on now."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: RichProgress | None = None
        self._text = ""
        self._task = TaskID(0)
        self._started = 0.0

    def step(self, done: int, total: int, text: str) -> None:
        if self._bars is None or text != self._text:
            self.close()
            self._bars = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
                transient=True,
            )
            self._bars.start()
            self._task = self._bars.add_task(text, total=total or None, left="")
            self._text = text
            self._started = time.monotonic()
        # the average of the whole work: units differ so much that a short window jumps
        left = estimate(done, total, time.monotonic() - self._started)
        self._bars.update(self._task, completed=done, total=total or None, left=left.lstrip(", "))

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


class LineProgress:
    """Prints a plain line when the work changes, every few seconds, and at its end."""

    def __init__(
        self,
        console: Console,
        interval_s: float = _PLAIN_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Print on ``console`` at most every ``interval_s`` seconds of ``clock``."""
        self._console = console
        self._interval_s = interval_s
        self._clock = clock
        self._text = ""
        self._started = 0.0
        self._printed = -math.inf
        self._finished = False

    def step(self, done: int, total: int, text: str) -> None:
        """Print the step when it is time to."""
        now = self._clock()
        if text != self._text:
            self._text, self._started, self._printed, self._finished = text, now, -math.inf, False
        finished = 0 < total <= done
        if finished == self._finished and now - self._printed < self._interval_s:
            return
        if finished and self._finished:
            return
        self._printed, self._finished = now, finished
        count = f" {done}/{total}" if total else f" {done}" if done else ""
        self.note(f"{text}{count}{estimate(done, total, now - self._started)}")

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
