"""Seeded random operators against random clients, over HTTP: one outcome per request, an end per job, nothing left."""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import model
from tests.e2e.harness import Proxy
from tests.support.processes import alive
from tests.support.wait import until

pytestmark = pytest.mark.engine

NAMES = ("a", "b")
GRACE_S = 1.0
BUSY_S = 5.0
"""What a machine that does much else may add: the bound itself is shown by the tests of single forces."""
AT_ONCE = 24
"""Requests alive at a time: enough to fill both models' slots and queues."""
KNOWN = {
    *("completed", "model_unloaded", "gate_blocked", "model_draining", "upstream_error", "upstream_wedged"),
    *("cancelled_by_operator", "load_timeout", "model_load_failed", "no_backend", "torn"),
}
WEIGHTS = {
    "load": 6,
    "unload": 4,
    "force": 4,
    "gate": 6,
    "lease": 3,
    "cancel": 4,
    "kill": 2,
    "reconcile": 1,
    "look": 2,
}


class Storm:
    """What is going on: clients, orders, and what became of them."""

    def __init__(self, proxy: Proxy, session: aiohttp.ClientSession, seed: int) -> None:
        self.proxy, self.session, self.rng = proxy, session, random.Random(seed)
        self.clients: list[asyncio.Task[str]] = []
        self.orders: list[asyncio.Task[None]] = []
        self.leases: list[str] = []
        self.pids: set[int] = set()
        self.done: Counter[str] = Counter()

    async def run(self, actions: int) -> Counter[str]:
        """Give `actions` orders among traffic, calm down, and return how the requests ended."""
        for _ in range(actions):
            kind = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            self.done[kind] += 1
            order: Callable[[str], Awaitable[None]] = getattr(self, kind)
            self.orders.append(asyncio.ensure_future(order(self.rng.choice(NAMES))))
            for _ in range(self.rng.randrange(3)):
                self.traffic()
            await asyncio.sleep(self.rng.random() * 0.06)
        await asyncio.wait_for(asyncio.gather(*self.orders), 120)
        for job in (await self.ask("GET", "/api/jobs"))[1]["jobs"]:
            status, ended = await self.ask("GET", f"/api/jobs/{job['id']}?wait=60")
            assert status == 404 or ended["ended"], ended
        # an unload may have left a gate blocked
        assert (await self.ask("POST", "/api/gate", {"state": "open"}))[0] == 200
        return Counter(await asyncio.wait_for(asyncio.gather(*self.clients), 180))

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        sent = (body or {}) if method == "POST" else None
        async with self.session.request(method, path, json=sent) as answer:
            return answer.status, await answer.json()

    def traffic(self) -> None:
        if sum(not client.done() for client in self.clients) < AT_ONCE:
            body = {
                "model": self.rng.choice(NAMES),
                "prompt": "a",
                "ignore_eos": True,
                "max_tokens": self.rng.choice([3, 20, 400]),
                "stream": self.rng.random() < 0.6,
            }
            self.clients.append(asyncio.ensure_future(self.client(body, f"c{len(self.clients)}")))

    async def client(self, body: dict[str, Any], name: str) -> str:
        """Return the one outcome of a request: `completed`, or the code of its one error."""
        async with self.session.post("/v1/completions", json=body, headers={"x-request-id": name}) as answer:
            try:
                raw = await answer.read()
            except aiohttp.ClientError:
                # once the head of a plain answer is sent there is no other way to tell that the engine was killed
                assert not answer.content_type.startswith("text/event-stream")
                return "torn"
            if not answer.content_type.startswith("text/event-stream"):
                found = json.loads(raw)
                return str(found["error"]["code"]) if "error" in found else "completed"
            events = [block for block in raw.decode().split("\n\n") if "data: " in block]
            errors = [block for block in events if '"error"' in block]
            ended = events[-1].endswith("data: [DONE]")
            assert len(errors) == (0 if ended else 1), events[-3:]
            return "completed" if ended else str(json.loads(errors[0].split("data: ", 1)[1])["error"]["code"])

    # --- orders -------------------------------------------------------------------------------------

    async def load(self, name: str) -> None:
        status, answer = await self.ask("POST", f"/api/models/{name}/load")
        assert "job" in answer, (status, answer)

    async def unload(self, name: str) -> None:
        order = {"deadline_s": self.rng.random(), "then": self.rng.choice(["open", "block"])}
        status, answer = await self.ask("POST", f"/api/models/{name}/unload", order)
        assert "job" in answer, (status, answer)

    async def force(self, name: str) -> None:
        order = {"force": True, "then": self.rng.choice(["open", "open", "block"]), "reason": "chaos"}
        status, answer = await self.ask("POST", f"/api/models/{name}/unload", order)
        assert answer["seconds"] < GRACE_S + 2 + BUSY_S and answer["unsettled"] == [], answer
        # a busy kernel may take longer to clear a killed process away: said, and true soon
        assert (status == 200) is answer["ok"] is (not answer["left"]), answer
        async with asyncio.timeout(30):
            while any(map(alive, answer["left"])):
                await asyncio.sleep(0.05)

    async def gate(self, name: str) -> None:
        path = self.rng.choice([f"/api/models/{name}/gate", "/api/gate"])
        blocked = {"state": "blocked", "reason": "chaos", "mode": self.rng.choice(["hold", "reject"])}
        order = {"state": "open"} if self.rng.random() < 0.6 else blocked
        assert (await self.ask("POST", path, order))[0] == 200

    async def lease(self, name: str) -> None:
        if self.leases and self.rng.random() < 0.5:
            assert (await self.ask("DELETE", f"/api/leases/{self.leases.pop()}"))[0] in {200, 404}
        else:
            status, lease = await self.ask("POST", "/api/leases", {"ttl_s": self.rng.random() * 3 + 0.1})
            assert status == 201
            self.leases.append(lease["id"])

    async def cancel(self, name: str) -> None:
        live = (await self.ask("GET", "/api/requests"))[1]["requests"]
        if live:
            chosen = self.rng.choice(live)["id"]
            assert (await self.ask("DELETE", f"/api/requests/{chosen}"))[0] in {200, 404}

    async def kill(self, name: str) -> None:
        pid = (await self.ask("GET", f"/api/models/{name}"))[1]["backend"]["pid"]
        if pid is not None:
            # it may end before this
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self.rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]))

    async def reconcile(self, name: str) -> None:
        status, report = await self.ask("POST", f"/api/models/{name}/reconcile")
        # an engine that was stopped still shows slots at work for clients that left
        assert status == 200 and all(one["kind"] == "unknown_slot" for one in report["found"]), report

    async def look(self, name: str) -> None:
        _, body = await self.ask("GET", "/api/models")
        self.pids.update(m["backend"]["pid"] for m in body["models"] if m["backend"]["pid"])


