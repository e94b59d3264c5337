"""Engines that die, budgets that run out, operators who cut: told once, on an event boundary."""

import asyncio
import json

import aiohttp
import pytest

from proxy.errors import ErrorCode, ProxyError
from proxy.http.reply import Reply
from proxy.sse import Splitter
from proxy.types import MemberState, TicketState

from .paced import events
from .test_forward import CHAT, chat
from .test_loss import Client
from .world import house, settings, until


def last_event(body: bytes) -> tuple[str, dict]:
    """Name and data of the last event; the body must end with it."""
    assert body.endswith(b"\n\n")
    event = body.rstrip(b"\n").rsplit(b"\n\n", 1)[-1].decode()
    lines = dict(line.split(": ", 1) for line in event.split("\n"))
    return lines.get("event", ""), json.loads(lines["data"])


def whole_events(body: bytes) -> None:
    """Every event but the last is whole JSON, and the stream never claims to be done."""
    assert b"[DONE]" not in body
    for event in body.split(b"\n\n")[:-1]:
        for line in event.split(b"\n"):
            if line.startswith(b"data: "):
                json.loads(line[6:])


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/completion"])
@pytest.mark.parametrize("ends", ["\n\n", "\r\n\r\n"])
async def test_death_in_the_middle_of_an_event(path, ends):
    """The half event is dropped; one error event in the dialect follows at once, then the end."""
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(path, json=chat(True, die="mid_event", die_after=3, ends=ends)) as answer:
            body = await asyncio.wait_for(answer.read(), 20)
        name, value = last_event(body.replace(b"\r\n", b"\n"))
        whole_events(body.replace(b"\r\n", b"\n"))
        assert name == ("" if path in {CHAT, "/completion"} else "error")
        code = value["code"] if path == "/v1/responses" else value["error"]["code"]
        assert code == "upstream_error"
        sent = bytes(h.engine.requests[0].sent)
        assert body.startswith(sent[: sent.rindex(ends.encode())])
        await until(lambda: h.live() == 0)
        assert h.outcomes()["failed"] == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("die", ["early_end", "half_end", "half of the last"])
async def test_a_stream_that_only_stops_is_told_from_a_finished_one(path, die):
    """An engine that shuts down ends its chunks properly, without the last event of a whole stream, or within it."""
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        after = 4
        if die == "half of the last":
            die, after = "half_end", len(list(events(path, {}, 5, 0, "\n\n"))) - 1
        async with client.post(path, json=chat(True, die=die, die_after=after)) as answer:
            body = await answer.read()
        whole_events(body)
        assert "without finishing" in json.dumps(last_event(body)[1])
        await until(lambda: h.live() == 0)
        assert h.outcomes()["failed"] == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion", "/v1/messages", "/v1/responses"])
async def test_who_has_the_last_event_has_its_answer(path):
    """The connection is lost behind the last event: nothing is missing, and nothing may follow it."""
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(path, json=chat(True, die="after_all")) as answer:
            assert await answer.read() == bytes(h.engine.requests[0].sent)
        await until(lambda: h.live() == 0)
        assert h.outcomes()["completed"] == 1
        assert h.sample("generated_tokens_total", model="demo", key="other") > 0


async def test_a_last_event_that_is_too_long_to_hold_back_is_no_cut(monkeypatch):
    monkeypatch.setattr(Splitter.__init__, "__defaults__", (50_000,))
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        body = chat(True, tokens=0, pad=3_000_000)
        async with client.post("/completion", json=body) as answer:
            assert await answer.read() == bytes(h.engine.requests[0].sent)
        await until(lambda: h.live() == 0)
        assert h.outcomes()["completed"] == 1


async def test_an_engines_error_is_told_once_though_its_connection_is_lost_behind_it():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat(True, die="error_event then lost", die_after=4)) as answer:
            assert await answer.read() == bytes(h.engine.requests[0].sent)
        await until(lambda: h.live() == 0)
        assert h.outcomes()["failed"] == 1


async def test_an_order_behind_the_last_event_says_nothing_more():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat(True, tokens=2, pause_after=4, pause_ms=60_000)) as answer:
            read = await answer.content.readuntil(b"[DONE]\n\n")
            h.admission.end_model("demo", ProxyError(ErrorCode.MODEL_UNLOADED, "unloaded"))
            read += await asyncio.wait_for(answer.read(), 5)
            assert read == bytes(h.engine.requests[0].sent)
        await until(lambda: h.live() == 0)
        await asyncio.wait_for(h.engine.requests[0].gone.wait(), 5)


async def test_a_native_stream_of_several_prompts_that_is_lost_never_looks_whole():
    """Each prompt has a last event of its own."""
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        body = {**chat(True, die="after_all"), "prompt": ["a", "b"]}
        async with client.post("/completion", json=body) as answer:
            told = last_event(await answer.read())[1]
        assert told["error"]["code"] == "upstream_error"
        await until(lambda: h.live() == 0)
        assert h.outcomes()["failed"] == 1


