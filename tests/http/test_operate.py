"""Operators' orders over HTTP, on the whole proxy without an engine: shapes, refusals, audit, what survives."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from proxy.app.engines import Engines
from proxy.app.parts import Proxy
from proxy.http.server import ProxyRunner
from proxy.settings import Settings
from proxy.state import StateDir

from .test_requests import Watcher

KEYS = {
    "api_keys": [{"name": "alice", "key": "ka"}],
    "admin_keys": [{"name": "ops", "key": "adm"}],
}
ADMIN = {"Authorization": "Bearer adm"}
ALICE = {"Authorization": "Bearer ka"}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def proxy(state=None, *, server=None, reread=None, **sections):
    """The composition with its fleet; no llama-server exists, so every load fails with the reason."""
    sections.setdefault(
        "models", {"demo": {"path": "demo.gguf", "aliases": ["default"]}, "other": {"path": "o.gguf"}}
    )
    settings = Settings.model_validate({"server": KEYS if server is None else server, **sections})
    made = Proxy(settings, Engines(settings, None), state=StateDir.open(state), reread=reread)
    await made.fleet.start()
    runner = ProxyRunner(made.http(), settings)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession(url, headers=ADMIN) as client:
            yield made, client
    finally:
        await made.fleet.stop(1)
        await runner.cleanup()
        made.admission.close()


async def ask(client, method, path, body=None, *, headers=None):
    """Return status and decoded body."""
    async with client.request(
        method, path, json=body if body is not None else {} if method == "POST" else None, headers=headers
    ) as answer:
        return answer.status, await answer.json()


async def test_every_order_wants_an_admin_key_json_and_an_own_origin():
    """The same doors for every operator path: no key 401, API key 403, foreign page 403, other types 415."""
    paths = [
        ("POST", "/api/models/demo/load"),
        ("POST", "/api/models/demo/unload"),
        ("POST", "/api/models/demo/reconcile"),
        ("POST", "/api/models/demo/gate"),
        ("POST", "/api/gate"),
        ("GET", "/api/models/demo/logs"),
        ("GET", "/api/jobs"),
        ("GET", "/api/jobs/x"),
        ("GET", "/api/leases"),
        ("POST", "/api/leases"),
        ("DELETE", "/api/leases/x"),
        ("POST", "/models/load"),
        ("POST", "/models/unload"),
    ]
    async with proxy() as (made, client):
        for method, path in paths:
            for headers, status in (
                ({"Authorization": ""}, 401),
                (ALICE, 403),
                ({"Origin": "https://evil.example"}, 403),
            ):
                found, body = await ask(client, method, path, headers=headers)
                assert found == status and body["error"]["code"], (method, path, headers, body)
            if method == "POST":
                async with client.post(path, data="{}", headers={"Content-Type": "text/plain"}) as answer:
                    assert answer.status == 415, path
        assert made.fleet.jobs.all() == () and made.fleet.leases.held() == ()
    async with proxy(server={}) as (_, client):
        for method, path in paths:
            status, body = await ask(client, method, path, headers={"Host": "rebound.example"})
            assert (status, body["error"]["code"]) == (403, "permission_denied"), path


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/api/models/demo/load", {"now": 1}, "now", "no such field"),
        ("/api/models/demo/load?wait=soon", {}, "wait", "seconds"),
        ("/api/models/demo/load?wait=-1", {}, "wait", "seconds"),
        ("/api/models/demo/unload", {"deadline_s": -1}, "deadline_s", "greater than or equal to 0"),
        ("/api/models/demo/unload", {"deadline_s": "5"}, "deadline_s", "number"),
        ("/api/models/demo/unload", {"force": "yes"}, "force", "boolean"),
        ("/api/models/demo/unload", {"then": "shut"}, "then", "'open' or 'block'"),
        ("/api/models/demo/unload", {"force": True, "deadline_s": 3}, "deadline_s", "leave out"),
        ("/api/models/demo/unload", {"reason": "x" * 501}, "reason", "500"),
        ("/api/models/demo/gate", {}, "state", "missing"),
        ("/api/models/demo/gate", {"state": "closed"}, "state", "'blocked' or 'open'"),
        ("/api/models/demo/gate", {"state": "blocked", "mode": "x"}, "mode", "'hold' or 'reject'"),
        ("/api/gate", {"state": "open", "reason": "x"}, "reason", "leave it out"),
        ("/api/leases", {}, "ttl_s", "missing"),
        ("/api/leases", {"ttl_s": 0}, "ttl_s", "greater than 0"),
        ("/api/leases", {"ttl_s": 1e12}, "ttl_s", "at most"),
        ("/models/load", {}, "model", "missing"),
        ("/models/unload", {"model": ""}, "model", "at least 1"),
    ],
)  # fmt: skip
async def test_a_refusal_names_the_field(path, body, param, words):
    async with proxy() as (made, client):
        status, answer = await ask(client, "POST", path, body)
        assert status == 400 and answer["error"]["param"] == param, answer
        assert words in answer["error"]["message"] and param in answer["error"]["message"]
        assert made.fleet.jobs.all() == () and made.fleet.gates.gate("demo").open


async def test_bodies_that_are_no_objects_and_names_that_do_not_exist():
    async with proxy() as (_, client):
        for data, code in ((b"{", "invalid_json"), (b"[]", "invalid_request"), (b"3", "invalid_request")):
            async with client.post(
                "/api/models/demo/unload", data=data, headers={"Content-Type": "application/json"}
            ) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (400, code)
        big = {"reason": "x" * 70_000}
        assert (await ask(client, "POST", "/api/leases", big))[0] == 413
        for path in ("load", "unload", "reconcile", "gate"):
            body = {"state": "open"} if path == "gate" else {}
            status, answer = await ask(client, "POST", f"/api/models/nope/{path}", body)
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
        for method, path in (("GET", "/api/jobs/x"), ("DELETE", "/api/leases/x")):
            status, answer = await ask(client, method, path)
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "not_found", "id")
        for path in ("/api/jobs?model=nope", "/api/models/nope/logs"):
            assert (await ask(client, "GET", path))[0] == 404
        for path in ("lines=-1", "lines=many", "follow=perhaps", "lines=1000000"):
            status, answer = await ask(client, "GET", f"/api/models/demo/logs?{path}")
            assert status == 400 and answer["error"]["param"] == path.split("=")[0]


async def test_a_load_that_fails_is_told_with_its_job():
    async with proxy() as (made, client):
        status, answer = await ask(client, "POST", "/api/models/default/load?wait=10")
        assert (status, answer["error"]["code"]) == (502, "model_load_failed")
        assert "engine build" in answer["error"]["message"]
        job = answer["job"]
        assert (job["kind"], job["model"], job["state"], job["cause"]) == (
            "load",
            "demo",
            "failed",
            "operator",
        )
        assert job["by"] == {"key": "ops", "address": "127.0.0.1"} and job["code"] == "model_load_failed"
        assert (await ask(client, "GET", f"/api/jobs/{job['id']}"))[1] == job
        listed = (await ask(client, "GET", "/api/jobs?model=demo"))[1]["jobs"]
        assert [one["id"] for one in listed] == [job["id"]]
        assert (await ask(client, "GET", "/api/jobs?model=other"))[1] == {"jobs": []}
        assert made.fleet.jobs.get(job["id"]).audit.key == "ops"


async def test_the_unload_of_what_is_not_loaded_is_a_success():
    async with proxy() as (made, client):
        status, answer = await ask(client, "POST", "/api/models/demo/unload", {"reason": "tidy"})
        assert (status, answer["ok"], answer["status"], answer["force"]) == (200, True, "unloaded", False)
        assert answer["job"]["state"] == "done"
        status, answer = await ask(
            client,
            "POST",
            "/api/models/demo/unload",
            {"force": True, "then": "block", "reason": "new weights"},
        )
        assert (status, answer["ok"], answer["status"], answer["force"]) == (200, True, "unloaded", True)
        assert answer["cancelled"] == {"queued": 0, "running": 0} and answer["was"] == "unloaded"
        assert answer["job"]["kind"] == "force" and answer["job"]["state"] == "done"
        assert made.fleet.gates.gate("demo").reason == "new weights"
        status, answer = await ask(client, "POST", "/api/models/demo/unload", {"force": True, "then": "open"})
        assert status == 200 and made.fleet.gates.gate("demo").open
        status, answer = await ask(client, "POST", "/api/models/demo/reconcile")
        assert (status, answer["clean"], answer["found"]) == (200, True, [])


async def test_a_gate_refuses_with_the_reason_holds_survives_and_opens(tmp_path):
    """Also the way back: who is held when the proxy goes is told so, and the next one still has the gate."""
    async with proxy(tmp_path) as (made, client):
        gate = {"state": "blocked", "reason": "disk swap", "mode": "reject"}
        status, answer = await ask(client, "POST", "/api/models/demo/gate", {**gate, "dry_run": True})
        assert status == 200 and answer["dry_run"] and made.fleet.gates.gate("demo").open
        status, answer = await ask(client, "POST", "/api/models/demo/gate", gate)
        assert status == 200 and answer["warning"] is None
        [shown] = answer["models"]
        assert shown["was"]["state"] == "open" and shown["gate"]["state"] == "blocked"
        assert shown["gate"]["by"] == {"key": "ops", "address": "127.0.0.1"}
        status, answer = await ask(client, "POST", "/v1/chat/completions", CHAT, headers=ALICE)
        assert (status, answer["error"]["code"]) == (503, "gate_blocked")
        assert "disk swap" in answer["error"]["message"]
        described = (await ask(client, "GET", "/api/models/demo"))[1]
        assert described["gate"]["reason"] == "disk swap" and described["admin"] == "blocked"
        await ask(client, "POST", "/api/gate", {"state": "blocked", "reason": "all", "mode": "hold"})
        assert {made.fleet.gates.gate(name).reason for name in ("demo", "other")} == {"all"}
        held = asyncio.ensure_future(ask(client, "POST", "/v1/chat/completions", CHAT, headers=ALICE))
        while not made.admission.tickets():
            await asyncio.sleep(0.005)
        status, answer = await ask(
            client, "POST", "/api/models/demo/unload", {"force": True, "dry_run": True}
        )
        assert status == 200 and answer["cancelled"] == {"queued": 1, "running": 0}
        assert len(answer["requests"]["queued"]) == 1 and not held.done()
        status, answer = await ask(
            client, "POST", "/api/models/demo/unload", {"force": True, "then": "block", "reason": "gone"}
        )
        assert status == 200 and answer["cancelled"] == {"queued": 1, "running": 0}
        status, body = await held
        assert (status, body["error"]["code"]) == (503, "model_unloaded") and "gone" in body["error"][
            "message"
        ]
    async with proxy(tmp_path) as (made, client):
        assert (
            made.fleet.gates.gate("demo").reason == "gone" and made.fleet.gates.gate("other").reason == "all"
        )
        assert made.admission.view("demo").gate.value == "blocked"
        status, answer = await ask(client, "POST", "/api/gate", {"state": "open"})
        assert [one["gate"]["state"] for one in answer["models"]] == ["open", "open"]
        assert made.admission.view("demo").gate.value == "enabled"


async def test_leases_are_held_listed_released_and_told(tmp_path):
    async with proxy(tmp_path) as (made, client):
        async with client.get("/api/events") as stream:
            watcher = Watcher(stream)
            first = await watcher.until("snapshot")
            assert first["leases"] == [] and first["jobs"] == []
            status, lease = await ask(client, "POST", "/api/leases", {"ttl_s": 60, "reason": "backup"})
            assert status == 201 and lease["warning"] is None and 50 < lease["left_s"] <= 60
            assert lease["by"] == {"key": "ops", "address": "127.0.0.1"}
            told = await watcher.until("lease", id=lease["id"])
            assert told["held"] and told["reason"] == "backup"
            assert made.fleet.leases.awake()
            await ask(client, "POST", "/api/models/demo/load?wait=10")
            failed = await watcher.until("job", model="demo", state="failed")
            assert failed["code"] == "model_load_failed"
            await ask(client, "POST", "/api/models/demo/gate", {"state": "blocked", "reason": "why"})
            gate = await watcher.until("gate", model="demo")
            assert (gate["state"], gate["reason"]) == ("blocked", "why")
            assert [one["id"] for one in (await ask(client, "GET", "/api/leases"))[1]["leases"]] == [
                lease["id"]
            ]
            status, gone = await ask(client, "DELETE", f"/api/leases/{lease['id']}")
            assert status == 200 and gone["status"] == "released"
            assert not (await watcher.until("lease", id=lease["id"]))["held"]
        assert (await ask(client, "GET", "/api/leases"))[1] == {"leases": []}


async def test_an_unusable_state_folder_is_said_and_costs_nothing_else(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    async with proxy(blocked) as (made, client):
        _, answer = await ask(client, "POST", "/api/models/demo/gate", {"state": "blocked"})
        assert "server.state_dir" in answer["warning"] and not made.fleet.gates.gate("demo").open
        _, lease = await ask(client, "POST", "/api/leases", {"ttl_s": 5})
        assert "server.state_dir" in lease["warning"]
        _, models = await ask(client, "GET", "/api/models")
        assert "server.state_dir" in models["warnings"][0]


async def test_the_routers_paths():
    """Shapes of llama.cpp's router: names with a status, and `success`."""
    async with proxy() as (made, client):
        status, listed = await ask(client, "GET", "/models", headers=ALICE)
        assert status == 200 and [one["id"] for one in listed["data"]] == ["demo", "other"]
        assert {one["status"]["value"] for one in listed["data"]} == {"unloaded"}
        body = {"model": "default", "extra_args": []}
        assert await ask(client, "POST", "/models/load", body) == (200, {"success": True})
        [job] = made.fleet.jobs.all("demo")
        await made.fleet.jobs.wait(job.id, 10)
        _, listed = await ask(client, "GET", "/models", headers=ALICE)
        assert listed["data"][0]["status"] == {"value": "unloaded", "failed": True}
        assert await ask(client, "POST", "/models/unload", {"model": "demo"}) == (200, {"success": True})
        assert (await ask(client, "POST", "/models/load", {"model": "nope"}))[0] == 404


