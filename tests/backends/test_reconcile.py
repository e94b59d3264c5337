"""What reconcile makes of one look, and of two."""

import pytest

from proxy.backends.ports import LiveRequests
from proxy.backends.reconcile import Facts, Odd, differences, persistent
from proxy.types import ModelState, SlotView

R = ModelState.READY
ONE = LiveRequests((), ("a",), frozenset({"a.1"}))
BUSY = SlotView(0, True, 1, tag="a.1")


@pytest.mark.parametrize(
    ("facts", "odd"),
    [
        (Facts(R, ONE, 1, pid=5, slots=(BUSY,), bearers=frozenset({5}), family=frozenset({5})), []),
        (Facts(R, LiveRequests(), 0, slots=(SlotView(0, False),)), []),
        (Facts(ModelState.UNLOADED, LiveRequests(("w",)), 0), []),
        # granted, its exchange not open yet
        (Facts(R, ONE, 0, slots=()), []),
        (Facts(R, ONE, 1, pid=5, pid_alive=False), [Odd.PROCESS_GONE]),
        (Facts(ModelState.UNLOADED, ONE, 0), [Odd.UNANSWERED_REQUEST]),
        (Facts(R, ONE, 2), [Odd.LOST_EXCHANGE]),
        (Facts(R, ONE, 1, slots=(SlotView(0, True, 1, tag="z.1"),)), [Odd.UNKNOWN_SLOT]),
        (Facts(R, LiveRequests((), ("a",)), 1, slots=(SlotView(0, True, 1, tag="z.1"),)), []),
        (Facts(R, LiveRequests(), 0, slots=(SlotView(0, True, 1),)), [Odd.UNKNOWN_SLOT]),
        (Facts(R, ONE, 1, foreign=2), [Odd.FOREIGN_CONNECTION]),
        (Facts(R, ONE, 1, bearers=frozenset({5, 6}), family=frozenset({5})), [Odd.STRAY_PROCESS]),
        (Facts(R, ONE, 1, stale=frozenset({"f" * 32})), [Odd.STALE_RECORD]),
        (Facts(R, ONE, 1, books=("a is charged twice",)), [Odd.BOOKS]),
    ],
)
def test_one_look(facts, odd):
    assert [found.odd for found in differences(facts)] == odd
    assert all(found.words and found.subject for found in differences(facts))


def test_only_what_both_looks_show_counts():
    first = differences(Facts(R, ONE, 3, foreign=1))
    second = differences(Facts(R, ONE, 2))
    assert [found.odd for found in persistent(first, second)] == [Odd.LOST_EXCHANGE]
    assert persistent((), second) == () and persistent(first, ()) == ()
