"""Honest Retry-After: the measured rate, a place for each, and bounds."""

import pytest
from admission_kit import Scene
from hypothesis import given
from hypothesis import strategies as st

from proxy.admission.retry import RETRY_MAX_S, RETRY_MIN_S, Turnover


def test_wait_follows_the_measured_rate():
    """Four slots that turn over every 8 s serve one request each 2 s: five before you are 10 s."""
    turnover = Turnover()
    for _ in range(50):
        turnover.served(8.0, 1)
    assert turnover.retry_after_s(100.0, queued=5, slots=4) == pytest.approx(10.0)
    assert turnover.retry_after_s(100.0, queued=5, slots=4) == pytest.approx(12.0)
    assert turnover.retry_after_s(101.0, queued=5, slots=4) == pytest.approx(13.0)
    assert turnover.retry_after_s(200.0, queued=1, slots=4) == pytest.approx(2.0)


def test_requests_of_several_slots_weigh_more():
    one, four = Turnover(), Turnover()
    one.served(2.0, 1)
    four.served(2.0, 4)
    assert four.retry_after_s(0.0, 4, 4) == pytest.approx(4 * one.retry_after_s(0.0, 4, 4))


def test_overload_does_not_poison_the_time_after_it():
    turnover = Turnover()
    turnover.served(40.0, 1)
    for _ in range(1000):
        turnover.retry_after_s(0.0, 250, 1)
    turnover.mean_s = 1.0
    assert turnover.retry_after_s(70.0, 3, 1) == pytest.approx(3.0)


@given(
    mean=st.none() | st.floats(0.0, 1e4),
    calls=st.lists(
        st.tuples(st.floats(0, 30), st.integers(0, 500), st.integers(0, 64)), min_size=1, max_size=60
    ),
)
def test_always_between_one_and_sixty_seconds_and_never_the_same_moment(mean, calls):
    turnover = Turnover(mean_s=mean)
    now = 0.0
    for passed, queued, slots in calls:
        now += passed
        first = turnover.retry_after_s(now, queued, slots)
        second = turnover.retry_after_s(now, queued, slots)
        assert RETRY_MIN_S <= first <= RETRY_MAX_S
        assert RETRY_MIN_S <= second <= RETRY_MAX_S
        assert first != second


def test_only_completed_requests_are_measured():
    """Who leaves early says nothing about how long an answer takes."""
    s = Scene(max_queue=0).ready(slots=1).arrive("a").wait(1).release("a").arrive("b").leave("b")
    assert s.state.rooms["m"].turnover.mean_s == pytest.approx(1.0)
    s = Scene().ready(slots=1).arrive("a").wait(1)
    s.cancel("a").release("a")
    assert s.state.rooms["m"].turnover.mean_s is None
