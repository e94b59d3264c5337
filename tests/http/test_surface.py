"""The read-only surface: models, health, metrics, CORS, HEAD; forms; logs."""

import asyncio
import json

import aiohttp
import pytest
import structlog
from yarl import URL

from proxy import logs
from proxy.http.accounts import Accounts

from .test_forward import CHAT, chat
from .world import house, settings, until


async def test_models_in_openais_shape_with_aliases_state_and_description():
    models = {"demo": {"path": "demo.gguf", "aliases": ["default"], "description": "A demo model."}}
    async with house(settings(models=models)) as h, aiohttp.ClientSession(h.base) as client:
        async with client.get("/v1/models") as answer:
            value = await answer.json()
        assert value["object"] == "list"
        (model,) = value["data"]
        assert (model["id"], model["object"], model["aliases"]) == ("demo", "model", ["default"])
        assert model["description"] == "A demo model."
        assert model["meta"] == {"state": "unloaded", "n_ctx": 4096}
        for name in ("demo", "default"):
            async with client.get(f"/v1/models/{name}") as answer:
                assert (await answer.json())["id"] == "demo"
        async with client.get("/v1/models/other") as answer:
            assert answer.status == 404
        async with client.get("/api/models/default") as answer:
            assert await answer.json() == {"id": "demo", "state": "unloaded"}
        assert h.loads == []


async def test_a_model_name_with_a_slash():
    async with house(settings(models={"org/name": {"path": "x.gguf"}})) as h:
        async with aiohttp.ClientSession(h.base) as client:
            async with client.get("/v1/models/org/name") as answer:
                assert answer.status == 200
            target = URL(f"{h.base}/upstream/org%2Fname{CHAT}", encoded=True)
            async with client.post(target, json=chat(model="x")) as answer:
                assert answer.status == 200


async def test_reads_of_an_engine_never_load_it():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        for path in ("/props?model=demo", "/slots?model=demo", "/upstream/demo/props"):
            async with client.get(path) as answer:
                assert answer.status == 503
                assert (await answer.json())["error"]["code"] == "no_backend"
        assert h.loads == []
        h.ready("demo")
        async with client.get("/props?model=default") as answer:
            assert answer.status == 200
            assert (await answer.json())["echo"] == "/props"
        async with client.get("/health?model=demo") as answer:
            assert await answer.json() == {"status": "ok", "model": "demo"}
        async with client.head("/slots?model=demo") as answer:
            assert answer.status == 200
        await until(lambda: h.live() == 0)


async def test_health_of_an_unloaded_model():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.get("/health?model=demo") as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"]
        async with client.get("/health?model=nope") as answer:
            assert answer.status == 404
        async with client.get("/v1/health") as answer:
            assert await answer.json() == {"status": "ok"}


async def test_things_that_cost_no_capacity():
    async with house(auto=False) as h, aiohttp.ClientSession(h.base) as client:
        for path in ("/v1/models", "/healthz", "/metrics", "/favicon.ico"):
            async with client.head(path) as answer:
                assert answer.status in {200, 204}
                assert await answer.read() == b""
        async with client.get("/metrics") as answer:
            text = await answer.text()
            assert answer.content_type == "text/plain"
            assert 'llama_proxy_queue_size{model="demo",priority="normal"} 0.0' in text
        assert h.live() == 0


async def test_cors_for_configured_origins_only():
    async with house(settings(server={"cors_origins": ["https://app.example"]})) as h:
        async with aiohttp.ClientSession(h.base) as client:
            asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
            async with client.options(CHAT, headers=asked) as answer:
                assert answer.status == 204
                assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
                assert "POST" in answer.headers["Access-Control-Allow-Methods"]
                assert "authorization" in answer.headers["Access-Control-Allow-Headers"]
            # an SDK in a web page sends fields of its own
            fields = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os, x odd,"}
            async with client.options(CHAT, headers={**asked, **fields}) as answer:
                allowed = answer.headers["Access-Control-Allow-Headers"]
                assert allowed == "authorization, content-type, x-stainless-os"
            async with client.options(CHAT, headers={"Origin": "https://evil.example", **fields}) as answer:
                assert "x-stainless-os" not in answer.headers["Access-Control-Allow-Headers"]
            for body, wanted in ((chat(), 200), (chat(True), 200), (chat(model="nope"), 404)):
                async with client.post(CHAT, json=body, headers={"Origin": "https://app.example"}) as answer:
                    assert answer.status == wanted
                    assert answer.headers["Access-Control-Allow-Origin"] == "https://app.example"
            async with client.post(CHAT, json=chat(), headers={"Origin": "https://evil.example"}) as answer:
                assert "Access-Control-Allow-Origin" not in answer.headers
            async with client.options(CHAT, headers={"Origin": "https://evil.example"}) as answer:
                assert "Access-Control-Allow-Origin" not in answer.headers
            async with client.options("/nothing", headers=asked) as answer:
                assert answer.status == 404