async def test_a_native_stream_with_chosen_fields_may_end_anywhere_but_at_its_beginning():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        for after, outcome in ((4, "completed"), (0, "failed")):
            body = {**chat(True, die="early_end", die_after=after), "response_fields": ["content"]}
            async with client.post("/completion", json=body) as answer:
                assert (b"without finishing" in await answer.read()) is (outcome == "failed")
            await until(lambda o=outcome: h.outcomes()[o] == 1)
        await until(lambda: h.live() == 0)


@pytest.mark.parametrize("path", [CHAT, "/completion", "/v1/messages", "/v1/responses"])
async def test_the_engines_own_error_event_passes_unchanged_and_counts_as_a_failure(path):
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(path, json=chat(True, die="error_event", die_after=4)) as answer:
            assert await answer.read() == bytes(h.engine.requests[0].sent)
        await until(lambda: h.live() == 0)
        assert h.outcomes()["failed"] == 1


async def test_death_before_the_head_is_a_502():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        for stream in (True, False):
            async with client.post(CHAT, json=chat(stream, die="before_head")) as answer:
                assert answer.status == 502
                assert (await answer.json())["error"]["code"] == "upstream_error"
        await until(lambda: h.live() == 0)
        assert len(h.engine.requests) == 2


async def test_death_in_the_middle_of_a_whole_answer_never_looks_whole():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        with pytest.raises(aiohttp.ClientPayloadError):
            async with client.post(CHAT, json=chat(die="mid_body", pad=50_000)) as answer:
                await answer.read()
        await until(lambda: h.live() == 0)


async def test_a_reused_connection_that_dies_unanswered_is_retried_once_and_silently():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat()) as answer:
            await answer.read()
        await until(lambda: h.live() == 0)
        h.engine.drop_next_reused = True
        async with client.post(CHAT, json=chat()) as answer:
            assert answer.status == 200
        assert h.engine.connections == 2


async def test_what_is_known_of_a_crash_is_told_instead_of_a_torn_socket():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat(True, tokens=1000, pace_ms=5)) as answer:
            await answer.content.readuntil(b"t2")
            told = ProxyError(ErrorCode.UPSTREAM_ERROR, "llama-server was killed by signal 9")
            await h.clients[h.keys["demo"]].close()
            asyncio.get_running_loop().call_later(0.05, h.admission.backend_down, h.keys["demo"], told)
            body = await asyncio.wait_for(answer.read(), 20)
        assert "signal 9" in last_event(body)[1]["error"]["message"]
        await until(lambda: h.live() == 0)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_force_unload_ends_streams_with_an_explanation(path):
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(path, json=chat(True, tokens=100_000, pace_ms=2)) as answer:
            seen = await h.engine.seen(1)
            await answer.content.readuntil(b"t2")
            h.admission.end_model("demo", ProxyError(ErrorCode.MODEL_UNLOADED, "unloaded by root: wedged"))
            body = await asyncio.wait_for(answer.read(), 20)
        whole_events(body)
        assert last_event(body)[1]["error"]["code"] == "model_unloaded"
        await asyncio.wait_for(seen.gone.wait(), 20)
        await until(lambda: h.live() == 0)
        assert h.outcomes()["cancelled"] == 1


async def test_a_force_unload_ends_waiting_and_unanswered_requests_with_503():
    async with house(slots=1) as h, aiohttp.ClientSession(h.base) as client:
        posts = [asyncio.ensure_future(client.post(CHAT, json=chat(prefill_ms=60_000))) for _ in range(4)]
        await until(lambda: h.live() == 4)
        h.admission.end_model("demo", ProxyError(ErrorCode.MODEL_UNLOADED, "unloaded by root"))
        for post in posts:
            async with await asyncio.wait_for(post, 20) as answer:
                assert answer.status == 503
                assert (await answer.json())["error"]["code"] == "model_unloaded"
        await until(lambda: h.live() == 0)


async def test_an_operator_cancels_one_request():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        headers = {"x-request-id": "victim"}
        async with client.post(CHAT, json=chat(True, tokens=100_000, pace_ms=2), headers=headers) as answer:
            await answer.content.readuntil(b"t2")
            assert h.admission.cancel("victim", ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "by root"))
            assert last_event(await answer.read())[1]["error"]["code"] == "cancelled_by_operator"


# --- keep-alive --------------------------------------------------------------------------------------


