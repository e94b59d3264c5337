"""Requests through the real runner, real admission and the real upstream client, to a paced engine."""

import asyncio
import json

import aiohttp
import pytest
from yarl import URL

from .world import house, settings, until

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
        async with client.post(URL(h.base + CHAT + "?a=%2F..%20", encoded=True), json=chat(), headers=headers) as answer:
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


async def test_single_events_at_ten_milliseconds():
    """At one event per 10 ms at least 99 of 100 client reads hold exactly one event."""
    async with house() as h:
        reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
        body = json.dumps(chat(True, tokens=300, pace_ms=10)).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await reader.readuntil(b"\r\n\r\n")
        single = several = 0
        while True:
            data = await reader.read(65536)
            events = data.count(b"data: ")
            single += events == 1
            several += events > 1
            if b"[DONE]" in data:
                break
        writer.close()
        assert single >= 0.99 * (single + several), (single, several)
