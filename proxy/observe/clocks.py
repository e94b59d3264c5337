"""An engine's clock laid beside ours. Pure.

An answer says the engine's time at some instant between our asking and our reading, so every answer bounds the offset
between the clocks from both sides. The bounds of all answers are intersected, which is better than any single one. When
they no longer meet (one of the clocks drifts or was stopped), the newest alone counts again.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ClockMap:
    """Maps engine microseconds to our seconds, once an answer was seen."""

    _low: float | None = None
    _high: float = 0.0

    def observe(self, asked_s: float, answered_s: float, engine_us: int) -> None:
        """Take an answer that was asked for and read at these times and told `engine_us`."""
        low, high = asked_s - engine_us / 1e6, answered_s - engine_us / 1e6
        if self._low is None or max(low, self._low) > min(high, self._high):
            self._low, self._high = low, high
        else:
            self._low, self._high = max(low, self._low), min(high, self._high)

    def ours(self, engine_us: int) -> tuple[float, float]:
        """Return our time of an engine stamp, in seconds, and how far off it may be. Needs an answer before."""
        if self._low is None:
            raise ValueError("no answer was observed yet")
        middle, half = (self._low + self._high) / 2, (self._high - self._low) / 2
        return engine_us / 1e6 + middle, half
