"""How long work tells how far it is, without knowing whether a terminal listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Listener for long work. Called from the thread that does the work, at most some tens of times a second."""

    def step(self, done: int, total: int, text: str) -> None:
        """``done`` of ``total`` units of the work called ``text``; ``total`` 0 means unknown."""

    def note(self, text: str) -> None:
        """One line worth keeping."""


class SilentProgress:
    """Listens to nothing."""

    def step(self, done: int, total: int, text: str) -> None:
        """Ignore the step."""

    def note(self, text: str) -> None:
        """Ignore the note."""