async def storm(proxy: Proxy, seed: int, actions: int) -> None:
    """Run one and assert what must hold after any."""
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(
        proxy.url,
        timeout=timeout,
        # a torn answer may have been whole for its client, who would send its next order into a closing connection
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
    ) as session:
        made = Storm(proxy, session, seed)
        outcomes = await made.run(actions)
        assert set(outcomes) <= KNOWN and outcomes["completed"], outcomes
        for name in NAMES:
            status, answer = await made.ask("POST", f"/api/models/{name}/unload", {"force": True})
            assert status == 200 and answer["ok"], answer
            status, report = await made.ask("POST", f"/api/models/{name}/reconcile")
            assert status == 200 and report["clean"], report
            admission = (await made.ask("GET", f"/api/models/{name}"))[1]["admission"]
            numbers = ("queued", "running", "cancelling", "charged", "queued_bytes")
            assert [admission[number] for number in numbers] == [0] * 5, admission
        assert (await made.ask("GET", "/api/requests"))[1] == {"requests": []}
        jobs = (await made.ask("GET", "/api/jobs"))[1]["jobs"]
        assert jobs and all(job["ended"] for job in jobs), jobs
    assert proxy.engines() == [] and not [pid for pid in made.pids if alive(pid)]
    errors = [line for line in proxy.events() if line["level"] in {"error", "critical"}]
    # engines were killed and stopped on purpose; nothing else may have gone wrong
    meant = {"crash", "wedge"}
    others = [e for e in errors if e.get("cause") not in meant and e["event"] != "processes survived a kill"]
    assert not others, others
    assert proxy.stop() == 0
    until("no process is left", lambda: not proxy.children(), 10)


def config(path: Path) -> dict[str, Any]:
    entry = model(
        path, "-np", "3", "-c", "2048", stop={"grace_s": GRACE_S}, ttl_s=2, restart={"first_s": 0.2, "max_s": 1},
        budgets={"load_timeout_s": 20},
    )  # fmt: skip
    return {"models": dict.fromkeys(NAMES, entry)}


async def test_a_few_random_operators(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    await storm(start(config(zoo("llama-mid"))), seed=3, actions=60)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [11, 12])
async def test_five_hundred_random_operators(
    start: Callable[..., Proxy], zoo: Callable[[str], Path], seed: int
) -> None:
    await storm(start(config(zoo("llama-mid"))), seed=seed, actions=500)
