"""Requests through the real runner, real admission and the real upstream client, to a paced engine."""

import asyncio
import json

import aiohttp
import pytest
from yarl import URL

from proxy.admission.events import Effect, Granted

from .world import house, until

CHAT = "/v1/chat/completions"


def chat(stream=False, model="demo", **paced):
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream, "paced": paced}


async def test_a_whole_answer_passes_unchanged():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat()) as answer:
            body = await answer.read()
            assert answer.status == 200
            assert body == bytes(h.engine.requests[0].sent)
            assert answer.headers["x-request-id"].startswith("req-")
            assert answer.headers["x-backend"] == "demo-0"
            assert int(answer.headers["x-queue-wait-ms"]) >= 0
            assert int(answer.headers["Content-Length"]) == len(body)
            assert json.loads(body)["model"] == "engine-name"
            assert "X-Private" not in answer.headers
        assert h.loads == ["demo"]
        await until(lambda: h.live() == 0)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/completion"])
async def test_a_stream_equals_the_engines_bytes(path):
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(path, json=chat(True, tokens=20)) as answer:
            body = await answer.read()
            assert answer.status == 200
            assert body == bytes(h.engine.requests[0].sent)
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert answer.headers["X-Accel-Buffering"] == "no"
            assert answer.headers["Cache-Control"] == "no-cache"
            assert "Access-Control-Allow-Origin" not in answer.headers
            assert "Keep-Alive" not in answer.headers
        await until(lambda: h.live() == 0)
        assert h.outcomes()["completed"] == 1
        assert h.sample("generated_tokens_total", model="demo", key="other") >= 5
        assert h.sample("time_to_first_token_seconds_count", model="demo", priority="normal") == 1


async def test_the_engine_gets_our_tag_and_key_and_none_of_the_clients():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        headers = {
            "Authorization": "Bearer client-secret",
            "x-api-key": "client-secret",
            "Connection": "keep-alive, x-request-id, x-custom",
            "x-custom": "1",
            "x-kept": "2",
            "x-request-id": "mine-1",
            "Cookie": "a=b",
            "x-phase-gather-ms": "999",
        }
        async with client.post(
            URL(h.base + CHAT + "?a=%2F..%20", encoded=True), json=chat(), headers=headers
        ) as answer:
            assert answer.headers["x-request-id"] == "mine-1"
        seen = h.engine.requests[0]
        assert seen.target == CHAT + "?a=%2F..%20"
        assert seen.header("authorization") == ["Bearer engine-key"]
        assert seen.header("x-api-key") == []
        assert seen.header("cookie") == []
        assert seen.header("x-custom") == []
        assert seen.header("x-kept") == ["2"]
        assert seen.header("x-request-id") == ["mine-1.1"]
        assert seen.header("x-phase-gather-ms") != ["999"]
        assert b"client-secret" not in repr(seen.headers).encode()


async def test_each_event_is_passed_on_by_itself():
    """The engine sends an event when the client has read the one before: every read holds exactly one whole event."""
    async with house() as h:
        reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
        body = json.dumps(chat(True, tokens=300, hold="each")).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await reader.readuntil(b"\r\n\r\n")
        reads = [b""]
        async with asyncio.timeout(60):
            while b"[DONE]" not in reads[-1]:
                reads.append(await reader.read(65536))
                assert reads[-1].count(b"data: ") == reads[-1].count(b"\n\n") == 1
                h.engine.go.release()
        writer.close()
        assert len(reads[1:]) == 303


async def test_sixty_four_streams_on_four_slots():
    """All finish whole, in order of arrival, and no decision ever grants more than the slots hold."""
    broken, granted = [], []

    def look(effect: Effect) -> None:
        broken.extend(h.admission.broken_rules())
        if isinstance(effect, Granted):
            granted.append(effect.ticket)

    async with house() as h:
        h.admission._listener = look
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(h.base, connector=connector) as client:

            async def one(number: int) -> bytes:
                headers = {"x-request-id": f"r{number}"}
                async with client.post(
                    CHAT, json=chat(True, tokens=20, pace_ms=1), headers=headers
                ) as answer:
                    return await answer.read()

            tasks = []
            for number in range(64):
                tasks.append(asyncio.ensure_future(one(number)))
                # arrival is when the request is in: wait for each so that the order is known
                await until(lambda n=number: len(h.admission.tickets()) + h.outcomes()["completed"] > n)
            bodies = await asyncio.gather(*tasks)
        assert broken == []
        by_tag = {seen.tag: bytes(seen.sent) for seen in h.engine.requests}
        assert [body for body in bodies] == [by_tag[f"r{number}.1"] for number in range(64)]
        # two that are granted together may overtake one another on their way: one connection is kept, one is new
        assert granted == [f"r{number}" for number in range(64)]
        assert len(h.engine.requests) == 64
        await until(lambda: h.live() == 0)
        assert h.outcomes()["completed"] == 64
        assert (
            h.sample("queue_wait_seconds_count", model="demo", priority="normal", outcome="completed") == 64
        )


async def test_a_connection_serves_many_requests_and_survives_refusals():
    async with house() as h:
        reader, writer = await asyncio.open_connection("127.0.0.1", h.port)

        async def ask(body: bytes, path: str = CHAT) -> tuple[int, bytes]:
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
            return int(head.split()[1]), await reader.readexactly(length)

        good = json.dumps(chat()).encode()
        for body, path, wanted in [
            (good, CHAT, 200),
            (b"{", CHAT, 400),
            (good, "/nothing", 404),
            (json.dumps(chat(model="x")).encode(), CHAT, 404),
            (good, CHAT, 200),
        ]:
            assert (await ask(body, path))[0] == wanted
        writer.write(
            b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        both = b""
        while both.count(b"HTTP/1.1 200 OK") < 2:
            more = await asyncio.wait_for(reader.read(4096), 20)
            assert more, both
            both += more
        writer.close()


async def test_the_first_event_is_not_held_up():
    """No Nagle, no buffering: a first event leaves within 10 ms (the best of some tries on a busy machine)."""
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        best = 1.0
        for _ in range(20):
            async with client.post(CHAT, json=chat(True, tokens=3, pace_ms=20)) as answer:
                await answer.content.readuntil(b"\n\n")
                first = asyncio.get_running_loop().time()
                await answer.content.readuntil(b"\n\n")
                best = min(best, abs(asyncio.get_running_loop().time() - first - 0.02))
                await answer.read()
        assert best < 0.010
