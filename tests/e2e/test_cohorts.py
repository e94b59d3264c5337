"""Cohorts on the real engine under the proxy's load: full ones, without holding up who is alone."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream
from tests.e2e.conftest import ROOM
from tests.e2e.fleetload import Crowd, ask, cohort_sizes, completion, engine_events, mean
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine

SLOTS = 4
LENGTHS = (80, 200, 320, 640)
"""Far enough apart for the heir of one to be there before the next one ends."""


@pytest.fixture
def fleet(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> Callable[..., Proxy]:
    """Start a proxy with one slow model of four slots under `drain`; keywords go into `admission`."""

    def inner(**admission: Any) -> Proxy:
        args = ["-t", "1", "-np", str(SLOTS), *ROOM]
        model = {"path": str(zoo("llama-mid")), "args": args, "phase_policy": "drain"}
        return start({"models": {"m": model}, "admission": admission})

    return inner


def run(proxy: Proxy, lengths: list[int]) -> list[int]:
    """Post requests of these lengths while a slot decodes; return the sizes of the cohorts they formed."""
    first = RawStream(proxy.url, "/v1/completions", completion("the first", 8000))
    until("it decodes", lambda: any(e["event"] == "open" for e in _events(proxy)))
    before = _events(proxy)[-1]["seq"]
    crowd = Crowd()
    for number, tokens in enumerate(lengths):
        crowd.run(partial(ask, proxy, completion(f"request number {number}", tokens)))
    until("all came in while it decoded", lambda: _known(proxy) == len(lengths) + 1)
    assert not any(e["event"] == "idle" for e in engine_events(proxy, before)), (
        "the first one ended too early"
    )
    first.close()
    answers = crowd.join()
    assert all(answer.ok for answer in answers), [a.error for a in answers if not a.ok][:3]
    return cohort_sizes(engine_events(proxy, before))


def _events(proxy: Proxy) -> list[dict[str, Any]]:
    if proxy.get("/api/models/m")["state"] != "ready":
        return []
    return engine_events(proxy)


def _known(proxy: Proxy) -> int:
    view = proxy.get("/api/models/m")["admission"]
    return int(view["queued"] + view["running"])


def test_requests_of_four_lengths_fill_every_cohort(fleet: Callable[..., Proxy]) -> None:
    """With the standby, a cohort of unequal answers is full when it starts; without it most are not.

    The first cohort is the long request's, which leaves when all are there; the last takes what is left: both do
    not count.
    """
    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(16)]
    for _ in range(3):
        # one delay on the machine is one cohort that is not full
        staged = run(fleet(), lengths)
        assert sum(staged) == 16
        if mean(staged[:-1]) >= 3.9:
            break
    assert mean(staged[:-1]) >= 3.9, staged
    plain = run(fleet(native_standby=False), lengths)
    assert sum(plain) == 16
    print(f"cohort sizes with standby {staged}, without {plain}")
    assert len(plain) >= len(staged)


def test_equal_answers_fill_their_cohorts_by_the_gather_hint(fleet: Callable[..., Proxy]) -> None:
    """When all members end in one step, the hint keeps the door open for the time their heirs need.

    That is a few ms, and more on a machine that does something else: the next test is about the default.
    """
    gathered = run(fleet(cohort_gather_ms=500), [40] * 64)
    assert sum(gathered) == 64
    assert mean(gathered[:-1]) >= 3.8, gathered
    hasty = run(fleet(cohort_gather_ms=0), [40] * 64)
    # how full they are without it is a matter of luck
    assert sum(hasty) == 64 and max(hasty) <= SLOTS
    print(f"mean size with the hint {mean(gathered[:-1]):.2f}, without {mean(hasty[:-1]):.2f}")


@pytest.mark.soak
def test_equal_answers_fill_nearly_every_cohort(fleet: Callable[..., Proxy]) -> None:
    """The same by its number, which needs a machine that does nothing else: 20 ms must be enough for four requests."""
    gathered = run(fleet(), [40] * 64)
    assert mean(gathered[:-1]) >= 3.8, gathered


def test_a_lone_request_waits_for_nobody(fleet: Callable[..., Proxy]) -> None:
    """Nothing is gathered for one who is alone: its time in the engine's queue is nothing."""
    proxy = fleet(cohort_gather_ms=1000)
    body = completion("alone", 8)
    assert ask(proxy, body).ok
    waits = []
    for _ in range(9):
        before = _events(proxy)[-1]["seq"]
        assert ask(proxy, body).ok
        admitted = [e for e in engine_events(proxy, before) if e["event"] == "admit"]
        waits.append((admitted[-1]["t_us"] - admitted[0]["t_us"]) / 1e6)
    # the hint would make it a second
    assert statistics.median(waits) < 0.2, waits
