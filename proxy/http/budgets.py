"""Time limits of running requests, by one coarse sweep over all of them (no timer per read).

What a limit counts: `first_token_s` the time in prefill (from sending on where an engine's member
states are unknown), `inter_token_s` the silence after content began, neither while the engine pauses
the member or the client does not read; `total_s` everything since the last byte of the request.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from proxy.clock import Clock
from proxy.errors import ErrorCode, ProxyError
from proxy.settings import Budgets
from proxy.types import TicketState

SWEEP_S: Final = 0.25
"""How coarse: a limit is noticed at most this late."""
STEP_CAP_S: Final = 2 * SWEEP_S
"""Most that one sweep may add: when our own loop was held up, nobody else was silent."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a sweep sees of one request. Stamps are 0.0 until they happened.

    `mirrored`: the engine tells member states. `blocked`: the client is not reading.
    """

    now: float
    began: float
    opened: float
    first: float
    last: float
    stream: bool
    state: TicketState
    mirrored: bool
    blocked: bool


class Meter:
    """Adds up what the limits count; `step` says which one ran out. Pure."""

    __slots__ = ("_at", "_last", "_limits", "_prefill_s", "_silent_s")

    def __init__(self, limits: Budgets, now: float) -> None:
        self._limits = limits
        self._at = now
        self._last = 0.0
        self._prefill_s = 0.0
        self._silent_s = 0.0

    def step(self, seen: Seen) -> ErrorCode | None:
        """Account the time since the last step; return the code of a limit that ran out."""
        spent, self._at = min(seen.now - self._at, STEP_CAP_S), seen.now
        limits = self._limits
        if limits.total_timeout_s is not None and seen.now - seen.began > limits.total_timeout_s:
            return ErrorCode.TOTAL_TIMEOUT
        if not seen.opened:
            return None
        if not seen.first:
            if _prefilling(seen):
                self._prefill_s += min(spent, seen.now - seen.opened)
            out = limits.first_token_timeout_s
            return ErrorCode.FIRST_TOKEN_TIMEOUT if out is not None and self._prefill_s > out else None
        if seen.last != self._last:
            self._last = seen.last
            self._silent_s = 0.0
            spent = min(spent, seen.now - seen.last)
        if seen.state is not TicketState.PAUSED and not seen.blocked:
            self._silent_s += spent
        out = limits.inter_token_timeout_s
        return ErrorCode.INTER_TOKEN_TIMEOUT if out is not None and self._silent_s > out else None

    def left_s(self, now: float, began: float) -> dict[str, float]:
        """Return what is left of each limit that is on, by its setting's name; `began` as in `Seen`."""
        limits = self._limits
        spent = {
            "first_token_timeout_s": (limits.first_token_timeout_s, self._prefill_s),
            "inter_token_timeout_s": (limits.inter_token_timeout_s, self._silent_s),
            "total_timeout_s": (limits.total_timeout_s, now - began),
        }
        return {name: max(0.0, limit - used) for name, (limit, used) in spent.items() if limit is not None}


class Stall:
    """Notices a client that takes nothing of what waits for it: it holds a slot's charge. Pure."""

    __slots__ = ("_at", "_limit_s", "_stalled_s", "_taken")

    def __init__(self, limit_s: float | None, now: float) -> None:
        self._limit_s = limit_s
        self._at = now
        self._taken = 0
        self._stalled_s = 0.0

    def step(self, now: float, sent: int, unread: int) -> bool:
        """Account the time since the last step; True when the client took nothing for too long.

        `sent` bytes were written so far, `unread` of them wait for the client.
        """
        spent, self._at = min(now - self._at, STEP_CAP_S), now
        taken, before = sent - unread, self._taken
        self._taken = taken
        self._stalled_s = 0.0 if unread == 0 or taken > before else self._stalled_s + spent
        return self._limit_s is not None and self._stalled_s > self._limit_s


def _prefilling(seen: Seen) -> bool:
    if seen.mirrored:
        return seen.state is TicketState.PREFILL
    # a whole answer's first byte is its last: without member states nothing can be told of it
    return seen.stream


def expired(code: ErrorCode, limits: Budgets, *, configured: bool = True) -> ProxyError:
    """Return the error for a limit that ran out, with the setting that holds it where it is `configured`."""
    if not configured:
        return ProxyError(code, f"the engine did not answer within {limits.total_timeout_s:g} s")
    match code:
        case ErrorCode.TOTAL_TIMEOUT:
            what, limit = "the whole request", limits.total_timeout_s
        case ErrorCode.FIRST_TOKEN_TIMEOUT:
            what, limit = "prompt processing", limits.first_token_timeout_s
        case _:
            what, limit = "the time without a further token", limits.inter_token_timeout_s
    return ProxyError(code, f"{what} took longer than {limit:g} s (budgets.{code.value}_s)")


class Watched(Protocol):
    """A running request as the sweep sees it."""

    def sweep(self, now: float) -> None:
        """Check limits and idle time; must not block or raise."""


class Sweeper:
    """Calls every watched request a few times a second, and nothing while there is none."""

    def __init__(self, clock: Clock, interval_s: float = SWEEP_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watched: Watched) -> Callable[[], None]:
        """Watch until the returned function is called."""
        self._watched.add(watched)
        if self._timer is None:
            self._arm()
        return lambda: self._watched.discard(watched)

    def close(self) -> None:
        """Stop; nothing is watched any more."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._run)

    def _run(self) -> None:
        self._timer = None
        if not self._watched:
            return
        self._arm()
        now = self._clock()
        for watched in tuple(self._watched):
            watched.sweep(now)
