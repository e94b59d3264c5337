"""Refusals: the right status, shape and words in each dialect, and nothing queued for them."""

import asyncio
import io
import json
import re
from pathlib import Path

import aiohttp
import pytest

from proxy.errors import ErrorCode, ProxyError
from proxy.http.endpoints import INFERENCE

from .test_forward import CHAT, chat
from .world import house, raw, settings, until


async def refused(h, method, path, **options):
    async with aiohttp.ClientSession(h.base) as client, client.request(method, path, **options) as answer:
        assert answer.content_type == "application/json"
        assert answer.headers["x-request-id"]
        return answer, await answer.json()


def openai(value, code):
    error = value["error"]
    assert set(error) == {"message", "type", "code", "param", "source"}
    assert error["code"] == code
    return error


async def test_unknown_model_path_and_method():
    async with house() as h:
        answer, value = await refused(h, "POST", CHAT, json=chat(model="nope"))
        assert answer.status == 404
        assert openai(value, "model_not_found")["param"] == "model"
        answer, value = await refused(h, "POST", CHAT, json=chat(model="nope" * 100_000))
        assert len(openai(value, "model_not_found")["message"]) < 500
        answer, value = await refused(h, "GET", "/v2/nothing")
        assert answer.status == 404
        openai(value, "not_found")
        answer, value = await refused(h, "GET", CHAT)
        assert answer.status == 405
        assert answer.headers["Allow"] == "POST"
        openai(value, "method_not_allowed")
        answer, value = await refused(h, "DELETE", "/v1/models")
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET, HEAD"
        assert h.live() == 0
        # a raw client string never becomes a label
        assert b'model="nope"' not in h.metrics.render()


async def test_the_anthropic_shape():
    async with house() as h:
        answer, value = await refused(h, "POST", "/v1/messages", json=chat(model="nope"))
        assert answer.status == 404
        assert value["type"] == "error"
        assert value["error"]["type"] == "not_found_error"
        assert value["request_id"] == answer.headers["x-request-id"]
        answer, value = await refused(h, "GET", "/v1/messages")
        assert (answer.status, value["type"]) == (405, "error")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"{nope", "invalid_json", None),
        (b"", "invalid_json", None),
        (b'{"model":3}', "invalid_request", "model"),
        (b'{"model":"demo","stream":"no"}', "invalid_request", "stream"),
    ],
)
async def test_bad_bodies(body, code, param):
    async with house() as h:
        answer, value = await refused(
            h, "POST", CHAT, data=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status == 400
        assert openai(value, code)["param"] == param
        assert h.engine.requests == []


async def test_media_type_and_encoding():
    async with house() as h:
        answer, value = await refused(h, "POST", CHAT, data=b"a=b", headers={"Content-Type": "text/plain"})
        assert answer.status == 415
        openai(value, "unsupported_media_type")
        packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer, value = await refused(h, "POST", CHAT, data=b"\x1f\x8b", headers=packed)
        assert answer.status == 415


async def test_a_missing_model_is_the_only_one_or_named():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        body = chat()
        del body["model"]
        async with client.post(CHAT, json=body) as answer:
            assert answer.status == 200
    two = settings(models={"a": {"path": "a.gguf"}, "b": {"path": "b.gguf", "aliases": ["bee"]}})
    async with house(two) as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=body) as answer:
            assert answer.status == 400
            error = openai(await answer.json(), "invalid_request")
            assert error["param"] == "model"
            assert "a, b" in error["message"]
        async with client.post(CHAT + "?model=bee", json=body) as answer:
            assert answer.status == 200
            assert answer.headers["x-backend"] == "b-0"
        async with client.post(CHAT, json=chat(model="bee")) as answer:
            assert json.loads(h.engine.requests[-1].body)["model"] == "bee"
            assert (await answer.json())["model"] == "engine-name"


