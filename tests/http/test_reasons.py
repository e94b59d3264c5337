"""Why a request waits is the same in the list, in its stream and in the metric, for every reason there is."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from proxy.errors import ErrorCode, ProxyError
from proxy.types import AdminState, EnginePhase, MemberState, PhasePolicy, Reason

from .test_forward import CHAT, chat
from .world import House, house, settings, until

SERVER = {
    "api_keys": [{"name": name, "key": f"k-{name}"} for name in ("alice", "bob")],
    "admin_keys": [{"name": "ops", "key": "adm"}],
}
ADMIN = {"Authorization": "Bearer adm"}
ENDLESS = {"tokens": 100_000, "pace_ms": 2}


class Scene:
    """A house with some requests in it, all of which end with the scene."""

    def __init__(self, h: House, client: aiohttp.ClientSession) -> None:
        self.h, self.client = h, client
        self.tasks: list[asyncio.Task[aiohttp.ClientResponse]] = []

    def ask(
        self, name: str, key: str = "alice", path: str = CHAT, **body
    ) -> asyncio.Task[aiohttp.ClientResponse]:
        paced = body.pop("paced", {})
        headers = {"Authorization": f"Bearer k-{key}", "x-request-id": name}
        made = {**chat(True, **paced), **body}
        task = asyncio.ensure_future(self.client.post(path, json=made, headers=headers))
        self.tasks.append(task)
        return task

    async def runs(self, name: str, key: str = "alice") -> aiohttp.ClientResponse:
        answer = await self.ask(name, key, paced=ENDLESS)
        await answer.content.readuntil(b"t2")
        return answer

    async def shown(self, name: str) -> dict:
        async with self.client.get("/api/requests", headers=ADMIN) as answer:
            listed = {one["id"]: one for one in (await answer.json())["requests"]}
        return listed.get(name, {})

    async def leave(self) -> None:
        for task in self.tasks:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()
            task.cancel()
        await until(lambda: self.h.live() == 0)


@asynccontextmanager
async def scene(admission: dict | None = None, **options) -> AsyncIterator[Scene]:
    configured = settings(server=SERVER, admission={"keepalive_s": 0.05, **(admission or {})})
    async with house(configured, **options) as h, aiohttp.ClientSession(h.base) as client:
        made = Scene(h, client)
        try:
            yield made
        finally:
            await made.leave()


@asynccontextmanager
async def loading():
    async with scene(auto=False) as s:
        yield s, s.ask("waits")


@asynccontextmanager
async def swap_wait():
    async with scene(auto=False) as s:
        task = s.ask("waits")
        await until(lambda: s.h.live() == 1)
        s.h.admission.swap_wait("demo", waiting=True)
        yield s, task


@asynccontextmanager
async def backend_down():
    async with scene() as s:
        await s.runs("ran")
        s.h.auto = False
        key = s.h.keys.pop("demo")
        s.h.admission.backend_down(key, ProxyError(ErrorCode.UPSTREAM_ERROR, "it died"))
        yield s, s.ask("waits")


def gate(admin: AdminState):
    @asynccontextmanager
    async def made():
        async with scene() as s:
            s.h.admission.set_gate("demo", admin, "maintenance")
            yield s, s.ask("waits")

    return made


@asynccontextmanager
async def no_free_slot():
    async with scene(slots=1) as s:
        await s.runs("ran")
        yield s, s.ask("waits")


@asynccontextmanager
async def natively_queued():
    async with scene(slots=2, policy=PhasePolicy.DRAIN) as s:
        s.h.members["waits"] = MemberState.QUEUED
        await s.runs("ran")
        yield s, s.ask("waits", paced={"prefill_ms": 60_000})


@asynccontextmanager
async def standby():
    """Behind the engine's one slot: in its own queue, without a slot that could show it."""
    async with scene(slots=1, policy=PhasePolicy.DRAIN) as s:
        await s.runs("ran")
        yield s, s.ask("waits", paced={"prefill_ms": 60_000})


@asynccontextmanager
async def wide_request():
    async with scene(slots=2) as s:
        await s.runs("ran")
        yield s, s.ask("waits", path="/v1/completions", prompt=["a", "b", "c"])


@asynccontextmanager
async def fairness():
    """Alice's stream goes on and is charged to her: bob, who came later, stands before her second request."""
    async with scene(slots=1) as s:
        await s.runs("ran")
        task = s.ask("waits")
        await until(lambda: s.h.live() == 2)
        s.ask("later", "bob")
        yield s, task


@asynccontextmanager
async def cohort_shape():
    """A cohort of short prompts is being read; a long one would hold it up, and waits for its like."""
    async with scene({"cohort_shape": True}, slots=2, policy=PhasePolicy.DRAIN) as s:
        (await s.ask("loads")).close()
        await until(lambda: s.h.live() == 0)
        s.h.showing = EnginePhase.PREFILL_OPEN
        s.h.member = MemberState.PREFILL
        pace = s.h.admission._state.rooms["demo"].books["demo-0"].pace
        pace.reading_s, pace.read_tokens, pace.generation_s = 1.0, 1.0, 1.0
        s.ask("short", paced={"prefill_ms": 60_000})
        await until(lambda: s.h.live() == 1)
        yield s, s.ask("waits", messages=[{"role": "user", "content": "long " * 5000}])


SCENES: dict[Reason, Callable] = {
    Reason.MODEL_LOADING: loading,
    Reason.SWAP_WAIT: swap_wait,
    Reason.BACKEND_DOWN: backend_down,
    Reason.GATE_BLOCKED: gate(AdminState.BLOCKED),
    Reason.MODEL_DRAINING: gate(AdminState.DRAINING),
    Reason.NO_FREE_SLOT: no_free_slot,
    Reason.COHORT_SEALED: natively_queued,
    Reason.WIDE_REQUEST: wide_request,
    Reason.FAIRNESS: fairness,
    Reason.COHORT_SHAPE: cohort_shape,
}


@pytest.mark.parametrize(
    ("reason", "staged"),
    [*SCENES.items(), (Reason.COHORT_SEALED, standby)],
    ids=[*(reason.value for reason in SCENES), "standby"],
)
async def test_a_reason_is_seen_everywhere(reason: Reason, staged: Callable):
    async with staged() as (s, task):
        answer = await asyncio.wait_for(task, 10)
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        async with asyncio.timeout(10):
            comment = b""
            while f"reason={reason.value}".encode() not in comment:
                comment = await answer.content.readuntil(b"\n\n")
                assert comment.startswith(b": "), comment
        shown = await s.shown("waits")
        assert shown["reason"] == reason.value, shown
        assert shown["waits_s"][reason.value] > 0
        state = "native_queued" if reason is Reason.COHORT_SEALED else "queued"
        assert shown["state"] == state
        assert comment.startswith(f": {state} ".encode())
        if state == "queued":
            assert f"position={shown['position']} ".encode() in comment
        s.h.metrics.refresh()
        assert s.h.sample("hold_seconds_total", model="demo", reason=reason.value) > 0


def test_every_reason_has_its_scene():
    assert set(SCENES) == set(Reason)
