"""Keys, Host and Origin rules, model globs, priorities."""

import json
import re

import aiohttp
import pytest

from .test_forward import CHAT, chat
from .world import house, settings

KEYS = {
    "api_keys": [
        {"name": "alice", "key": "alice-key", "class": "interactive", "models": ["small-*"]},
        {"name": "bob", "key": "bob-key"},
    ],
    "admin_keys": [{"name": "root", "key": "root-key"}],
    "metrics_key": "scrape-key",
}
MODELS = {
    "small-1": {"path": "a.gguf", "aliases": ["tiny"]},
    "large-1": {"path": "b.gguf", "aliases": ["big"]},
}


async def status(h, method="POST", path=CHAT, headers=None, json=None):
    async with aiohttp.ClientSession(h.base) as client:
        async with client.request(method, path, headers=headers, json=json) as answer:
            body = await answer.read()
            assert not re.search(rb"(alice|bob|root|scrape)-key", body)
            return answer.status


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


async def test_inference_needs_an_api_key():
    async with house(settings(server=KEYS, models=MODELS)) as h:
        body = chat(model="small-1")
        assert await status(h, json=body) == 401
        assert await status(h, json=body, headers=bearer("wrong")) == 401
        assert await status(h, json=body, headers=bearer("root-key")) == 401
        assert await status(h, json=body, headers={"Authorization": "Basic bob-key"}) == 401
        assert await status(h, json=body, headers=bearer("bob-key")) == 200
        assert await status(h, json=body, headers={"x-api-key": "bob-key"}) == 200
        assert await status(h, "GET", "/v1/models") == 401
        assert await status(h, "GET", "/nothing") == 401
        assert h.loads == ["small-1"]


async def test_a_key_sees_and_uses_its_models_only():
    async with house(settings(server=KEYS, models=MODELS)) as h, aiohttp.ClientSession(h.base) as client:
        alice = bearer("alice-key")
        assert await status(h, json=chat(model="small-1"), headers=alice) == 200
        assert await status(h, json=chat(model="tiny"), headers=alice) == 200
        assert await status(h, json=chat(model="large-1"), headers=alice) == 403
        assert await status(h, json=chat(model="big"), headers=alice) == 403
        async with client.get("/v1/models", headers=alice) as answer:
            assert [model["id"] for model in (await answer.json())["data"]] == ["small-1"]
        assert await status(h, "GET", "/v1/models/large-1", headers=alice) == 404


async def test_operator_paths_need_an_admin_key():
    async with house(settings(server=KEYS, models=MODELS)) as h:
        for path in ("/api/models", "/api/models/small-1"):
            assert await status(h, "GET", path) == 401
            assert await status(h, "GET", path, headers=bearer("bob-key")) == 403
            assert await status(h, "GET", path, headers=bearer("root-key")) == 200
        h.ready("small-1")
        erase = "/upstream/small-1/slots/0?action=erase"
        assert await status(h, "POST", erase, headers=bearer("bob-key"), json={}) == 403
        assert await status(h, "POST", erase, headers=bearer("root-key"), json={}) == 200
        assert h.engine.requests[-1].target == "/slots/0?action=erase"
        infer = "/upstream/small-1/v1/chat/completions"
        assert await status(h, "POST", infer, headers=bearer("bob-key"), json=chat(model="whatever")) == 200
        assert h.engine.requests[-1].target == CHAT


async def test_the_metrics_key_is_its_own():
    async with house(settings(server=KEYS, models=MODELS)) as h:
        assert await status(h, "GET", "/metrics") == 401
        assert await status(h, "GET", "/metrics", headers=bearer("root-key")) == 401
        assert await status(h, "GET", "/metrics", headers=bearer("scrape-key")) == 200
        for path in ("/healthz", "/readyz", "/health"):
            assert await status(h, "GET", path) == 200


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("localhost", 200),
        ("localhost:1", 200),
        ("app.localhost:8082", 200),
        ("127.0.0.1:8082", 200),
        ("127.9.9.9", 200),
        ("[::1]:8082", 200),
        ("box.lan:8082", 200),
        ("BOX.lan", 200),
        ("evil.example", 403),
        ("evil.example:8082", 403),
        ("localhost.evil.example", 403),
        ("192.0.2.1", 403),
        ("", 403),
    ],
)
async def test_without_keys_the_host_must_be_this_machine(host, wanted):
    async with house(settings(server={"allowed_hosts": ["box.lan"]})) as h:
        for path in ("/v1/models", "/api/models", "/props?model=demo"):
            found = await status(h, "GET", path, headers={"Host": host})
            assert found == wanted or (path.startswith("/props") and wanted == 200 and found == 503)
        assert await status(h, "GET", "/healthz", headers={"Host": host}) == 200
        for path in ("/metrics", "/health?model=demo", "/readyz"):
            found = await status(h, "GET", path, headers={"Host": host})
            assert (found == 403) is (wanted == 403), path


