"""How fast an engine reads and how long its cohorts answer, learned from the phases it shows. Pure."""

from dataclasses import dataclass

from proxy.types import EnginePhase, Snapshot

_WEIGHT = 0.1
"""Weight of the newest cohort in the moving means."""
_READING = frozenset({EnginePhase.PREFILL_OPEN, EnginePhase.PREFILL_SEALED})


@dataclass(slots=True)
class Pace:
    """Moving means over cohorts; None before the first whole one was seen."""

    reading_s: float | None = None
    read_tokens: float | None = None
    generation_s: float | None = None
    _cohort: int | None = None
    _began: float = 0.0
    _opened: float | None = None

    @property
    def tokens_per_generation(self) -> float | None:
        """Prompt tokens that could be read in the time a cohort answers."""
        if self.generation_s is None or not self.reading_s or not self.read_tokens:
            return None
        return self.generation_s * self.read_tokens / self.reading_s

    def observe(self, seen: Snapshot, tokens: float) -> None:
        """Take a snapshot; `tokens` is the estimate of what the present members had to have read."""
        if self._cohort is not None and self._opened is not None:
            over = seen.phase is EnginePhase.IDLE or seen.cohort != self._cohort
            if over:
                self.generation_s = _moved(self.generation_s, seen.asked_at - self._opened)
                self._cohort = self._opened = None
        if seen.phase in _READING and seen.cohort != self._cohort:
            self._cohort, self._began, self._opened = seen.cohort, seen.asked_at, None
        elif seen.phase is EnginePhase.GENERATE and seen.cohort == self._cohort and self._opened is None:
            self._opened = seen.asked_at
            if tokens > 0 and seen.asked_at > self._began:
                self.reading_s = _moved(self.reading_s, seen.asked_at - self._began)
                self.read_tokens = _moved(self.read_tokens, tokens)
        elif seen.cohort != self._cohort:
            # its beginning was missed
            self._cohort = self._opened = None


def _moved(known: float | None, sample: float) -> float:
    return sample if known is None else known + _WEIGHT * (sample - known)
