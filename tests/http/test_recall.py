"""What waits in an engine's own queue can be taken back, until the engine answers."""

import asyncio
import contextlib

import aiohttp
import pytest

from proxy.errors import ErrorCode, ProxyError
from proxy.http.opening import head_or_recall
from proxy.types import MemberState, PhasePolicy
from proxy.upstream import Head, UpstreamDied, UpstreamRequest

from .test_forward import CHAT, chat
from .world import house, settings, until

REQUEST = UpstreamRequest("POST", "/", ())
CLASSES = {
    "api_keys": [
        {"name": "bob", "key": "kb", "class": "batch"},
        {"name": "alice", "key": "ka", "class": "interactive"},
    ],
    "admin_keys": [{"name": "ops", "key": "adm"}],
}


def ask(client, key, name, stream=True, **paced):
    headers = {"Authorization": f"Bearer {key}", "x-request-id": name}
    return client.post(CHAT, json=chat(stream, **paced), headers=headers)


@pytest.mark.parametrize("keepalive_s", [0, 0.05])
async def test_a_recalled_request_is_sent_again_whole(keepalive_s):
    """A standby of a low class makes room for a higher one; it is served later, its client sees nothing of it."""
    configured = settings(server=CLASSES, admission={"keepalive_s": keepalive_s})
    async with (
        house(configured, slots=1, policy=PhasePolicy.DRAIN) as h,
        aiohttp.ClientSession(h.base) as client,
    ):
        h.members["bob2"] = MemberState.QUEUED
        running = await ask(client, "kb", "bob1", tokens=100_000, pace_ms=2)
        await running.content.readuntil(b"t2")
        # 60 s: this is answered only when it is sent again
        waiting = asyncio.ensure_future(ask(client, "kb", "bob2", prefill_ms=60_000))
        first = await h.engine.seen(2)
        assert first.tag.startswith("bob2.")
        urgent = asyncio.ensure_future(ask(client, "ka", "alice", tokens=3))
        await asyncio.wait_for(first.gone.wait(), 5)
        third = await h.engine.seen(3)
        assert third.tag.startswith("alice.")
        async with await urgent as answer:
            assert b"t2" in await answer.read()
        again = await h.engine.seen(4)
        assert again.tag.startswith("bob2.")
        assert again.tag != first.tag
        assert again.body == first.body
        [view] = [view for view in h.admission.tickets() if view.id == "bob2"]
        assert view.recalls == 1
        assert h.sample("recalls_total", model="demo") == 1
        running.close()
        if keepalive_s:
            answer = await waiting
            await answer.content.readuntil(b": native_queued reason=cohort_sealed\n\n")
            answer.close()
        else:
            waiting.cancel()
        await until(lambda: h.live() == 0)
        assert h.admission.broken_rules() == []


async def test_a_client_may_leave_at_any_moment_of_a_recall():
    configured = settings(server=CLASSES)
    async with (
        house(configured, slots=1, policy=PhasePolicy.DRAIN) as h,
        aiohttp.ClientSession(h.base) as client,
    ):
        h.members["bob2"] = MemberState.QUEUED
        running = await ask(client, "kb", "bob1", tokens=100_000, pace_ms=2)
        await running.content.readuntil(b"t2")
        waiting = asyncio.ensure_future(ask(client, "kb", "bob2", prefill_ms=60_000))
        first = await h.engine.seen(2)
        h.mute = True  # the engine does not show that it let go: nothing is granted in its place
        urgent = asyncio.ensure_future(ask(client, "ka", "alice"))
        await until(lambda: h.live() == 3)
        h.mute = False
        await asyncio.wait_for(first.gone.wait(), 5)
        for task in (waiting, urgent):
            task.cancel()
        running.close()
        await until(lambda: h.live() == 0)
        assert h.admission.broken_rules() == []


async def test_an_operator_who_cancels_in_the_moment_of_a_recall_wins():
    configured = settings(server=CLASSES)
    async with (
        house(configured, slots=1, policy=PhasePolicy.DRAIN) as h,
        aiohttp.ClientSession(h.base) as client,
    ):
        h.members["bob2"] = MemberState.QUEUED
        running = await ask(client, "kb", "bob1", tokens=100_000, pace_ms=2)
        await running.content.readuntil(b"t2")
        waiting = asyncio.ensure_future(ask(client, "kb", "bob2", prefill_ms=60_000))
        first = await h.engine.seen(2)
        ticket = h.admission._tickets["bob2"]
        ticket.entry.recalling = True
        ticket.recall()
        h.admission.cancel("bob2", ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "by root"))
        async with await waiting as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["code"] == "cancelled_by_operator"
        await asyncio.wait_for(first.gone.wait(), 5)
        running.close()
        await until(lambda: h.live() == 0)
        assert len(h.engine.requests) == 2
        assert h.admission.broken_rules() == []


# --- the race of a head and a recall -------------------------------------------------------------------


class Answered:
    """An exchange whose head came."""

    def __init__(self):
        self.closed = False
        self.head = Head(200, ())

    def close(self):
        self.closed = True


class Engine:
    """An upstream that answers when told, or in spite of being cancelled."""

    def __init__(self, stubborn=None):
        self.answer = asyncio.get_running_loop().create_future()
        self.stubborn = stubborn
        self.cancelled = False

    async def open(self, request):
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.cancelled = True
            if self.stubborn is None:
                raise
            if isinstance(self.stubborn, BaseException):
                raise self.stubborn from None
            return self.stubborn


async def nothing():
    pass


def recall():
    return asyncio.get_running_loop().create_future()


async def test_a_recall_before_the_head_takes_back():
    engine, recalled = Engine(), recall()
    asyncio.get_running_loop().call_later(0.02, recalled.set_result, None)
    assert await head_or_recall(engine, REQUEST, recalled, None, nothing) is None
    assert engine.cancelled


async def test_a_head_that_comes_with_the_recall_wins():
    engine, recalled, answered = Engine(), recall(), Answered()
    engine.answer.set_result(answered)
    asyncio.get_running_loop().call_soon(recalled.set_result, None)
    assert await head_or_recall(engine, REQUEST, recalled, None, nothing) is answered
    assert not answered.closed


async def test_a_head_that_the_recall_came_too_late_for_wins():
    answered = Answered()
    engine, recalled = Engine(answered), recall()
    recalled.set_result(None)
    assert await head_or_recall(engine, REQUEST, recalled, None, nothing) is answered
    assert not answered.closed


async def test_an_engine_that_dies_of_the_recall_is_taken_back():
    engine, recalled = Engine(UpstreamDied("torn", before_head=True)), recall()
    recalled.set_result(None)
    assert await head_or_recall(engine, REQUEST, recalled, None, nothing) is None


async def test_comments_go_on_and_a_client_that_left_ends_it():
    answered = Answered()
    engine, count = Engine(answered), 0

    async def still():
        nonlocal count
        count += 1
        if count == 3:
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await head_or_recall(engine, REQUEST, recall(), 0.01, still)
    assert answered.closed
    task = asyncio.ensure_future(head_or_recall(Engine(), REQUEST, recall(), None, nothing))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_head_that_comes_to_nobody_is_closed():
    """Cancelled once more while it waits for the opening to end: the exchange that comes all the same is let go."""
    answered, reached, go_on = Answered(), asyncio.Event(), asyncio.Event()

    class Slow:
        async def open(self, _request):
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                reached.set()
                await go_on.wait()
            return answered

    task = asyncio.ensure_future(head_or_recall(Slow(), REQUEST, recall(), None, nothing))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait_for(reached.wait(), 5)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not answered.closed
    go_on.set()
    await until(lambda: answered.closed)
