"""How fast a full proxy says no: posts that find a full queue, one after the other over kept connections.

    python -m tests.http.refusals [COUNT]

prints the percentiles in milliseconds, with the queue as full as it is meant to be.
"""

import asyncio
import statistics
import sys
import time

import aiohttp

from proxy import logs

from .test_forward import CHAT, chat
from .world import house, settings, until

QUEUE = 256


async def measure(count: int = 500) -> tuple[list[float], float]:
    """Return the milliseconds of `count` refusals by a proxy with `QUEUE` requests waiting, and the mean
    of processor milliseconds, of client and engine, too: they share the process."""
    configured = settings(admission={"max_queue": QUEUE, "keepalive_s": 0})
    times = []
    async with house(configured, slots=1) as h:
        async with aiohttp.ClientSession(h.base, connector=aiohttp.TCPConnector(limit=0)) as client:
            held = [await client.post(CHAT, json=chat(True, tokens=10_000_000, pace_ms=200))]
            waiting = [asyncio.ensure_future(client.post(CHAT, json=chat())) for _ in range(QUEUE)]
            await until(lambda: h.live() == QUEUE + 1, 60)
            spent = time.process_time()
            for _ in range(count):
                began = time.perf_counter()
                async with client.post(CHAT, json=chat()) as answer:
                    await answer.read()
                    times.append((time.perf_counter() - began) * 1000)
                    if answer.status != 429 or not 1 <= float(answer.headers["Retry-After"]) <= 60:
                        raise AssertionError(f"{answer.status} {await answer.text()}")
            spent = (time.process_time() - spent) * 1000 / count
            for task in waiting:
                task.cancel()
            held[0].close()
            await asyncio.gather(*waiting, return_exceptions=True)
    return times, spent


def told(times: list[float], spent: float) -> str:
    """Return the numbers as text."""
    cuts = statistics.quantiles(times, n=100)
    p50, p90, p99 = cuts[49], cuts[89], cuts[98]
    return f"{len(times)} refusals: p50 {p50:.2f} ms, p90 {p90:.2f} ms, p99 {p99:.2f} ms, {spent:.2f} ms of processor time each"


if __name__ == "__main__":
    logs.configure("error", "json")
    print(told(*asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 500))))