async def test_a_stream_is_kept_alive_while_it_waits_and_then_equals_the_engines():
    configured = settings(admission={"keepalive_s": 0.05})
    async with house(configured, auto=False) as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat(True, hold="prefill")) as answer, asyncio.timeout(60):
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream"
            body = await answer.content.readuntil(b"\n\n")
            assert body == b": queued position=1 reason=model_loading\n\n"
            h.ready("demo")
            await h.engine.seen(1)
            for _ in range(3):
                event = await answer.content.readuntil(b"\n\n")
                assert event.startswith(b": ")
                body += event
            h.engine.go.release()
            body += await answer.read()
        rest = b"".join(part + b"\n\n" for part in body.split(b"\n\n")[:-1] if not part.startswith(b":"))
        assert rest == bytes(h.engine.requests[0].sent)
        await until(lambda: h.live() == 0)


async def test_a_silent_running_stream_is_kept_alive_between_events():
    configured = settings(admission={"keepalive_s": 0.1})
    async with house(configured) as h, aiohttp.ClientSession(h.base) as client:
        body = b""
        async with client.post(CHAT, json=chat(True, pause_after=3, hold="pause")) as answer:
            async with asyncio.timeout(60):
                while body.count(b": generating\n\n") < 2:
                    body += await answer.content.readuntil(b"\n\n")
                h.engine.go.release()
                body += await answer.read()
        rest = b"".join(part + b"\n\n" for part in body.split(b"\n\n")[:-1] if not part.startswith(b":"))
        assert rest == bytes(h.engine.requests[0].sent)


async def test_keepalive_can_be_refused_and_is_never_for_whole_answers():
    configured = settings(admission={"keepalive_s": 0.05})
    async with house(configured, auto=False) as h, aiohttp.ClientSession(h.base) as client:
        posts = [
            asyncio.ensure_future(client.post(CHAT, json=chat(True), headers={"x-keepalive": "off"})),
            asyncio.ensure_future(client.post(CHAT, json=chat(False))),
        ]
        await until(lambda: h.live() == 2)
        await asyncio.sleep(0.3)
        h.admission.load_failed("demo", ProxyError(ErrorCode.MODEL_LOAD_FAILED, "no such file"))
        for post in posts:
            async with await post as answer:
                assert answer.status == 502


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_after_a_keepalive_errors_are_in_the_stream(path):
    """Ours, and the engine's own words when it refuses only then."""
    configured = settings(admission={"keepalive_s": 0.05})
    async with house(configured, auto=False) as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(path, json=chat(True)) as answer:
            assert answer.status == 200
            h.admission.load_failed("demo", ProxyError(ErrorCode.MODEL_LOAD_FAILED, "no such file"))
            name, value = last_event(await answer.read())
            assert "no such file" in (value.get("message") or value["error"]["message"])
            assert name == ("" if path == CHAT else "error")
        async with client.post(path, json=chat(True, status=400)) as answer:
            assert answer.status == 200
            h.ready("demo")
            name, value = last_event(await answer.read())
            assert "the engine's own words" in (value.get("message") or value["error"]["message"])
            assert name == ("" if path == CHAT else "error")
        await until(lambda: h.live() == 0)
        assert h.outcomes()["failed"] == 2


# --- budgets -----------------------------------------------------------------------------------------


def budgeted(**budgets):
    return settings(models={"demo": {"path": "demo.gguf", "budgets": budgets}})


async def test_total_timeout_covers_the_queue_and_the_stream():
    async with house(budgeted(total_timeout_s=1.0), auto=False) as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat()) as answer:
            assert answer.status == 504
            assert (await answer.json())["error"]["code"] == "total_timeout"
        h.ready("demo")
        async with client.post(CHAT, json=chat(True, tokens=100_000, pace_ms=5)) as answer:
            assert answer.status == 200
            body = await asyncio.wait_for(answer.read(), 20)
            whole_events(body)
            assert last_event(body)[1]["error"]["code"] == "total_timeout"
        await until(lambda: h.live() == 0)
        assert h.outcomes()["expired"] == 2
        # admission's own books tell the same of both
        waits = {"model": "demo", "priority": "normal"}
        assert h.sample("queue_wait_seconds_count", **waits, outcome="expired") == 2
        assert h.sample("queue_wait_seconds_count", **waits, outcome="cancelled") == 0


async def test_who_is_told_that_its_time_is_over_holds_no_place_meanwhile(monkeypatch):
    """Its client takes the news slowly: it stands in no queue then, and is granted nothing."""
    told, go = asyncio.Event(), asyncio.Event()
    fail = Reply.fail

    async def slowly(self, error, *, on_boundary=True):
        told.set()
        await go.wait()
        await fail(self, error, on_boundary=on_boundary)

    monkeypatch.setattr(Reply, "fail", slowly)
    configured = settings(
        models={"demo": {"path": "demo.gguf", "budgets": {"total_timeout_s": 0.5}}},
        admission={"keepalive_s": 0.05},
    )
    async with house(configured, auto=False) as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat(True)) as answer:
            assert answer.status == 200
            await asyncio.wait_for(told.wait(), 20)
            assert h.live() == 0
            h.ready("demo")
            assert h.admission.view("demo").charged == 0
            go.set()
            assert last_event(await answer.read())[1]["error"]["code"] == "total_timeout"
        await until(lambda: h.outcomes()["expired"] == 1)


