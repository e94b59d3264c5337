"""Third-party SSE clients, unchanged, survive the comments that keep a waiting stream alive.

The engine is a paced one (its stream is known byte for byte); it answers only after its model was "loaded",
so every stream begins with comments, and it is silent once in the middle, so comments come there, too.
"""

import asyncio

import aiohttp
import pytest

from tests.http.test_forward import CHAT, chat
from tests.http.world import House, house, settings, until

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.interop

HELLO = [{"role": "user", "content": "hi"}]
SILENT = {"tokens": 6, "pause_after": 3, "pause_ms": 700}
BODY = chat(True, **SILENT)
TEXT = " t0 t1 t2 t3 t4 t5"
WAIT_S = 60


class Waiting:
    """A house whose model becomes ready once the one request in it has been told that it waits."""

    def __init__(self, h: House) -> None:
        self.h = h

    async def then_ready(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await until(lambda: self.h.live() == 1, WAIT_S)
            # three intervals: at least one comment went out before there was an engine
            await asyncio.sleep(0.35)
        self.h.ready("demo")

    async def around(self, client):
        """Run a client's coroutine to its end; afterwards nothing may be left."""
        ready = asyncio.ensure_future(self.then_ready())
        try:
            return await asyncio.wait_for(client, WAIT_S)
        finally:
            await ready
            await until(lambda: self.h.live() == 0, WAIT_S)
            assert self.h.outcomes()["completed"] == 1


@pytest.fixture
async def waiting():
    async with house(settings(admission={"keepalive_s": 0.1}), auto=False) as h:
        yield Waiting(h)


async def test_the_comments_are_there(waiting):
    """What the clients below survive: comments before the first event and between two events."""

    async def read():
        async with aiohttp.ClientSession(waiting.h.base) as client, client.post(CHAT, json=BODY) as answer:
            return await answer.read()

    body = await waiting.around(read())
    before, _, after = body.partition(b"data: ")
    assert before.startswith(b": queued position=1 reason=model_loading\n\n")
    assert b"\n\n: generating\n\n" in after


async def test_a_client_reads_on(waiting, reads):
    assert await waiting.around(reads(waiting.h.base, BODY)) == TEXT


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_an_error_after_comments_is_raised(waiting, kind):
    """The stream began with a comment, so its failure can only be an event: the SDKs raise it."""
    from proxy.errors import ErrorCode, ProxyError

    async def read():
        if kind == "openai":
            async with openai.AsyncOpenAI(
                base_url=waiting.h.base + "/v1", api_key="x", max_retries=0
            ) as client:
                stream = await client.chat.completions.create(model="demo", messages=HELLO, stream=True)
                return [chunk async for chunk in stream]
        async with anthropic.AsyncAnthropic(base_url=waiting.h.base, api_key="x", max_retries=0) as client:
            stream = await client.messages.create(model="demo", max_tokens=5, messages=HELLO, stream=True)
            return [event async for event in stream]

    async def fail():
        await until(lambda: waiting.h.live() == 1, WAIT_S)
        await asyncio.sleep(0.35)
        waiting.h.admission.load_failed("demo", ProxyError(ErrorCode.MODEL_LOAD_FAILED, "no such file"))

    failing = asyncio.ensure_future(fail())
    with pytest.raises((openai.APIError, anthropic.APIError), match="no such file"):
        await asyncio.wait_for(read(), WAIT_S)
    await failing
    await until(lambda: waiting.h.live() == 0)
