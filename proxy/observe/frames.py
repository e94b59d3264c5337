"""Pairs near-aligned samples of several servers and adds up their progress. Pure.

A frame holds one point of each server; no two of its samples can be further apart than its skew, which is the time from the
first question to the last answer. Frames wider than the limit are not made: their points stay unpaired and are counted as such. Combined
progress is the sum of the servers' differences between two frames, divided by the wall time between them: a sum of rates that were
taken over different times, or of per-slot rates, is no rate of anything.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from proxy.observe.tally import Point

SKEW_LIMIT_S: Final = 0.5
_HELD: Final = 256
"""Points that wait for another server's: it is gone when there are more."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Points of all servers at nearly one instant, in the servers' order."""

    points: tuple[Point, ...]

    @property
    def at_s(self) -> float:
        """The mean of the samples' instants."""
        return fmean(point.at_s for point in self.points)

    @property
    def skew_s(self) -> float:
        """The most that two of the samples can be apart."""
        return _skew(self.points)

    @property
    def busy(self) -> bool:
        """Whether any slot of any server was at work."""
        return any(point.busy for point in self.points)


def _skew(points: tuple[Point, ...]) -> float:
    return max(p.answered_s for p in points) - min(p.asked_s for p in points)


class Aligner:
    """Makes frames of points that come in any order between servers, and in order of time within one."""

    def __init__(self, servers: int, limit_s: float = SKEW_LIMIT_S) -> None:
        self._queues: list[deque[Point]] = [deque() for _ in range(servers)]
        self._limit_s = limit_s
        self.unpaired = [0] * servers

    def add(self, point: Point) -> Iterator[Frame]:
        """Take a point; yield the frames that are certain now."""
        queue = self._queues[point.server]
        queue.append(point)
        if len(queue) > _HELD:
            self._drop(point.server)
        yield from self._frames(last=False)

    def flush(self) -> Iterator[Frame]:
        """Yield what can still be paired; no more points will come."""
        yield from self._frames(last=True)
        for server, queue in enumerate(self._queues):
            self.unpaired[server] += len(queue)
            queue.clear()

    def _frames(self, *, last: bool) -> Iterator[Frame]:
        while all(self._queues):
            heads = tuple(queue[0] for queue in self._queues)
            if len(heads) > 1:
                # only a later sample of the earliest can bring the heads closer
                early = min(range(len(heads)), key=lambda server: heads[server].asked_s)
                skew, queue = _skew(heads), self._queues[early]
                if skew > self._limit_s:
                    self._drop(early)
                    continue
                if len(queue) > 1:
                    if _skew((*heads[:early], queue[1], *heads[early + 1 :])) < skew:
                        self._drop(early)
                        continue
                elif not last:
                    return
            for other in self._queues:
                other.popleft()
            yield Frame(heads)

    def _drop(self, server: int) -> None:
        self._queues[server].popleft()
        self.unpaired[server] += 1


@dataclass(slots=True)
class Progress:
    """Tokens of all servers together over the wall time between frames of unbroken runs.

    `busy_s` is the part of `wall_s` in which a slot was at work or tokens came; `broken` are the times between frames of
    which a server was gone.
    """

    frames: int = 0
    wall_s: float = 0.0
    busy_s: float = 0.0
    prompt: int = 0
    generated: int = 0
    skew_max_s: float = 0.0
    skew_sum_s: float = 0.0
    broken: list[tuple[float, float]] = field(default_factory=list)
    last: Frame | None = None

    def add(self, frame: Frame) -> None:
        """Take the next frame."""
        before, self.last = self.last, frame
        self.frames += 1
        self.skew_max_s = max(self.skew_max_s, frame.skew_s)
        self.skew_sum_s += frame.skew_s
        if before is None:
            return
        if any(a.run != b.run for a, b in zip(before.points, frame.points, strict=True)):
            self.broken.append((before.at_s, frame.at_s))
            return
        step = difference(before, frame)
        self.wall_s += step.wall_s
        self.prompt += step.prompt
        self.generated += step.generated
        if step.prompt or step.generated or before.busy or frame.busy:
            self.busy_s += step.wall_s


@dataclass(frozen=True, slots=True)
class Step:
    """Progress from one frame to a later one."""

    wall_s: float
    prompt: int
    generated: int


def difference(before: Frame, after: Frame) -> Step:
    """Return the progress of all servers between two frames of the same runs."""
    pairs = tuple(zip(before.points, after.points, strict=True))
    return Step(
        wall_s=after.at_s - before.at_s,
        prompt=sum(b.prompt - a.prompt for a, b in pairs),
        generated=sum(b.generated - a.generated for a, b in pairs),
    )