async def test_the_log_is_text_or_events_and_a_reader_that_lags_is_dropped():
    async with proxy() as (made, client):
        runner = made.fleet._runner("demo")
        feed = runner._recipe.feed
        async with client.get("/api/models/demo/logs") as answer:
            assert answer.status == 200 and answer.content_type == "text/plain" and await answer.text() == ""
        async with client.get("/api/models/demo/logs?follow=1&lines=0") as text:
            accept = {"Accept": "text/event-stream"}
            async with client.get("/api/models/demo/logs?follow=1", headers=accept) as events:
                assert events.content_type == "text/event-stream"
                feed.push(["one", "zwei ü"])
                assert await asyncio.wait_for(text.content.readline(), 5) == b"one\n"
                assert (await asyncio.wait_for(text.content.readline(), 5)).decode() == "zwei ü\n"
                block = await asyncio.wait_for(events.content.readuntil(b"\n\n"), 5)
                assert json.loads(block[6:]) == {"line": "one"}
                # more than a reader may lag behind, before it could be written
                feed.push(["x" * 10_000] * 40)
                rest = await asyncio.wait_for(text.content.read(), 5)
                assert rest.startswith(b"--- too slow")
                rest = await asyncio.wait_for(events.content.read(), 5)
                assert b"event: end" in rest and b"too slow" in rest
        assert not feed._followers
        async with client.get("/api/models/demo/logs?follow=1") as text:
            await made.fleet.stop(1)
            assert await asyncio.wait_for(text.content.read(), 5) == b"--- the proxy is shutting down\n"