async def test_a_form_passes_byte_for_byte():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        data = (
            b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\ndefault\r\n'
            b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\0\xff\r\n--B--\r\n'
        )
        kind = {"Content-Type": "multipart/form-data; boundary=B"}
        async with client.post("/v1/audio/transcriptions", data=data, headers=kind) as answer:
            assert answer.status == 200
        assert h.engine.requests[0].body == data
        assert h.engine.requests[0].header("content-type") == [kind["Content-Type"]]


@pytest.mark.parametrize(
    ("path", "body", "tasks"),
    [
        ("/v1/embeddings", {"input": [str(n) for n in range(100)]}, 100),
        ("/v1/completions", {"prompt": ["a", "b", "c"], "n": 2}, 6),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, 2),
        ("/tokenize", {"content": "a"}, 0),
        ("/v1/messages/count_tokens", {"messages": []}, 0),
    ],
)
async def test_tasks_are_charged_as_the_engine_counts_them(path, body, tasks):
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        submitted = []
        real = h.admission.submit
        h.admission.submit = lambda spec: (submitted.append(spec), real(spec))[1]
        async with client.post(path, json={"model": "demo", **body}) as answer:
            assert answer.status == 200
        assert submitted[0].tasks == tasks


async def test_one_line_per_request_without_words_or_keys():
    keys = {"api_keys": [{"name": "alice", "key": "very-secret"}]}
    async with house(settings(server=keys)) as h, aiohttp.ClientSession(h.base) as client:
        with structlog.testing.capture_logs() as lines:
            headers = {"Authorization": "Bearer very-secret", "x-request-id": "abc"}
            body = {**chat(True, tokens=3), "messages": [{"role": "user", "content": "private words"}]}
            async with client.post(CHAT, json=body, headers=headers) as answer:
                await answer.read()
            async with client.get("/healthz"):
                pass
            await until(lambda: any(line["event"] == "request" for line in lines))
        (line,) = [line for line in lines if line["event"] == "request" and line["log_level"] == "info"]
        assert line["id"] == "abc"
        assert line["key"] == "alice"
        assert (line["model"], line["outcome"], line["status"], line["chunks"]) == (
            "demo",
            "completed",
            200,
            3,
        )
        assert (line["prompt_tokens"], line["cached_tokens"], line["generated_tokens"]) == (10, 3, 5)
        assert line["queue_ms"] >= 0
        assert list(line["states_ms"])[:2] == ["queued", "granted"]
        assert all(spent >= 0 for spent in line["states_ms"].values())
        assert sum(line["states_ms"].values()) <= line["duration_ms"] + 1
        text = json.dumps(lines, default=str)
        assert "private words" not in text
        assert "very-secret" not in text


async def test_lines_are_written_together_and_none_is_lost():
    from proxy.headers import RequestId
    from proxy.http.call import Call
    from proxy.metrics import Metrics
    from proxy.types import Dialect

    with structlog.testing.capture_logs() as lines:
        accounts = Accounts(Metrics())
        accounts._log = logs.get("http")
        for number in range(450):
            call = Call(
                RequestId(f"r{number}", f"r{number}"), "POST", CHAT, Dialect.OPENAI, 1.0, endpoint=CHAT
            )
            accounts.finish(call, 2.0)
        assert len(lines) == 400
        await asyncio.sleep(0.3)
        assert len(lines) == 450
        accounts.finish(call, 2.0)
        accounts.flush()
        assert len(lines) == 451