async def test_inter_token_timeout_counts_silence_but_not_a_pause_of_the_engine():
    async with house(budgeted(inter_token_timeout_s=0.4)) as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat(True, pause_after=3, pause_ms=60_000)) as answer:
            body = await asyncio.wait_for(answer.read(), 20)
            assert last_event(body)[1]["error"]["code"] == "inter_token_timeout"
        h.member = MemberState.PAUSED
        async with client.post(CHAT, json=chat(True, pause_after=3, pause_ms=1500)) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_first_token_timeout_counts_prefill_only_where_the_engine_tells():
    async with house(budgeted(first_token_timeout_s=0.4)) as h, aiohttp.ClientSession(h.base) as client:
        h.member = MemberState.QUEUED
        async with client.post(CHAT, json=chat(True, prefill_ms=1200)) as answer:
            assert answer.status == 200
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        h.member = MemberState.PREFILL
        for stream in (True, False):
            async with client.post(CHAT, json=chat(stream, prefill_ms=60_000)) as answer:
                assert answer.status == 504
                assert (await answer.json())["error"]["code"] == "first_token_timeout"
        await until(lambda: h.live() == 0)


async def test_first_token_timeout_counts_from_sending_on_a_stock_engine():
    async with house(budgeted(first_token_timeout_s=0.3), native=False) as h:
        async with aiohttp.ClientSession(h.base) as client:
            async with client.post(CHAT, json=chat(True, prefill_ms=60_000)) as answer:
                assert answer.status == 504
                assert (await answer.json())["error"]["code"] == "first_token_timeout"
            async with client.post(CHAT, json=chat(False, prefill_ms=1000)) as answer:
                assert answer.status == 200


async def test_a_client_that_does_not_read_does_not_use_up_the_token_budget():
    async with house(budgeted(inter_token_timeout_s=0.5)) as h:
        async with Client(h, chat(True, tokens=20_000, pad=2000)) as client:
            seen = await h.engine.seen(1)
            await client.reader.readuntil(b"t3")
            client.writer.transport.pause_reading()
            await asyncio.sleep(1.5)
            assert not seen.gone.is_set()
            assert [t.state for t in h.admission.tickets()] == [TicketState.GENERATING]
            client.writer.transport.resume_reading()
        await until(lambda: h.live() == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_never_reads_does_not_hold_its_slot_for_ever(stream):
    much = {"tokens": 30_000, "pad": 2000} if stream else {"pad": 20_000_000}
    async with house(settings(server={"stall_timeout_s": 1}), slots=1) as h:
        async with Client(h, chat(stream, **much)) as client:
            client.writer.transport.pause_reading()
            seen = await h.engine.seen(1)
            async with aiohttp.ClientSession(h.base) as other:
                async with other.post(
                    CHAT, json=chat(False, tokens=1), timeout=aiohttp.ClientTimeout(10)
                ) as answer:
                    assert answer.status == 200
            assert seen.gone.is_set()
        await until(lambda: h.sample("client_disconnects_total", model="demo", state="generating") == 1)


async def test_a_slow_reader_is_not_a_stalled_one():
    async with house(settings(server={"stall_timeout_s": 1})) as h:
        async with Client(h, chat(True, tokens=3000, pad=2000)) as client:
            began, last = asyncio.get_running_loop().time(), b""
            while b"[DONE]" not in last:
                part = await client.reader.read(300_000)
                assert part
                last = (last + part)[-200:]
                await asyncio.sleep(0.05)
            assert asyncio.get_running_loop().time() - began > 1.0


async def test_a_failed_stream_to_a_client_that_does_not_read_ends_in_bounded_time():
    async with house() as h:
        async with Client(h, chat(True, tokens=20_000, pad=2000)) as client:
            seen = await h.engine.seen(1)
            client.writer.transport.pause_reading()
            await asyncio.sleep(0.5)
            h.admission.end_model("demo", ProxyError(ErrorCode.MODEL_UNLOADED, "unloaded"))
            await asyncio.wait_for(seen.gone.wait(), 20)
            await until(lambda: h.live() == 0, 20)


async def test_shutdown_ends_streams_with_an_event():
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        async with client.post(CHAT, json=chat(True, tokens=100_000, pace_ms=2)) as answer:
            await answer.content.readuntil(b"t2")
            h.admission.shutdown(ProxyError(ErrorCode.SHUTTING_DOWN, "stopping"), cut=True)
            assert last_event(await answer.read())[1]["error"]["code"] == "shutting_down"
