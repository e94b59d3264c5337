"""Pairing samples of several servers, and their combined progress."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.observe.clocks import ClockMap
from proxy.observe.frames import SKEW_LIMIT_S, Aligner, Frame, Progress, difference
from proxy.observe.tally import Point, Source


def point(
    server: int, at: float, prompt: int = 0, generated: int = 0, run: int = 1, took: float = 0.01
) -> Point:
    counts = {"prompt": prompt, "generated": generated, "unsure": 0, "lost": 0, "busy": 0}
    sources = {"prompt_from": Source.COUNTERS, "generated_from": Source.TRANSITIONS}
    return Point(server, run, at - took / 2, at + took / 2, **counts, **sources)


def frames(points: list[Point], servers: int) -> tuple[list[Frame], Aligner]:
    aligner = Aligner(servers)
    found = [frame for item in points for frame in aligner.add(item)]
    return [*found, *aligner.flush()], aligner


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_no_frame_is_wider_than_the_limit_and_no_point_is_used_twice(seed: int, servers: int) -> None:
    """Samplers of any rhythm, that fall silent now and then."""
    rng = random.Random(seed)
    points = []
    for server in range(servers):
        at, every = rng.random(), rng.choice((0.02, 0.25, 0.7))
        for number in range(40):
            at += every * rng.uniform(0.5, 1.5) + (3 if rng.random() < 0.05 else 0)
            took = rng.uniform(0.001, 0.3)
            points.append(point(server, at + took / 2, number, 2 * number, took=took))
            at += took
    points.sort(key=lambda p: p.answered_s)
    found, aligner = frames(points, servers)
    used = [p for frame in found for p in frame.points]
    assert len(set(map(id, used))) == len(used)
    assert len(used) + sum(aligner.unpaired) == len(points)
    for frame in found:
        assert [p.server for p in frame.points] == list(range(servers))
        assert servers == 1 or frame.skew_s <= SKEW_LIMIT_S
    for before, after in pairwise(found):
        assert all(a.asked_s < b.asked_s for a, b in zip(before.points, after.points, strict=True))


def test_the_nearest_samples_are_paired() -> None:
    """A slow sampler's points meet those of the fast one that were taken beside them."""
    fast = [point(0, n / 10, n) for n in range(40)]
    slow = [point(1, 0.04 + n, n) for n in range(4)]
    found, aligner = frames(sorted([*fast, *slow], key=lambda p: p.at_s), 2)
    assert [[p.prompt for p in frame.points] for frame in found] == [[0, 0], [10, 1], [20, 2], [30, 3]]
    assert aligner.unpaired == [36, 0]
    assert max(frame.skew_s for frame in found) == pytest.approx(0.05)


def test_samples_further_apart_are_never_paired() -> None:
    """Half a second and a little more: nothing to add up, and it is said how many stayed alone."""
    points = [point(n % 2, n * 0.6) for n in range(20)]
    found, aligner = frames(points, 2)
    assert found == []
    assert aligner.unpaired == [10, 10]


def test_a_server_that_is_gone_does_not_fill_the_memory() -> None:
    aligner = Aligner(2)
    for number in range(10_000):
        assert list(aligner.add(point(0, number / 4))) == []
    assert len(aligner._queues[0]) <= 256
    assert aligner.unpaired[0] == 10_000 - len(aligner._queues[0])


def test_progress_is_tokens_by_wall_time_and_no_sum_of_rates() -> None:
    """One server did 100 tokens in 1 s and then rested for 9, the other the other way round: 20/s, not 200."""
    steps = [(0, 0, 0), (1, 100, 0), (9, 100, 0), (10, 100, 100)]
    points = [p for at, a, b in steps for p in (point(0, at, a), point(1, at, 0, b))]
    progress = Progress()
    for frame in frames(points, 2)[0]:
        progress.add(frame)
    assert (progress.prompt, progress.generated, progress.wall_s) == (100, 100, 10)
    assert progress.busy_s == 2


def test_a_restart_breaks_the_progress() -> None:
    """Between the last frame of one run and the first of the next nothing is counted, not even time."""
    points = [point(0, 0, 0), point(1, 0, 0), point(0, 1, 50), point(1, 1, 7)]
    points += [point(0, 5, 50, run=2), point(1, 5, 99), point(0, 6, 60, run=2), point(1, 6, 100)]
    progress = Progress()
    for frame in frames(points, 2)[0]:
        progress.add(frame)
    assert (progress.prompt, progress.wall_s) == (57 + 11, 2)
    assert progress.broken == [(1, 5)]


def test_difference_is_of_the_frames_own_points() -> None:
    before, after = (Frame((point(0, at, 3 * at), point(1, at, 0, 5 * at))) for at in (2, 6))
    step = difference(before, after)
    assert (step.wall_s, step.prompt, step.generated) == (4, 12, 20)


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_engine_stamps_are_mapped_within_their_error(seed: int) -> None:
    """Whatever the offset and however slow the answers, the true time lies within the error that is told."""
    rng = random.Random(seed)
    offset, clock, now = rng.uniform(-1e5, 1e5), ClockMap(), 100.0
    for _ in range(30):
        asked = now
        said = asked + rng.uniform(0, 0.2)
        now = said + rng.uniform(0, 0.2)
        clock.observe(asked, now, round((said - offset) * 1e6))
        at, error = clock.ours(round((said - offset) * 1e6))
        assert abs(at - said) <= error + 2e-6
        now += rng.uniform(0, 1)
    assert error < 0.2


def test_clocks_that_drift_apart_are_laid_anew() -> None:
    """Bounds that no longer meet are forgotten, instead of keeping an old offset for ever."""
    clock = ClockMap()
    clock.observe(10.0, 10.002, 10_000_000)
    clock.observe(20.0, 20.002, 25_000_000)
    at, error = clock.ours(25_000_000)
    assert abs(at - 20.001) <= error <= 0.0011
    with pytest.raises(ValueError, match="no answer"):
        ClockMap().ours(1)
