"""The request metrics agree with what happened, while it happens."""

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from proxy.metrics import Metrics
from proxy.types import AdminState, Reason

from .test_forward import CHAT, chat
from .world import house, settings, until

KEYS = {
    "api_keys": [{"name": "alice", "key": "ka"}, {"name": "bob", "key": "kb", "class": "batch"}],
    "admin_keys": [{"name": "ops", "key": "adm"}],
}


async def test_a_wait_is_counted_while_it_lasts_and_once():
    """Scrapes in the middle of a hold see it grow; after its end the sum is the wait."""
    async with house(slots=1, auto=False) as h, aiohttp.ClientSession(h.base) as client:
        post = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: h.live() == 1)

        def held(reason=Reason.MODEL_LOADING):
            h.metrics.refresh()
            return h.sample("hold_seconds_total", model="demo", reason=reason.value)

        await until(lambda: held() > 0.1)
        first = held()
        await until(lambda: held() > first + 0.1)
        h.admission.set_gate("demo", AdminState.BLOCKED, "maintenance")
        loading = held()
        await until(lambda: held(Reason.GATE_BLOCKED) > 0.1)
        assert held() == loading
        h.admission.set_gate("demo", AdminState.ENABLED)
        h.ready("demo")
        async with await post as answer:
            waited = int(answer.headers["x-queue-wait-ms"]) / 1000
        total = sum(held(reason) for reason in Reason)
        assert total == pytest.approx(waited, abs=0.05)
        await until(lambda: h.live() == 0)
        assert sum(held(reason) for reason in Reason) == total


async def test_the_queue_is_seen_by_class():
    async with house(settings(server=KEYS), auto=False) as h, aiohttp.ClientSession(h.base) as client:
        posts = [
            asyncio.ensure_future(client.post(CHAT, json=chat(), headers={"Authorization": f"Bearer {key}"}))
            for key in ("ka", "kb", "kb")
        ]
        await until(lambda: h.live() == 3)
        await until(lambda: h.metrics.refresh() or h.sample("queue_oldest_seconds", model="demo", priority="batch") > 0.05)  # fmt: skip
        assert h.sample("queue_size", model="demo", priority="normal") == 1
        assert h.sample("queue_size", model="demo", priority="batch") == 2
        assert h.sample("queue_bytes", model="demo", priority="batch") > 100
        assert h.sample("requests_inflight", model="demo", state="queued") == 3
        h.ready("demo")
        for post in posts:
            (await post).close()
        await until(lambda: h.live() == 0)
        h.metrics.refresh()
        assert h.sample("queue_size", model="demo", priority="batch") == 0
        for priority, count in (("normal", 1), ("batch", 2)):
            assert h.sample("queue_wait_seconds_count", model="demo", priority=priority, outcome="completed") == count  # fmt: skip
        assert h.sample("overhead_seconds_count", stage="connect") == 3


async def test_shares_are_shown_by_configured_names_alone():
    """A named key has its counter; addresses are `other`."""
    async with house(settings(server=KEYS)) as h, aiohttp.ClientSession(h.base) as client:
        h.metrics.refresh()
        assert h.sample("key_virtual_counter", key="alice") == 0
        async with client.post(
            CHAT, json=chat(True, tokens=100_000, pace_ms=2), headers={"Authorization": "Bearer ka"}
        ) as answer:
            await answer.content.readuntil(b"t20")
            await until(lambda: h.metrics.refresh() or h.sample("key_virtual_counter", key="alice") > 0)
        await until(lambda: h.live() == 0)
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat()) as answer:
            await answer.read()
        h.metrics.refresh()
        assert set(re.findall(rb'key_virtual_counter\{key="([^"]*)"', h.metrics.text())) == {b"other"}


async def test_draft_tokens_are_counted_from_timings(monkeypatch):
    from . import paced

    monkeypatch.setattr(paced, "TIMINGS", {**paced.TIMINGS, "draft_n": 8, "draft_n_accepted": 5})
    async with house(settings(server=KEYS)) as h, aiohttp.ClientSession(h.base) as client:
        for stream in (True, False):
            async with client.post(CHAT, json=chat(stream), headers={"Authorization": "Bearer ka"}) as answer:
                await answer.read()
        await until(lambda: h.live() == 0)
        assert h.sample("draft_tokens_total", model="demo", key="alice") == 16
        assert h.sample("draft_accepted_tokens_total", model="demo", key="alice") == 10


def test_the_users_page_names_metrics_that_exist():
    names = {metric.name for metric in Metrics().registry.collect()}
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    table = page.partition("## Metrics")[2].partition("## ")[0]
    for name in re.findall(r"`([a-z_]+)(?:\{[^`]*\})?`", table):
        if name.endswith("_"):
            continue
        assert "llama_proxy_" + name.removesuffix("_total") in names, name
