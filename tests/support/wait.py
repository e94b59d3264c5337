"""Waiting for a state, with a deadline: tests never sleep for a guess."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
STEP_S = 0.02


def until(what: str, probe: Callable[[], T], timeout_s: float = 30.0) -> T:
    """Call `probe` until it returns something true; fail naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what} (last: {value!r})")
        time.sleep(STEP_S)


async def until_async(what: str, probe: Callable[[], Awaitable[T]], timeout_s: float = 30.0) -> T:
    """`until` for coroutines."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = await probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what} (last: {value!r})")
        await asyncio.sleep(STEP_S)
