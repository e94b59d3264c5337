"""How long to wait before a failed engine is started again. Pure.

Exponential with a cap: the first failure is tried again at once (a process that dies once after days of good
service should be back in seconds), then `first_s`, twice that, and so on up to `max_s`. A backend that served for
`stable_s` starts over.
"""

from dataclasses import dataclass
from typing import Final

_MAX_DOUBLINGS: Final = 62


@dataclass(frozen=True, slots=True)
class Backoff:
    """The rule. `first_s` 0: nothing is started again by itself, and nobody has to wait."""

    first_s: float = 1.0
    max_s: float = 60.0
    stable_s: float = 300.0

    @property
    def restarts(self) -> bool:
        """Whether an engine that crashed is started again without being asked for."""
        return self.first_s > 0

    def wait_s(self, strikes: int) -> float:
        """Return the wait after this many failures in a row, in seconds."""
        if strikes <= 1 or not self.restarts:
            return 0.0
        return min(max(self.max_s, self.first_s), self.first_s * 2.0 ** min(strikes - 2, _MAX_DOUBLINGS))

    def strikes(self, before: int, served_s: float) -> int:
        """Return the failures in a row, this one counted, of a backend that served for `served_s` seconds."""
        return 1 if served_s >= self.stable_s else before + 1
