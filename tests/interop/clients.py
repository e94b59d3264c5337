"""Third-party SSE clients, unchanged: each posts a chat and returns the text that it read.

What a client has to say of the stream besides (errors it met, comments it skipped) is checked here: every stream
that it is given begins with comments.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
WAIT_S = 120
_NAMED = ("model", "messages", "stream", "max_tokens")


def joined(payloads: Iterable[str]) -> str:
    """The text of a chat stream's payloads, which must all be JSON but for the last."""
    *chunks, end = payloads
    assert end == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def by_aiohttp_sse_client(base: str, body: Mapping[str, Any]) -> str:
    client = pytest.importorskip("aiohttp_sse_client.client")
    payloads = []
    source = client.EventSource(base + CHAT, option={"method": "POST"}, json=body, headers={})
    async with source:
        async for event in source:
            payloads.append(event.data)
            if event.data == "[DONE]":
                break
    return joined(payloads)


async def by_httpx_sse(base: str, body: Mapping[str, Any]) -> str:
    httpx, httpx_sse = pytest.importorskip("httpx"), pytest.importorskip("httpx_sse")
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        async with httpx_sse.aconnect_sse(client, "POST", base + CHAT, json=body) as source:
            return joined([event.data async for event in source.aiter_sse()])


async def by_eventsource_parser(command: list[str], base: str, body: Mapping[str, Any]) -> str:
    process = await asyncio.create_subprocess_exec(
        *command,
        base + CHAT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    out, _ = await process.communicate(json.dumps(body).encode())
    assert process.returncode == 0
    seen = json.loads(out)
    assert (seen["status"], seen["errors"]) == (200, [])
    assert any(comment.startswith("queued ") for comment in seen["comments"])
    assert "generating" in seen["comments"]
    return joined(seen["events"])


async def by_curl(base: str, body: Mapping[str, Any]) -> str:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl: install it")
    process = await asyncio.create_subprocess_exec(
        *(curl, "-N", "-sS", "--noproxy", "*", "--fail", "--max-time", str(WAIT_S)),
        *("-H", "Content-Type: application/json", "-d", json.dumps(body), base + CHAT),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    lines = out.decode().splitlines()
    assert lines[0].startswith(": queued ")
    assert ": generating" in lines
    return joined(line[6:] for line in lines if line.startswith("data: "))


async def by_openai(base: str, body: Mapping[str, Any]) -> str:
    openai = pytest.importorskip("openai")
    more = {name: value for name, value in body.items() if name not in _NAMED}
    named = {name: body[name] for name in _NAMED if name in body}
    async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**named, extra_body=more)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def by_anthropic(base: str, body: Mapping[str, Any]) -> str:
    anthropic = pytest.importorskip("anthropic")
    more = {name: value for name, value in body.items() if name not in _NAMED}
    async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0) as client:
        stream = client.messages.stream(
            model=body["model"],
            max_tokens=body.get("max_tokens", 50),
            messages=body["messages"],
            extra_body=more,
        )
        async with stream as events:
            return await events.get_final_text()


CLIENTS = {
    "aiohttp_sse_client": by_aiohttp_sse_client,
    "httpx_sse": by_httpx_sse,
    "eventsource_parser": by_eventsource_parser,
    "curl": by_curl,
    "openai": by_openai,
    "anthropic": by_anthropic,
}
