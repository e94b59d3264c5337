"""Five keys on the real engine, all of them backlogged: each is served the same, whatever one of them asks for."""

import asyncio
import random
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.harness import Proxy
from tests.support.wait import until_async

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

POLITE = ("k1", "k2", "k3", "k4")
POSTED, SERVED, FLOOD = 50, 40, 10
DECODE_WEIGHT = 2.0
ADMIN = {"Authorization": "Bearer adm"}
WORDS = "the old lamp by the mill burns all night long while wind and rain go over the river".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Done:
    """One answer, in the order in which they came: whose, and what it took."""

    key: str
    tokens: float


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """Each client takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"needs a hard limit of 4096 open files, here it is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096) if soft > 0 else soft, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def fleet(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> Callable[..., Proxy]:
    """A proxy with five keys and a fast model of four slots under `drain`; keywords go into `admission`."""

    def inner(**admission: Any) -> Proxy:
        keys = [{"name": name, "key": f"key-{name}"} for name in (*POLITE, "flood")]
        args = ["-t", "1", "-np", "4", "-c", "8192"]
        return start(
            {
                "server": {"api_keys": keys, "admin_keys": [{"name": "ops", "key": "adm"}]},
                "admission": {"max_queue": 2000, "age_after_s": 0, **admission},
                "models": {"m": {"path": str(zoo("llama")), "args": args, "phase_policy": "drain"}},
            }
        )

    return inner


async def served(proxy: Proxy, flood: int, seed: int) -> list[Done]:
    """Let all wait behind a gate, open it, and return the answers in their order until each key has enough."""
    chance = random.Random(seed)
    asks = [key for key in POLITE for _ in range(POSTED)] + ["flood"] * (POSTED * flood)
    chance.shuffle(asks)
    done: list[Done] = []

    async def one(client: aiohttp.ClientSession, key: str) -> None:
        words = " ".join(chance.choice(WORDS) for _ in range(chance.randint(5, 60)))
        body = {"model": "m", "prompt": words, "max_tokens": chance.randint(8, 40), "ignore_eos": True}
        headers = {"Authorization": f"Bearer key-{key}"}
        async with client.post("/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        read = usage["prompt_tokens"] - cached
        done.append(Done(key, read + DECODE_WEIGHT * usage["completion_tokens"]))

    async def queued() -> bool:
        view = await asyncio.to_thread(proxy.get, "/api/models/m", 10.0, ADMIN)
        return bool(view["admission"]["queued"] == len(asks))

    async def gate(**order: str) -> None:
        status, told = await asyncio.to_thread(proxy.post, "/api/models/m/gate", order, 10.0, ADMIN)
        assert status == 200, told

    await gate(state="blocked", reason="all shall be there", mode="hold")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(proxy.url, connector=connector, timeout=aiohttp.ClientTimeout(600)) as c:
        tasks = [asyncio.ensure_future(one(c, key)) for key in asks]
        await until_async("all wait", queued, 120)
        await gate(state="open")
        while any(_count(done, key) < SERVED for key in {*POLITE, "flood"}):
            finished, _ = await asyncio.wait(tasks, timeout=120, return_when=asyncio.FIRST_COMPLETED)
            assert finished, "nothing was answered for two minutes"
            for task in finished:
                task.result()
                tasks.remove(task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done


def _count(done: list[Done], key: str) -> int:
    return sum(one.key == key for one in done)


def tokens(done: list[Done]) -> Mapping[str, float]:
    return {key: sum(one.tokens for one in done if one.key == key) for key in (*POLITE, "flood")}


def jain(values: Mapping[str, float]) -> float:
    """Jain's index: 1 when all have the same, 1/n when one has all."""
    return sum(values.values()) ** 2 / (len(values) * sum(value**2 for value in values.values()))


def polite_p95(done: list[Done]) -> int:
    """How many answers were given before the polite keys' own, in 95 of 100 cases at most."""
    places: list[int] = []
    for key in POLITE:
        places += [place for place, one in enumerate(done) if one.key == key][:SERVED]
    return sorted(places)[int(0.95 * len(places))]


def test_a_flood_takes_no_more_than_its_share(fleet: Callable[..., Proxy]) -> None:
    """One key asks for ten times as much: all are served the same weighted tokens, the others' waits (in answers
    given before theirs) are those of a run in which it is as polite as they are; by arrival it takes nearly all."""
    fair = asyncio.run(served(fleet(), FLOOD, 1))
    polite = asyncio.run(served(fleet(), 1, 1))
    arrival = asyncio.run(served(fleet(fair_share=False), FLOOD, 1))[: len(fair)]
    shares, plain = tokens(fair), tokens(arrival)
    print(f"fair {jain(shares):.4f} {shares}; by arrival {jain(plain):.4f} {plain}")
    print(f"p95 place: {polite_p95(fair)}; with five polite keys {polite_p95(polite)}")
    assert min(_count(fair, key) for key in shares) >= SERVED
    assert jain(shares) >= 0.95
    assert polite_p95(fair) <= 1.25 * polite_p95(polite)
    assert jain(plain) < 0.6, "arrival order would have done as well"
