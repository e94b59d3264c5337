"""Bodies that are being received take room, too."""

import asyncio
import json

import aiohttp

from proxy.http.uploads import Uploads

from .test_forward import CHAT, chat
from .world import house, settings, until


class Half:
    """A request of which a part of the body was sent."""

    def __init__(self, port, size):
        self.port, self.size = port, size

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {self.size + 1}\r\n\r\n".encode() + b" " * self.size)
        return self

    async def answer(self):
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split("\r\n")[0])
        return head, json.loads(await self.reader.readexactly(length))

    async def __aexit__(self, *_):
        self.writer.transport.abort()


def uploads(h):
    [found] = [
        route.handler.__self__._uploads
        for route in h._runner.app.router.routes()
        if route.resource is not None and route.resource.canonical == CHAT and route.method == "POST"
    ]
    return found


async def test_uploads_in_progress_count_against_the_queued_bytes():
    """Two that have not ended leave no room for a third; it is refused before it was read; then it is served."""
    async with house(settings(admission={"max_queued_bytes": 100_000})) as h:
        book = uploads(h)
        async with Half(h.port, 40_000), Half(h.port, 40_000):
            await until(lambda: book.receiving == 80_000)
            async with Half(h.port, 40_000) as third:
                head, told = await third.answer()
                assert head.startswith("http/1.1 429")
                assert "connection: close" in head
                assert 1 <= int(head.partition("retry-after:")[2].split("\r\n")[0]) <= 60
                assert told["error"]["code"] == "queue_full"
                assert "max_queued_bytes" in told["error"]["message"]
            async with aiohttp.ClientSession(h.base) as client, client.post(CHAT, json=chat()) as answer:
                assert answer.status == 200
        await until(lambda: (book.receiving, book.held) == (0, 0))
        async with aiohttp.ClientSession(h.base) as client:
            body = {**chat(), "pad": "x" * 90_000}
            async with client.post(CHAT, json=body) as answer:
                assert answer.status == 200
        await until(lambda: (book.receiving, book.held) == (0, 0))
        assert h.live() == 0


async def test_what_waits_and_what_comes_are_one_sum():
    configured = settings(admission={"max_queued_bytes": 100_000})
    async with house(configured, auto=False) as h, aiohttp.ClientSession(h.base) as client:
        waiting = asyncio.ensure_future(client.post(CHAT, json={**chat(), "pad": "x" * 60_000}))
        await until(lambda: h.live() == 1)
        async with client.post(CHAT, json={**chat(), "pad": "x" * 60_000}) as answer:
            assert answer.status == 429
        h.ready("demo")
        async with await waiting as answer:
            assert answer.status == 200
        await until(lambda: uploads(h).held == 0)


async def test_a_body_is_let_go_of_when_its_answer_begins():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        body = {**chat(True, tokens=100_000, pace_ms=2), "pad": "x" * 50_000}
        async with client.post(CHAT, json=body) as answer:
            await answer.content.readuntil(b"t1")
            assert uploads(h).held == 0
        await until(lambda: h.live() == 0)


def test_refused_uploads_are_told_different_times():
    now = 0.0
    book = Uploads(10, lambda: 0, lambda: now)
    with book.begin():
        now += 2.0
    times = set()
    for _ in range(20):
        with book.begin() as upload:
            try:
                upload.add(11)
            except Exception as error:
                times.add(round(error.retry_after_s, 3))
    assert len(times) == 20
    assert (book.held, book.receiving) == (0, 0)
