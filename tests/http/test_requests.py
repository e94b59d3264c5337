"""`/api/requests` and `/api/events`: what operators see of requests, and the cancel."""

import asyncio
import contextlib
import json
import socket

import aiohttp

from proxy.http import events as events_module
from proxy.http import hub as hub_module
from proxy.http.hub import MAX_EVENTS, EventHub
from proxy.types import AdminState

from .test_failures import last_event, whole_events
from .test_forward import CHAT, chat
from .world import house, raw, settings, until

KEYS = {
    "api_keys": [{"name": "alice", "key": "ka", "class": "interactive"}],
    "admin_keys": [{"name": "ops", "key": "adm"}],
}
ADMIN = {"Authorization": "Bearer adm"}
ALICE = {"Authorization": "Bearer ka"}


class Watcher:
    """A reader of `/api/events`; keeps what came."""

    def __init__(self, response):
        self.response = response
        self.events: list[tuple[int, str, dict]] = []
        self.comments = 0

    async def next(self, within=5.0):
        """Return the next event's (name, data), passing over comments; None at the end of the stream."""
        async with asyncio.timeout(within):
            while True:
                try:
                    block = (await self.response.content.readuntil(b"\n\n")).decode()
                except asyncio.IncompleteReadError:
                    return None
                if not block:
                    return None
                fields = dict(line.split(": ", 1) for line in block.rstrip("\n").split("\n"))
                if "event" not in fields:
                    self.comments += 1
                    continue
                self.events.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
                return self.events[-1][1:]

    async def until(self, kind, within=5.0, **wanted):
        """Read on to an event of this kind with these values."""
        async with asyncio.timeout(within):
            while (event := await self.next(within)) is not None:
                name, data = event
                if name == kind and all(data.get(key) == value for key, value in wanted.items()):
                    return data
            raise AssertionError(f"the stream ended without {kind} {wanted}: {self.events[-3:]}")


async def test_a_request_is_shown_with_its_state_place_and_reason():
    configured = settings(server=KEYS, models={"demo": {"path": "x", "budgets": {"total_timeout_s": 60}}})
    async with house(configured, slots=1) as h, aiohttp.ClientSession(h.base) as client:
        running = await client.post(
            CHAT, json=chat(True, tokens=100_000, pace_ms=2), headers={**ALICE, "x-request-id": "one"}
        )
        await running.content.readuntil(b"t2")
        waiting = [
            asyncio.ensure_future(
                client.post(CHAT, json=chat(), headers={**ALICE, "x-request-id": name, "x-priority": "batch"})
            )
            for name in ("two", "three/3")
        ]
        await until(lambda: h.live() == 3)
        async with client.get("/api/requests", headers=ADMIN) as answer:
            listed = (await answer.json())["requests"]
        one, two, three = listed
        assert (one["id"], one["model"], one["key"], one["class"]) == ("one", "demo", "alice", "interactive")
        assert (one["state"], one["reason"], one["position"]) == ("generating", None, 0)
        assert (one["backend"], one["phase"]) == ("demo-0", "generate")
        assert one["tokens"] >= 2
        assert 0 < one["age_s"] < 30
        assert 0 < one["budgets_left_s"]["inter_token_timeout_s"] <= 120
        assert 0 < one["budgets_left_s"]["total_timeout_s"] < 60
        assert (two["state"], two["reason"], two["position"], two["class"]) == (
            "queued",
            "no_free_slot",
            1,
            "batch",
        )
        assert 590 < two["budgets_left_s"]["queue_timeout_s"] < 600
        assert 0 < two["budgets_left_s"]["load_timeout_s"] <= 900
        assert two["waits_s"]["no_free_slot"] >= 0
        assert (three["position"], three["request_id"]) == (2, "three/3")
        assert three["id"] != "three/3"
        async with client.get("/api/requests?model=nobody", headers=ADMIN) as answer:
            assert answer.status == 404
        async with client.get("/api/requests?model=demo", headers=ADMIN) as answer:
            assert len((await answer.json())["requests"]) == 3
        running.close()
        for post in waiting:
            (await post).close()
        await until(lambda: h.live() == 0)