async def test_with_keys_any_host_name_will_do():
    async with house(settings(server=KEYS, models=MODELS)) as h:
        headers = {**bearer("bob-key"), "Host": "gateway.example"}
        assert await status(h, json=chat(model="small-1"), headers=headers) == 200


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:1"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "https://ops.example"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
async def test_foreign_pages_may_not_operate(headers, wanted):
    async with house(settings(server={"cors_origins": ["https://ops.example"]})) as h:
        assert await status(h, "GET", "/api/models", headers=headers) == wanted
        own = {"Origin": h.base}
        assert await status(h, "GET", "/api/models", headers=own) == 200
        h.ready("demo")
        async with aiohttp.ClientSession(h.base) as client:
            erase = "/upstream/demo/slots/0?action=erase"
            kind = {"Content-Type": "text/plain"}
            async with client.post(erase, data=b"{}", headers=kind) as answer:
                assert answer.status == 415


@pytest.mark.parametrize(
    ("server", "headers", "wanted"),
    [
        ({}, {}, 200),
        ({}, {"Origin": "https://evil.example"}, 403),
        ({}, {"Origin": "null"}, 403),
        ({}, {"Origin": "http://["}, 403),
        ({}, {"Origin": "http://localhost:1"}, 403),
        ({}, {"Sec-Fetch-Site": "cross-site"}, 403),
        ({}, {"Sec-Fetch-Site": "same-origin"}, 200),
        # a page of our own, behind a server that calls us by another name
        ({}, {"Origin": "https://own.example", "Sec-Fetch-Site": "same-origin"}, 200),
        # an application with a web view, not a page
        ({}, {"Origin": "vscode-webview://1ab"}, 200),
        ({"cors_origins": ["https://evil.example"]}, {"Origin": "https://evil.example"}, 200),
        ({"cors_origins": ["*"]}, {"Origin": "https://evil.example"}, 200),
        # something in front checks callers, and knows its pages
        ({"insecure_no_keys": True}, {"Origin": "https://evil.example"}, 200),
        # a page does not know the key
        (KEYS, {**bearer("bob-key"), "Origin": "https://evil.example"}, 200),
    ],
)
async def test_foreign_pages_get_nothing_done(server, headers, wanted):
    """A form, or a post without a type, goes out of a browser without a preflight: it must not load a model."""
    async with house(settings(server=server, models=MODELS)) as h:
        async with aiohttp.ClientSession(h.base) as client:
            data = json.dumps(chat(model="small-1"))
            async with client.post(
                CHAT, data=data, headers=headers, skip_auto_headers=["Content-Type"]
            ) as answer:
                assert answer.status == wanted
            kind = {"Content-Type": "multipart/form-data; boundary=B"}
            form = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nsmall-1\r\n--B--\r\n'
            async with client.post("/v1/audio/transcriptions", data=form, headers=headers | kind) as answer:
                assert answer.status == wanted
        assert await status(h, "GET", "/v1/models", headers=headers) == 200
        assert len(h.engine.requests) == (2 if wanted == 200 else 0) and h.live() == 0


async def test_a_header_lowers_a_class_and_never_raises_it():
    async with house(settings(server=KEYS, models=MODELS)) as h:
        body = chat(model="small-1")
        for key, wanted, used in [
            ("bob-key", "batch", "batch"),
            ("bob-key", "interactive", "normal"),
            ("alice-key", "normal", "normal"),
            ("alice-key", None, "interactive"),
        ]:
            before = h.sample(
                "requests_total",
                endpoint=CHAT,
                model="small-1",
                priority=used,
                code="200",
                outcome="completed",
            )
            headers = bearer(key) | ({"x-priority": wanted} if wanted else {})
            assert await status(h, json=body, headers=headers) == 200
            after = h.sample(
                "requests_total",
                endpoint=CHAT,
                model="small-1",
                priority=used,
                code="200",
                outcome="completed",
            )
            assert after == before + 1
        assert await status(h, json=body, headers=bearer("bob-key") | {"x-priority": "urgent"}) == 400


async def test_a_keys_own_queue_cap():
    keys = {"api_keys": [{"name": "a", "key": "a-key", "max_queue": 1}, {"name": "b", "key": "b-key"}]}
    async with house(settings(server=keys), auto=False) as h, aiohttp.ClientSession(h.base) as client:
        import asyncio

        from .world import until

        first = asyncio.ensure_future(client.post(CHAT, json=chat(), headers=bearer("a-key")))
        await until(lambda: h.live() == 1)
        async with client.post(CHAT, json=chat(), headers=bearer("a-key")) as answer:
            assert answer.status == 429
            assert (await answer.json())["error"]["code"] == "key_queue_full"
        second = asyncio.ensure_future(client.post(CHAT, json=chat(), headers=bearer("b-key")))
        await until(lambda: h.live() == 2)
        h.ready("demo")
        assert [(await post).status for post in (first, second)] == [200, 200]
        assert h.sample("prompt_tokens_total", model="demo", key="a") == 10
