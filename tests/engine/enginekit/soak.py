"""How long and with which seed a soak runs, from the environment; its line of progress."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

REPORT_EVERY_S = 5.0
DEFAULT_MINUTES, DEFAULT_REQUESTS, DEFAULT_PASSES = 60, 2000, 20


@dataclass(frozen=True, slots=True)
class Bounds:
    """The size of a soak: what runs, with which seed, and the moment (monotonic, s) after which nothing new begins."""

    seed: int
    requests: int
    passes: int
    until_s: float

    def repeat(self) -> str:
        """The command that runs the same requests again."""
        return f"make soak SEED={self.seed} REQUESTS={self.requests}"


def read_bounds(environ: Mapping[str, str] = os.environ) -> Bounds:
    """Read `SOAK_SEED` (default: a new one), `SOAK_REQUESTS` per policy, `SOAK_PASSES` and `SOAK_MINUTES` of all.

    Raises ValueError that names the variable.
    """

    def number(name: str, default: int, least: int) -> int:
        text = environ.get(name, "")
        if not text:
            return default
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise ValueError(f"{name}={text!r}: expected a whole number of at least {least}")
        return int(text)

    return Bounds(
        seed=number("SOAK_SEED", secrets.randbelow(10**6), 0),
        requests=number("SOAK_REQUESTS", DEFAULT_REQUESTS, 1),
        passes=number("SOAK_PASSES", DEFAULT_PASSES, 1),
        until_s=time.monotonic() + 60 * number("SOAK_MINUTES", DEFAULT_MINUTES, 1),
    )


class Progress:
    """One line of progress: rewritten in place on a terminal, else a new one every few seconds."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._began_s = self._shown_s = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def show(self, count: int, more: str = "", *, last: bool = False) -> None:
        """Tell that `count` are done; most calls print nothing."""
        now = time.monotonic()
        if not last and now - self._shown_s < (0.5 if self._terminal else REPORT_EVERY_S):
            return
        self._shown_s = now
        line = f"{self._what}: {count}/{self._total} {self._unit}{more}, {now - self._began_s:.0f} s"
        if self._terminal:
            print(f"\r{line:<100}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