async def test_cancel_before_the_first_byte_is_a_503_and_after_it_an_event():
    configured = settings(server=KEYS)
    async with house(configured, slots=1) as h, aiohttp.ClientSession(h.base) as client:
        running = await client.post(
            CHAT, json=chat(True, tokens=100_000, pace_ms=2), headers={**ALICE, "x-request-id": "one"}
        )
        seen = await h.engine.seen(1)
        await running.content.readuntil(b"t2")
        posts = {
            name: asyncio.ensure_future(
                client.post(CHAT, json=chat(stream), headers={**ALICE, "x-request-id": name})
            )
            for name, stream in (("two", False), ("three", True))
        }
        await until(lambda: h.live() == 3)
        for name in ("two", "three", "one"):
            async with client.delete(f"/api/requests/{name}", headers=ADMIN) as answer:
                assert answer.status == 200
                told = await answer.json()
                assert (told["ok"], told["id"], told["model"]) == (True, name, "demo")
        for post in posts.values():
            async with await asyncio.wait_for(post, 20) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (503, "cancelled_by_operator")
                assert "ops" in error["message"]
        body = await running.read()
        whole_events(body)
        assert last_event(body)[1]["error"]["code"] == "cancelled_by_operator"
        await asyncio.wait_for(seen.gone.wait(), 20)
        await until(lambda: h.live() == 0)
        assert h.outcomes()["cancelled"] == 3
        for name in ("one", "nobody", "..", "%00"):
            async with client.delete(f"/api/requests/{name}", headers=ADMIN) as answer:
                assert answer.status == 404, name


async def test_a_second_cancel_while_the_engine_lets_go_changes_nothing():
    """The ticket is still there, charged as cancelling: the same answer, no second outcome."""
    configured = settings(server=KEYS)
    async with house(configured, slots=1) as h, aiohttp.ClientSession(h.base) as client:
        h._snapshot = lambda key: None  # the engine says nothing more
        running = await client.post(
            CHAT, json=chat(True, tokens=100_000, pace_ms=2), headers={**ALICE, "x-request-id": "one"}
        )
        await running.content.readuntil(b"t2")
        h._poller.cancel()
        for _ in range(3):
            async with client.delete("/api/requests/one", headers=ADMIN) as answer:
                assert (answer.status, (await answer.json())["status"]) in {(200, "cancelled"), (404, None)}
        await running.read()
        await until(lambda: h.outcomes()["cancelled"] == 1)


async def test_only_an_operator_may_look_and_cancel():
    async with house(settings(server=KEYS)) as h, aiohttp.ClientSession(h.base) as client:
        for method, path in (("GET", "/api/requests"), ("DELETE", "/api/requests/x"), ("GET", "/api/events")):
            for headers, status in (
                ({}, 401),
                (ALICE, 403),
                ({**ADMIN, "Origin": "http://evil.example"}, 403),
            ):
                async with client.request(method, path, headers=headers) as answer:
                    assert answer.status == status, (method, path, headers)


async def test_without_keys_the_host_and_origin_rules_guard():
    async with house() as h:
        for extra in ("Host: evil.example", "Host: localhost\r\nOrigin: http://evil.example"):
            for line in ("DELETE /api/requests/x", "GET /api/events", "GET /api/requests"):
                answer = await raw(
                    h.port, f"{line} HTTP/1.1\r\n{extra}\r\nConnection: close\r\n\r\n".encode()
                )
                assert answer.startswith(b"HTTP/1.1 403"), (line, extra)


async def test_events_begin_with_a_snapshot_and_tell_a_whole_life():
    configured = settings(server=KEYS)
    async with house(configured, slots=1) as h, aiohttp.ClientSession(h.base) as client:
        running = await client.post(
            CHAT, json=chat(True, tokens=100_000, pace_ms=2), headers={**ALICE, "x-request-id": "one"}
        )
        await running.content.readuntil(b"t2")
        headers = {**ADMIN, "Last-Event-ID": "77"}
        async with client.get("/api/events", headers=headers) as stream:
            assert stream.headers["Content-Type"] == "text/event-stream"
            watcher = Watcher(stream)
            name, snapshot = await watcher.next()
            assert name == "snapshot"
            assert [request["id"] for request in snapshot["requests"]] == ["one"]
            assert [model["id"] for model in snapshot["models"]] == ["demo"]
            post = asyncio.ensure_future(
                client.post(CHAT, json=chat(True, tokens=3), headers={**ALICE, "x-request-id": "two"})
            )
            two = await watcher.until("request", id="two", state="queued")
            assert (two["position"], two["reason"], two["key"]) == (1, "no_free_slot", "alice")
            assert (await watcher.until("request", id="one"))["tokens"] > 2
            h.admission.set_gate("demo", AdminState.BLOCKED, "maintenance")
            assert (await watcher.until("gate", model="demo"))["reason"] == "maintenance"
            await watcher.until("request", id="two", reason="gate_blocked")
            h.admission.set_gate("demo", AdminState.ENABLED)
            running.close()
            assert (await watcher.until("outcome", id="one"))["outcome"] == "cancelled"
            ended = await watcher.until("outcome", id="two")
            assert (ended["outcome"], ended["code"]) == ("completed", "")
            await watcher.until("gone", id="two")
            await (await post).read()
        numbers = [number for number, _, _ in watcher.events]
        assert numbers == sorted(set(numbers))
        await until(lambda: not h.hub.watched)
        await until(lambda: h.live() == 0)


