"""When a refused client should come back: a virtual queue at the measured rate. Pure.

The rate is Little's law over what was seen: tickets in service / mean time in service. Each refusal
gets the next place in the virtual queue, so that refused clients do not come back all at once.
"""

from dataclasses import dataclass

RETRY_MIN_S = 1.0
RETRY_MAX_S = 60.0
_GUESS_S = 5.0
"""Mean time in service before anything was measured."""
_GOLDEN = 0.618034
"""Steps of this fraction fill an interval evenly, whenever one stops."""
_WEIGHT = 0.1
"""Weight of the newest observation in the moving mean (about the last ten count)."""


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
