"""Open loops on the real engine: clients come when they come, whether or not others were answered.

Long, and of use only on a machine that does nothing else: `pytest -m soak tests/e2e/test_open_loop.py -s`.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.fleetload import Answer, Crowd, ask, completion, mean
from tests.e2e.harness import Proxy

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(1800)]

MINUTE_S = 60.0
SLO_S = 15.0
"""From when a request is sent to its first token. Who comes back when told sends a request of its own."""
BURST = 24
WORDS = "the old lamp by the mill burns all night long while wind and rain go over the river".split()  # noqa: SIM905


@pytest.fixture
def fleet(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> Callable[..., Proxy]:
    """Start a proxy with one slow model of four slots under `drain`; keywords go into `admission`."""

    def inner(**admission: Any) -> Proxy:
        args = ["-t", "1", "-np", "4", "-c", "16384", "-b", "512"]
        model = {"path": str(zoo("llama-mid")), "args": args, "phase_policy": "drain"}
        return start({"models": {"m": model}, "admission": admission})

    return inner


@dataclass(slots=True)
class Client:
    """One client of an open loop: when it came, what it was told, what it got."""

    due_s: float
    body: dict[str, Any]
    name: str
    answers: list[Answer] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    @property
    def last(self) -> Answer:
        """Its last answer."""
        return self.answers[-1]

    @property
    def refused(self) -> bool:
        """Whether it was turned away at its first try."""
        return self.answers[0].status == 429

    def second_s(self) -> float:
        """Seconds from when it was due to its second token."""
        return self.last.second_at - self.sent[0]


def text(chance: random.Random, tokens: int) -> str:
    """Return words that are about this many tokens."""
    return " ".join(chance.choice(WORDS) for _ in range(max(1, round(tokens / 1.6))))


def talk(chance: random.Random) -> dict[str, Any]:
    """A request of some seconds: the clients, on the same machine, must not be what is measured."""
    return completion(text(chance, chance.randint(40, 240)), chance.randint(64, 192))


def code(chance: random.Random) -> dict[str, Any]:
    """Lengths as in code completion (Azure 2023 trace, lognormal fit), cut to this model's context."""
    prompt = min(3000, max(8, round(chance.lognormvariate(6.999, 1.360))))
    output = min(200, max(2, round(chance.lognormvariate(2.788, 0.847))))
    return completion(text(chance, prompt), output)


def capacity(proxy: Proxy, make: Callable[[random.Random], dict[str, Any]], seed: int) -> float:
    """Return requests per second with everybody there at once: the best of three, after one to warm up."""
    chance = random.Random(seed)
    assert ask(proxy, completion("warm", 4)).ok
    best = 0.0
    for _ in range(3):
        crowd = Crowd()
        began = time.monotonic()
        for _ in range(BURST):
            crowd.run(partial(ask, proxy, make(chance)))
        answers = crowd.join(600)
        assert all(answer.ok for answer in answers)
        best = max(best, BURST / (max(a.ended_at for a in answers) - began))
    return best


def arrivals(
    seed: int,
    rate: float,
    parts: Iterable[tuple[float, float]],
    make: Callable[[random.Random], dict[str, Any]],
) -> list[Client]:
    """Poisson arrivals, part after part: so many seconds at so many times `rate`."""
    chance = random.Random(seed)
    found: list[Client] = []
    start_s = 0.0
    for length_s, factor in parts:
        at = start_s
        while (at := at + chance.expovariate(rate * factor)) < start_s + length_s:
            found.append(Client(at, make(chance), f"c{seed}-{len(found)}"))
        start_s += length_s
    return found


def play(proxy: Proxy, clients: list[Client], seed: int) -> float:
    """Let all come when they are due; who is refused comes back once, as told and up to 10 % late.

    Returns the monotonic start.
    """
    chance = random.Random(-seed)
    late = {client.name: chance.uniform(1.0, 1.1) for client in clients}
    began = time.monotonic()

    def live(client: Client) -> Answer:
        headers = {"x-request-id": client.name}
        client.sent.append(began + client.due_s)
        client.answers.append(ask(proxy, client.body, headers))
        if client.refused:
            back_s = float(client.last.headers["retry-after"]) * late[client.name]
            client.sent.append(time.monotonic() + back_s)
            threading.Event().wait(back_s)
            client.answers.append(ask(proxy, client.body, headers))
        return client.last

    crowd = Crowd()
    for client in clients:
        threading.Event().wait(max(0.0, began + client.due_s - time.monotonic()))
        crowd.run(partial(live, client))
    crowd.join(600)
    return began


def goodput(clients: Iterable[Client], began: float) -> float:
    """Tokens per second of the first minute: of requests that ended in it and had not waited too long."""
    tokens = sum(
        answer.tokens
        for client in clients
        for sent, answer in zip(client.sent, client.answers, strict=True)
        if answer.ok and answer.ended_at <= began + MINUTE_S and answer.first_at - sent <= SLO_S
    )
    return tokens / MINUTE_S


def test_overload_is_refused_and_comes_back(fleet: Callable[..., Proxy]) -> None:
    """A minute at twice the capacity, a minute at 0.8 of it, beside a minute at just the capacity."""
    rate = capacity(fleet(max_queue=0), talk, 1)
    # what a full queue takes must leave time for the cohort before it
    proxy = fleet(max_queue=round(rate * SLO_S / 2))
    once = arrivals(2, rate, ((MINUTE_S, 1.0),), talk)
    good_once = goodput(once, play(proxy, once, 2))
    twice = arrivals(3, rate, ((MINUTE_S, 2.0), (MINUTE_S, 0.8)), talk)
    good_twice = goodput(twice, play(proxy, twice, 3))
    refused = [client for client in twice if client.refused]
    back = sum(client.last.ok for client in refused)
    print(
        f"capacity {rate:.2f}/s; in time: {good_twice:.0f} tokens/s at 2x, {good_once:.0f} at 1x; "
        f"{len(refused)} of {len(twice)} refused, {back} served when they came back"
    )
    assert len(refused) > 20
    assert good_twice >= 0.9 * good_once
    assert back >= 0.8 * len(refused)


def test_shaping_shortens_the_mean_wait(fleet: Callable[..., Proxy]) -> None:
    """Code lengths at 70 % load: mean time to the second token, with and without, turn about."""
    plain, shaped = fleet(), fleet(cohort_shape=True, cohort_shape_max_wait_s=60)
    rate = 0.7 * capacity(plain, code, 4)
    means: dict[str, list[float]] = {"by arrival": [], "shaped": []}
    capacity(shaped, code, 4)  # what it learns from, as the other one did
    for seed in (5, 6):
        for name, proxy in (("by arrival", plain), ("shaped", shaped)):
            clients = arrivals(seed, rate, ((2 * MINUTE_S, 1.0),), code)
            play(proxy, clients, seed)
            assert all(client.last.ok for client in clients)
            means[name].append(mean(c.second_s() for c in clients if c.last.second_at))
    gain = 1 - math.fsum(means["shaped"]) / math.fsum(means["by arrival"])
    print(f"{rate:.2f} requests/s; mean time to second token {means}; shorter by {gain:.0%}")
    assert gain > 0