async def test_every_watcher_gets_a_snapshot_that_is_continued(monkeypatch):
    """One that joins between two comparisons learns of the end of what its snapshot showed."""
    monkeypatch.setattr(events_module, "COMPARE_S", 0.5)
    async with house(slots=1) as h, aiohttp.ClientSession(h.base) as client:
        async with client.get("/api/events") as first:
            assert (await Watcher(first).next())[0] == "snapshot"
            answer = await client.post(CHAT, json=chat(True, tokens=100_000, pace_ms=2))
            await answer.content.readuntil(b"t2")
            async with client.get("/api/events") as second:
                watcher = Watcher(second)
                [request] = (await watcher.next())[1]["requests"]
                answer.close()
                await watcher.until("gone", id=request["id"])


async def test_a_slow_watcher_is_dropped_and_told_so_and_others_are_not_held_up():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.get("/api/events") as slow, client.get("/api/events") as quick:
            reader = Watcher(quick)
            assert (await reader.next())[0] == "snapshot"
            big = {"text": "x" * 20_000}
            seen = 0
            await until(lambda: len(h.hub._subscriptions) == 2)
            while len(h.hub._subscriptions) == 2:
                h.hub.publish("model", big)
                assert await reader.next() == ("model", big)
                seen += 1
                assert seen < 10 * MAX_EVENTS
            h.hub.publish("model", {"text": "after"})
            assert (await reader.next())[1] == {"text": "after"}
            late = Watcher(slow)
            while (event := await late.next()) is not None and event[0] != "end":
                pass
            assert event is not None and "too slow" in event[1]["reason"]
            assert await late.next() is None


async def test_a_watcher_that_reads_nothing_is_cut(monkeypatch):
    monkeypatch.setattr(events_module, "WRITE_S", 0.3)
    async with house() as h:
        with socket.create_connection(("127.0.0.1", h.port), timeout=10) as sock:
            sock.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: h.hub.watched)
            big = {"text": "x" * 100_000}

            def dropped():
                h.hub.publish("model", big)
                return not h.hub.watched

            await until(dropped, 20)
            await until(lambda: not h._runner.server.connections, 10)
            held = bytearray()
            with contextlib.suppress(ConnectionError):
                while data := sock.recv(1 << 20):
                    held += data
        assert b"event: end" not in held


async def test_streams_end_with_a_reason_at_shutdown():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.get("/api/events") as stream:
            watcher = Watcher(stream)
            assert (await watcher.next())[0] == "snapshot"
            cleanup = asyncio.ensure_future(h._runner.cleanup())
            assert "shutting down" in (await watcher.until("end"))["reason"]
            assert await watcher.next() is None
            await cleanup


async def test_idle_streams_carry_comments(monkeypatch):
    monkeypatch.setattr(events_module, "IDLE_COMMENT_S", 0.05)
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.get("/api/events") as stream:
            await stream.content.readuntil(b": nothing new\n\n")


async def test_the_number_of_watchers_is_bounded(monkeypatch):
    monkeypatch.setattr(hub_module, "MAX_SUBSCRIBERS", 1)
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.get("/api/events") as stream:
            assert (await Watcher(stream).next())[0] == "snapshot"
            async with client.get("/api/events") as refused:
                assert refused.status == 429
                assert refused.headers["Retry-After"]
        await until(lambda: not h.hub.watched)
        async with client.get("/api/events") as stream:
            assert stream.status == 200


async def test_a_hub_without_watchers_makes_nothing():
    hub = EventHub()
    hub.publish("model", {"not": object()})
    assert not hub.watched
