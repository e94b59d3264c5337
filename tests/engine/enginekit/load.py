"""A random load, the same for the same seed: lengths, families, adapters, cancels, endpoints."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.engine.enginekit.http import Exchange
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import Server

ALLOWED_STATUS = frozenset({200})


@dataclass(slots=True)
class Report:
    """What became of a load: how many were sent, how many had each outcome, and the failures in words."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def _request(rng: random.Random, number: int, *, adapters: int) -> tuple[str, dict[str, Any]]:
    """Return path and body of one random request."""
    count = rng.choice((1, 3, 10, 40, 120, 300))
    if rng.random() < 0.08:
        texts = [words(rng.randint(1, 30), number + i) for i in range(rng.choice((1, 2, 9)))]
        return "/embeddings", {"content": texts}
    body: dict[str, Any] = {
        "n_predict": rng.choice((1, 2, 5, 20, 60)),
        "stream": rng.random() < 0.6,
        "cache_prompt": rng.random() < 0.5,
        "temperature": rng.choice((0, 0.8)),
        "seed": number,
        "ignore_eos": rng.random() < 0.8,
    }
    if rng.random() < 0.1:
        size = rng.randint(2, 3)
        body["prompt"] = [words(rng.choice((2, 50)), number + i) for i in range(size)]
    else:
        # prompts repeat, so that slots are reused by prefix
        body["prompt"] = words(count, number % 23)
    if rng.random() < 0.12:
        body["n_cmpl"] = rng.randint(2, 3)
    elif rng.random() < 0.05:
        body["id_slot"] = rng.randrange(4)
    if adapters and rng.random() < 0.4:
        body["lora"] = [{"id": i, "scale": rng.choice((0, 0.5, 1))} for i in range(adapters)]
    if body["stream"] and rng.random() < 0.5:
        body["return_progress"] = True
    if rng.random() < 0.1:
        body["n_probs"] = 2
    return "/completion", body


def run_load(
    server: Server,
    seed: int,
    count: int,
    *,
    adapters: int = 0,
    in_flight: int = 9,
    leave: float = 0.25,
    request_timeout_s: float = 240.0,
    go_on: Callable[[Report], bool] = lambda _: True,
) -> Report:
    """Run ``count`` requests, up to ``in_flight`` at once; a share of the clients leaves early.

    Every request ends in exactly one outcome within ``request_timeout_s``, or it is a failure. Before each one ``go_on`` sees what
    became of the others so far; once it says no, nothing more is sent.
    """
    rng = random.Random(seed)
    report = Report()
    running: list[tuple[Exchange, float | None, str]] = []
    for number in range(count):
        if not go_on(report):
            break
        path, body = _request(rng, number, adapters=adapters)
        headers = {}
        if rng.random() < 0.2:
            headers["x_phase_gather_ms"] = str(rng.choice((0, 5, 20)))
        leaves_at, leave_after = None, None
        if rng.random() < leave:
            # a stream by what it has got, on a machine of any speed; of others only the time is known
            if body.get("stream"):
                leave_after = 1 + int(rng.expovariate(0.25))
            else:
                leaves_at = time.monotonic() + (rng.expovariate(8) if rng.random() < 0.5 else 0.0)
        exchange = server.start(body, tag=f"load{number}", path=path, leave_after=leave_after, **headers)
        running.append((exchange, leaves_at, f"request {number} of seed {seed}: {path} {body}"))
        report.sent += 1
        while len(running) >= in_flight:
            running = _settle(server, running, report, request_timeout_s)
    while running:
        running = _settle(server, running, report, request_timeout_s)
    return report


def _settle(
    server: Server,
    running: list[tuple[Exchange, float | None, str]],
    report: Report,
    timeout_s: float,
) -> list[tuple[Exchange, float | None, str]]:
    """Cut those that leave, book those that ended, and return the rest."""
    left = []
    for exchange, leaves_at, what in running:
        if exchange.done and exchange.cut:
            report.outcomes["left"] += 1
        elif exchange.done:
            _book(exchange, what, report)
        elif leaves_at is not None and time.monotonic() >= leaves_at:
            exchange.close()
            report.outcomes["left"] += 1
        elif time.monotonic() - exchange.sent_at_s > timeout_s:
            exchange.close()
            report.failures.append(f"no end within {timeout_s} s: {what}")
        else:
            left.append((exchange, leaves_at, what))
    if len(left) == len(running):
        server.assert_alive()
        running[0][0].wait_done(0.02)
    return left


def _book(exchange: Exchange, what: str, report: Report) -> None:
    if exchange.status in ALLOWED_STATUS and exchange.error is None:
        report.outcomes["completed"] += 1
        return
    report.failures.append(f"{what[:300]}: {exchange.describe()}")