async def test_bodies_over_the_cap_are_refused_before_queueing():
    configured = settings(server={"max_body_bytes": 2000})
    async with house(configured) as h:
        big = json.dumps({**chat(), "pad": "x" * 3000}).encode()
        kind = {"Content-Type": "application/json"}
        answer, value = await refused(h, "POST", CHAT, data=big, headers=kind)
        assert answer.status == 413
        assert "2000" in openai(value, "request_too_large")["message"]

        async def pieces():
            for start in range(0, len(big), 500):
                yield big[start : start + 500]

        answer, value = await refused(h, "POST", CHAT, data=pieces(), headers=kind)
        assert answer.status == 413
        async with aiohttp.ClientSession(h.base) as client:
            small = json.dumps(chat()).encode()

            async def few():
                yield small[:10]
                yield small[10:]

            async with client.post(CHAT, data=few(), headers=kind) as answer:
                assert answer.status == 200
                assert h.engine.requests[0].body == small
                assert h.engine.requests[0].header("content-length") == [str(len(small))]
        assert h.loads == ["demo"]


async def test_a_large_body_is_parsed_and_forwarded_unchanged():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        data = json.dumps({**chat(), "pad": "é" * 900_000}).encode()
        async with client.post(
            CHAT, data=io.BytesIO(data), headers={"Content-Type": "application/json"}
        ) as answer:
            assert answer.status == 200
        assert h.engine.requests[0].body == data


async def test_a_body_of_millions_of_arrays_is_not_parsed():
    """The parser would hold up every stream for seconds."""
    async with house() as h:
        kind = {"Content-Type": "application/json"}
        bomb = b'{"model":"demo","messages":[],"x":[' + b"[]," * 5_000_000 + b"[]]}"
        answer, value = await refused(h, "POST", CHAT, data=io.BytesIO(bomb), headers=kind)
        assert answer.status == 400
        assert "arrays and objects" in openai(value, "invalid_request")["message"]
        assert h.engine.requests == []


async def test_a_body_that_does_not_come_is_a_408():
    configured = settings(server={"body_timeout_s": 0.2})
    async with house(configured) as h:
        out = await raw(
            h.port,
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{",
            8.0,
        )
        assert out.startswith(b"HTTP/1.1 408")
        assert b'"code":"request_timeout"' in out


async def test_a_full_queue_says_when_to_come_back():
    configured = settings(admission={"max_queue": 1})
    async with house(configured, slots=1, auto=False) as h:
        async with aiohttp.ClientSession(h.base) as client:
            first = asyncio.ensure_future(client.post(CHAT, json=chat()))
            await until(lambda: h.live() == 1)
            answer, value = await refused(h, "POST", CHAT, json=chat())
            assert answer.status == 429
            openai(value, "queue_full")
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
            assert int(answer.headers["retry-after-ms"]) > 0
            h.ready("demo")
            assert (await first).status == 200
        assert h.sample("requests_rejected_total", model="demo", code="queue_full") == 1


@pytest.mark.parametrize(("stream", "path"), [(False, CHAT), (True, CHAT), (True, "/v1/messages")])
async def test_a_failed_load_fails_its_waiters_with_the_words(stream, path):
    async with house(auto=False) as h, aiohttp.ClientSession(h.base) as client:
        waiter = asyncio.ensure_future(client.post(path, json=chat(stream)))
        await until(lambda: h.live() == 1)
        h.admission.load_failed("demo", ProxyError(ErrorCode.MODEL_LOAD_FAILED, "no such file: demo.gguf"))
        async with await waiter as answer:
            assert answer.status == 502
            assert "no such file" in (await answer.json())["error"]["message"]
        await until(lambda: h.live() == 0)


async def test_the_engines_own_errors_pass_unchanged():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat(True, status=400)) as answer:
            assert answer.status == 400
            assert await answer.read() == bytes(h.engine.requests[0].sent)
        await until(lambda: h.live() == 0)
        assert h.outcomes()["failed"] == 1


async def test_a_bug_of_ours_is_a_500_without_its_words(monkeypatch):
    async with house() as h:
        monkeypatch.setattr(h.admission, "submit", lambda spec: 1 / 0)
        answer, value = await refused(h, "POST", CHAT, json=chat())
        assert answer.status == 500
        assert "division" not in json.dumps(value)
        openai(value, "internal_error")


def test_the_documentation_lists_every_code_and_path():
    """Who meets one at night looks it up there."""
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    assert [code.value for code in ErrorCode if f"`{code.value}`" not in text] == []
    named = {name.strip("`").split("?")[0] for name in re.findall(r"`[^`]+`", text)}
    named |= {name.partition(" ")[2] for name in named}
    assert sorted(set(INFERENCE) - named) == []
