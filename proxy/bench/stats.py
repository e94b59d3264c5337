"""Medians and spreads. Pure."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample: its size, median, quartiles and ends, in the sample's own unit."""

    n: int
    median: float
    q1: float
    q3: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | int]:
        """Plain values, rounded to what means something."""
        return {
            name: value if isinstance(value, int) else round(value, 4) for name, value in asdict(self).items()
        }


def spread(values: Sequence[float]) -> Spread | None:
    """The spread of a sample, None where it is empty. Quartiles are interpolated, ends included."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(1, *(float(values[0]),) * 5)
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(len(values), median, q1, q3, float(min(values)), float(max(values)))
