"""When a refused client should come back, and what it finds then: a virtual queue at the measured rate. Pure.

The rate is Little's law over what was seen: tickets in service / mean time in service. Each refusal
gets the next place in the virtual queue, so that refused clients do not come back all at once. Who was
told a time and comes back then under the same id has the seniority of its first try, and a place in the
bounded queue that newcomers do not get.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

RETRY_MIN_S = 1.0
RETRY_MAX_S = 60.0
_GUESS_S = 5.0
"""Mean time in service before anything was measured."""
_GOLDEN = 0.618034
"""Steps of this fraction fill an interval evenly, whenever one stops."""
_WEIGHT = 0.1
"""Weight of the newest observation in the moving mean (about the last ten count)."""
_EARLY_S = 0.5
"""A client's clock and the way to us may be that much faster."""
_LATE = 0.25
"""A promise is kept for this share of the time that the client was told to wait."""
_LATE_MIN_S = 2.0
_PROMISES = 4096


@dataclass(slots=True)
class Turnover:
    """Service time of one model, and the last place handed out."""

    mean_s: float | None = None
    handed_until: float = float("-inf")
    spread: float = 0.0

    def served(self, seconds: float, cost: int) -> None:
        """Count a completed ticket: `seconds` from grant to release, charged `cost` slots."""
        sample = seconds * max(1, cost)
        self.mean_s = sample if self.mean_s is None else self.mean_s + _WEIGHT * (sample - self.mean_s)

    def retry_after_s(self, now: float, queued: int, slots: int) -> float:
        """Return seconds after which a place should be free, 1 to 60, another for each call.

        `queued` requests stand before the client; `slots` serve (1 is assumed when none is ready).
        """
        gap = max(self.mean_s if self.mean_s is not None else _GUESS_S, 0.001) / max(1, slots)
        place = max(now + RETRY_MIN_S, now + gap * queued, self.handed_until + gap)
        self.handed_until = min(place, now + RETRY_MAX_S)
        if place <= now + RETRY_MAX_S:
            return min(RETRY_MAX_S, max(RETRY_MIN_S, place - now))
        # the virtual queue is longer than the longest answer: spread evenly over its upper half
        self.spread = (self.spread + _GOLDEN) % 1.0
        return RETRY_MAX_S * (1.0 + self.spread) / 2


@dataclass(frozen=True, slots=True)
class Promise:
    """What a refused client was told: come back at `at`; kept until `until`, with the place of `number`."""

    number: int
    senior_at: float
    at: float
    until: float


@dataclass(slots=True)
class Returns:
    """Promises to refused clients, by who they are; the oldest go first when there are too many.

    `kept` is the share of promises that were taken up: places are kept free for so many only.
    """

    promises: OrderedDict[Hashable, Promise] = field(default_factory=OrderedDict)
    kept: float = 1.0

    def redeem(self, who: Hashable, now: float) -> Promise | None:
        """Take a client's promise up; None when there is none, or it is too early or too late."""
        self._forget(now)
        found = self.promises.get(who)
        if found is None or now < found.at - _EARLY_S:
            return None
        del self.promises[who]
        self.kept += _WEIGHT * (1.0 - self.kept)
        return found

    def standing(self, who: Hashable, now: float) -> float | None:
        """Return the seconds until the time that a client was told before, if that is still to come."""
        found = self.promises.get(who)
        return None if found is None or found.at <= now else max(RETRY_MIN_S, found.at - now)

    def give(self, who: Hashable, number: int, senior_at: float, now: float, after_s: float) -> None:
        """Remember what a client is told now."""
        late = max(_LATE_MIN_S, _LATE * after_s)
        self.promises[who] = Promise(number, senior_at, now + after_s, now + after_s + late)
        while len(self.promises) > _PROMISES:
            self.promises.popitem(last=False)

    def places(self, now: float, ahead_s: float) -> int:
        """Return how many places to keep for who is expected by `ahead_s` seconds from now."""
        self._forget(now)
        due = sum(1 for promise in self.promises.values() if promise.at <= now + ahead_s)
        return math.ceil(due * self.kept - 1e-9)

    def _forget(self, now: float) -> None:
        for who in [who for who, promise in self.promises.items() if promise.until < now]:
            del self.promises[who]
            self.kept -= _WEIGHT * self.kept
