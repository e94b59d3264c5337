"""The official SDKs, changed in nothing but `base_url`, against the paced engine."""

import asyncio

import pytest

from proxy.errors import ErrorCode, ProxyError

from .world import house, settings, until

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.interop

HELLO = [{"role": "user", "content": "hi"}]


def ai(h, **options):
    options.setdefault("api_key", "none")
    return openai.AsyncOpenAI(base_url=h.base + "/v1", max_retries=0, **options)


def claude(h, **options):
    options.setdefault("api_key", "none")
    return anthropic.AsyncAnthropic(base_url=h.base, max_retries=0, **options)


async def test_openai_lists_chats_and_streams():
    async with house() as h, ai(h) as client:
        assert [model.id async for model in client.models.list()] == ["demo"]
        assert (await client.models.retrieve("default")).id == "demo"
        whole = await client.chat.completions.create(model="demo", messages=HELLO, n=2)
        assert len(whole.choices) == 2
        assert whole.choices[0].message.content == " t0 t1 t2 t3 t4"
        stream = await client.chat.completions.create(model="demo", messages=HELLO, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == " t0 t1 t2 t3 t4"
        assert (await client.completions.create(model="demo", prompt="a")).choices[
            0
        ].text == " t0 t1 t2 t3 t4"
        vectors = await client.embeddings.create(model="demo", input=["a", "b"], encoding_format="float")
        assert len(vectors.data) == 2
        forced = await client.chat.completions.create(
            model="demo",
            messages=HELLO,
            tool_choice="required",
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        )
        assert forced.choices[0].message.tool_calls[0].function.name == "f"


async def test_openai_error_classes():
    configured = settings(
        server={"api_keys": [{"name": "a", "key": "good"}], "max_body_bytes": 2000},
        admission={"max_queue": 1},
    )
    async with house(configured, auto=False) as h, ai(h, api_key="good") as client:
        create = client.chat.completions.create
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="nope", messages=HELLO)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError):
            await create(model="demo", messages=HELLO, extra_body={"stream": "x"})
        with pytest.raises(openai.APIStatusError) as large:
            await create(model="demo", messages=[{"role": "user", "content": "x" * 5000}])
        assert large.value.status_code == 413
        async with ai(h, api_key="bad") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        waiting = asyncio.ensure_future(create(model="demo", messages=HELLO))
        await until(lambda: h.live() == 1)
        with pytest.raises(openai.RateLimitError) as full:
            await create(model="demo", messages=HELLO)
        assert full.value.code == "queue_full"
        h.admission.load_failed("demo", ProxyError(ErrorCode.MODEL_LOAD_FAILED, "no such file"))
        with pytest.raises(openai.InternalServerError):
            await waiting


async def test_openai_raises_on_an_error_event_and_skips_comments():
    configured = settings(admission={"keepalive_s": 0.05})
    async with house(configured) as h, ai(h) as client:
        slow = {"paced": {"prefill_ms": 300}}
        stream = await client.chat.completions.create(
            model="demo", messages=HELLO, stream=True, extra_body=slow
        )
        assert len([chunk async for chunk in stream]) == 7
        dying = {"paced": {"die": "mid_event", "die_after": 3}}
        stream = await client.chat.completions.create(
            model="demo", messages=HELLO, stream=True, extra_body=dying
        )
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "upstream_error"


async def test_openai_retries_a_full_queue_by_itself():
    configured = settings(admission={"max_queue": 1})
    async with house(configured, auto=False) as h:
        async with openai.AsyncOpenAI(base_url=h.base + "/v1", api_key="none", max_retries=2) as client:
            create = client.chat.completions.create
            first = asyncio.ensure_future(create(model="demo", messages=HELLO))
            await until(lambda: h.live() == 1)
            second = asyncio.ensure_future(create(model="demo", messages=HELLO))
            await until(lambda: h.sample("requests_rejected_total", model="demo", code="queue_full") >= 1)
            h.ready("demo")
            assert (await first).choices
            assert (await asyncio.wait_for(second, 30)).choices


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize("code", [ErrorCode.CANCELLED_BY_OPERATOR, ErrorCode.MODEL_UNLOADED])
async def test_what_an_operator_ended_is_not_sent_again(kind, code):
    """SDKs repeat what failed with a 5xx, unless they are told not to: it would run although somebody ended it."""
    async with house() as h:
        slow = {"paced": {"prefill_ms": 60_000}}
        if kind == "openai":
            async with openai.AsyncOpenAI(base_url=h.base + "/v1", api_key="none") as client:
                asking = client.chat.completions.create(model="demo", messages=HELLO, extra_body=slow)
                error = await ended_by_an_operator(h, asking, code)
        else:
            async with anthropic.AsyncAnthropic(base_url=h.base, api_key="none") as client:
                asking = client.messages.create(model="demo", max_tokens=9, messages=HELLO, extra_body=slow)
                error = await ended_by_an_operator(h, asking, code)
        assert isinstance(error, (openai.InternalServerError, anthropic.InternalServerError))
        assert error.status_code == 503
        assert len(h.engine.requests) == 1


async def ended_by_an_operator(h, asking, code):
    task = asyncio.ensure_future(asking)
    await h.engine.seen(1)
    h.admission.cancel(h.admission.tickets()[0].id, ProxyError(code, "enough"))
    done, _ = await asyncio.wait({task}, timeout=20)
    if not done:
        task.cancel()
        pytest.fail(f"it was sent again: {len(h.engine.requests)} requests reached the engine")
    return task.exception()


async def test_a_request_that_took_too_long_is_not_sent_again():
    """It would take as long again: a limit on one request must not become three times the limit."""
    configured = settings(models={"demo": {"path": "demo.gguf", "budgets": {"total_timeout_s": 0.5}}})
    async with house(configured) as h:
        async with openai.AsyncOpenAI(base_url=h.base + "/v1", api_key="none") as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(
                    model="demo", messages=HELLO, extra_body={"paced": {"prefill_ms": 60_000}}
                )
            assert caught.value.code == "total_timeout"
        assert len(h.engine.requests) == 1


async def test_anthropic_messages_and_errors():
    configured = settings(server={"api_keys": [{"name": "a", "key": "good"}]})
    async with house(configured) as h, claude(h, api_key="good") as client:
        whole = await client.messages.create(model="demo", max_tokens=9, messages=HELLO)
        assert whole.content[0].text == " t0 t1 t2 t3 t4"
        async with client.messages.stream(model="demo", max_tokens=9, messages=HELLO) as stream:
            assert await stream.get_final_text() == " t0 t1 t2 t3 t4"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="nope", max_tokens=9, messages=HELLO)
        assert missing.value.body["type"] == "error"
        async with claude(h, api_key="bad") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(model="demo", max_tokens=9, messages=HELLO)
        dying = {"paced": {"die": "mid_event", "die_after": 4}}
        with pytest.raises(anthropic.APIError):
            async with client.messages.stream(
                model="demo", max_tokens=9, messages=HELLO, extra_body=dying
            ) as stream:
                async for _ in stream:
                    pass
