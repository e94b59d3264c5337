"""Waiting for a state, always with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.004
# Deadlines are for hangs: they leave room for a machine that does ten other things.


def eventually(
    probe: Callable[[], T | None], what: str, *, timeout_s: float = 120.0, poll_s: float = POLL_S
) -> T:
    """Return the first true value of ``probe``, asked again until ``timeout_s`` have passed.

    Raises ``AssertionError`` that names ``what`` was waited for and the last value seen.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            msg = f"not within {timeout_s} s: {what}; last seen: {value!r}"
            raise AssertionError(msg)
        time.sleep(poll_s)
