"""The sampler and servers that misbehave: each is told for what it is, none holds anything up."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from proxy.clock import monotonic
from proxy.observe.account import Account
from proxy.observe.recording import Recorder, RecordingError
from proxy.observe.records import End, Mark, Record, Sample, ServerState
from proxy.observe.session import begin, observe
from proxy.observe.summary import summarize
from proxy.observe.target import parse_target
from tests.support.wait import until_async

SLOT = {"id": 0, "n_ctx": 64, "speculative": False, "is_processing": False}
PHASE = {"engine": "idle", "sealed": False, "cohort": 0, "member": "none", "decode_running_ms": 0.0}
VIEW = {"policy": "drain", "t_us": 5, "seq": 0, "lost": 0, "slots": [{**SLOT, "phase": PHASE}], "events": []}
PROPS = {
    "total_slots": 1,
    "default_generation_settings": {"n_ctx": 64},
    "phase": {"policy": "drain"},
    "is_sleeping": False,
}

Reply = tuple[int, object] | None
"""Status and JSON body; None answers nothing, ever."""


class Peer:
    """A server that answers by a script, and remembers what it was asked for."""

    def __init__(self, script: Callable[[str], Reply]) -> None:
        self.script = script
        self.asked: list[str] = []
        self.heads: list[str] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                self.asked.append(head.split()[1])
                reply = self.script(self.asked[-1].partition("?")[0])
                if reply is None:
                    await reader.read()
                    return
                status, body = reply
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


def good(path: str) -> Reply:
    return {"/props": (200, PROPS), "/slots": (200, VIEW)}.get(path, (501, {"error": {"message": "off"}}))


def but(path: str, reply: Reply) -> Callable[[str], Reply]:
    return lambda asked: reply if asked == path else good(asked)


async def seen(
    peer: Peer, until: Callable[[list[Record]], object], timeout_s: float = 10.0, **more: object
) -> list[Record]:
    """Observe a peer until the records are as wanted ; nothing may be left behind."""
    records: list[Record] = []
    stop, target = asyncio.Event(), parse_target(peer.url)
    before = asyncio.all_tasks()
    header = begin([target], [], 0.02)
    observing = asyncio.create_task(
        observe(header, [target], [], records.append, stop, for_s=60, timeout_s=timeout_s, **more)
    )

    async def wanted() -> object:
        return observing.done() or until(records)

    await until_async("the records are as wanted", wanted)
    stop.set()
    await asyncio.wait_for(observing, 10)
    left = [task for task in asyncio.all_tasks() - before if "_serve" not in repr(task.get_coro())]
    assert not left
    assert isinstance(records[-1], End)
    return records


def marks(records: list[Record]) -> list[Mark]:
    return [record for record in records if isinstance(record, Mark)]


TROUBLE = {
    "a server that never answers": (but("/slots", None), ServerState.SILENT, "no answer within"),
    "props that never come": (but("/props", None), ServerState.SILENT, "no answer within"),
    "a wrong key": (but("/slots", (401, {"error": {"message": "Invalid API Key"}})), ServerState.DENIED, "401: Invalid API Key; give --api-key"),
    "a model that loads": (but("/slots", (503, {"error": {"message": "Loading model"}})), ServerState.NOT_LOADED, "503: Loading model"),
    "slots turned off": (but("/slots", (501, {"error": {"message": "start it with --slots"}})), ServerState.UNUSABLE, "501: start it with --slots"),
    "something else": (but("/slots", (200, b"<html>")), ServerState.UNUSABLE, "not JSON"),
    "a slot without an id": (but("/slots", (200, [{"is_processing": False}])), ServerState.UNUSABLE, "slots[0].id: is missing"),
    "a redirect": (but("/slots", (302, b"")), ServerState.UNUSABLE, "302"),
    "a sleeping engine": (but("/props", (200, {**PROPS, "is_sleeping": True})), ServerState.SLEEPING, "would wake it"),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLE)
async def test_trouble_is_told_for_what_it_is(name: str) -> None:
    """State and reason, once, however often it is tried; nothing waits longer than its timeout."""
    script, state, words = TROUBLE[name]
    timeout_s = 0.2 if state is ServerState.SILENT else 10.0
    async with Peer(script) as peer:
        records = await seen(peer, lambda found: len(peer.asked) > 3 and marks(found), timeout_s)
        assert [mark.state for mark in marks(records)] == [state]
        assert words in marks(records)[0].why
        assert not [record for record in records if isinstance(record, Sample)]
        if state is ServerState.SLEEPING:
            assert {asked.partition("?")[0] for asked in peer.asked} == {"/props"}


async def test_nobody_there() -> None:
    """A refused connection: gone, tried again with pauses."""
    async with Peer(good) as peer:
        pass
    records = await seen(peer, marks)
    assert [(mark.state, mark.why) for mark in marks(records)] == [(ServerState.GONE, "nobody listens there")]


async def test_a_server_without_props_or_metrics_is_sampled() -> None:
    """Whatever has `/slots` can be watched; what is missing is noted."""
    async with Peer(but("/props", (404, b"no"))) as peer:
        records = await seen(peer, lambda found: sum(isinstance(r, Sample) for r in found) >= 3)
    (mark,) = marks(records)
    assert (mark.state, mark.native, mark.counters) == (ServerState.UP, True, False)
    assert "start it with --metrics" in mark.note
    # asked once, not at every sample
    assert sum(asked.startswith("/metrics") for asked in peer.asked) == 1


async def test_counters_may_be_left_alone_and_keys_are_sent() -> None:
    async with Peer(good) as peer:
        await seen(peer, lambda found: any(isinstance(r, Sample) for r in found), counters=False, api_key="k")
    assert not any(asked.startswith("/metrics") for asked in peer.asked)
    assert all("authorization: bearer k" in head.lower() for head in peer.heads)


async def test_another_process_at_the_same_place_is_a_new_run() -> None:
    """Numbers that went back betray a restart that nobody saw."""
    newest = 5

    def script(path: str) -> Reply:
        return (200, {**VIEW, "seq": newest}) if path == "/slots" else good(path)

    async with Peer(script) as peer:

        def restarted(found: list[Record]) -> bool:
            nonlocal newest
            samples = [record for record in found if isinstance(record, Sample)]
            newest = 1 if len(samples) >= 2 else 5
            return bool(samples) and samples[-1].run == 2

        records = await seen(peer, restarted)
    assert [mark.run for mark in marks(records)] == [1, 2]


async def test_a_slow_server_does_not_hold_the_others_up() -> None:
    """Two servers, one of which never answers: the other is sampled all the same."""
    async with Peer(good) as peer, Peer(lambda _: None) as slow:
        targets = [parse_target(peer.url), parse_target(slow.url)]
        header = begin(targets, [], 0.02)
        account, stop = Account(header), asyncio.Event()

        def take(record: Record) -> None:
            account.add(record)
            if account.servers[0].samples > 20:
                stop.set()

        await observe(header, targets, [], take, stop, for_s=10, timeout_s=8)
    account.close()
    found = summarize(account)
    assert found["servers"][0]["samples"] > 20
    assert found["servers"][1]["samples"] == 0
    assert found["combined"]["frames"] == 0
    assert found["combined"]["rate"]["total"] is None


async def test_the_time_is_kept_and_a_missing_log_is_said(tmp_path: Path) -> None:
    """`for_s` ends the observation whatever the server does."""
    records: list[Record] = []
    async with Peer(lambda _: None) as peer:
        target = parse_target(peer.url)
        began = monotonic()
        header = begin([target], [tmp_path / "no.log"], 0.02)
        await observe(header, [target], [tmp_path / "no.log"], records.append, asyncio.Event(), for_s=0.3)
        assert 0.3 <= monotonic() - began < 5
    assert [record for record in records if isinstance(record, End)][0].why == "time"
    assert any("No such file" in str(record) for record in records)


async def test_a_recording_that_fails_ends_the_observation(tmp_path: Path) -> None:
    """A full disk is an error, not a silent gap."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    recorder = Recorder(tmp_path / "r.jsonl")
    os.close(recorder._fd)
    recorder._fd = os.open("/dev/full", os.O_WRONLY)
    async with Peer(good) as peer:
        target = parse_target(peer.url)
        with recorder, pytest.raises(RecordingError, match="No space left"):
            await observe(begin([target], [], 0.02), [target], [], recorder.write, asyncio.Event(), for_s=10)
