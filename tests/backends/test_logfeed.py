"""Following logs: whole lines, no secret, nobody slow is waited for."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.logfeed import MAX_VIEWERS, LogFeed
from proxy.backends.logtail import LogTail
from tests.backends.conftest import eventually


async def test_lines_come_whole_and_in_order():
    feed = LogFeed()
    tail = LogTail(secret="s3cret", feed=feed)
    tail.add(b"before\nhalf")
    assert tail.unfinished
    follower = feed.follow(tail.lines()[:-1])
    tail.add(b" a line with s3c")
    tail.add(b"ret\nnext\r\nun")
    assert await anext(follower) == ["before", "half a line with ***", "next"]
    waiting = asyncio.create_task(anext(follower))
    await asyncio.sleep(0)
    tail.add(b"finished\n")
    assert await asyncio.wait_for(waiting, 5) == ["unfinished"]
    feed.close()
    with pytest.raises(StopAsyncIteration):
        await anext(follower)
    assert "shutting down" in follower.ended


async def test_a_slow_viewer_is_dropped_and_others_go_on():
    feed = LogFeed()
    tail = LogTail(feed=feed)
    slow, quick = feed.follow(limit_bytes=1000), feed.follow(limit_bytes=1 << 20)
    for n in range(200):
        tail.add(f"line {n}\n".encode())
    assert "too slow" in slow.ended and not quick.ended
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    assert len(await anext(quick)) == 200
    assert len(feed._followers) == 1


async def test_there_are_only_so_many_viewers():
    feed = LogFeed()
    followers = [feed.follow() for _ in range(MAX_VIEWERS + 3)]
    # the oldest ones make room
    assert [bool(follower.ended) for follower in followers] == [True] * 3 + [False] * MAX_VIEWERS
    assert "too many" in followers[0].ended


async def test_a_long_beginning_is_cut_not_dropped():
    """Who asks for more than a viewer may hold gets the last of it, and what comes."""
    feed = LogFeed()
    follower = feed.follow([f"{n:09}" for n in range(1000)], limit_bytes=205)
    feed.push([])
    assert await anext(follower) == [f"{n:09}" for n in range(980, 1000)] and not follower.ended
    feed.push(["next"])
    assert await anext(follower) == ["next"]


@given(st.lists(st.binary(max_size=200), max_size=30))
def test_any_cutting_gives_the_same_lines(parts):
    class Sink:
        lines: list[str] = []

        def push(self, lines):
            self.lines = [*self.lines, *lines]

    sink, whole = Sink(), b"".join(parts)
    tail = LogTail(feed=sink)
    for part in parts:
        tail.add(part)
    ended, _, rest = whole.rpartition(b"\n")
    wanted = ended.decode("utf-8", "replace").replace("\r\n", "\n").split("\n") if b"\n" in whole else []
    assert [line.rstrip("\r") for line in sink.lines if line.rstrip("\r")] == [
        line.rstrip("\r") for line in wanted if line.rstrip("\r")
    ]
    assert tail.unfinished == bool(rest)


async def test_a_flood_without_line_ends_stays_bounded():
    feed = LogFeed()
    tail = LogTail(feed=feed)
    follower = feed.follow(limit_bytes=1 << 30)
    for _ in range(100):
        tail.add(b"x" * 50_000)
    assert len(tail._rest) <= 64 * 1024 and len(await anext(follower)) >= 40


@pytest.mark.engine
async def test_following_goes_on_over_generations(fleets, engine_binary, mid_model):
    fleet, _ = fleets({"m": {"path": mid_model}}, engine_binary)
    follower, seen = fleet.follow_log("m"), []

    async def read():
        async for lines in follower:
            seen.extend(lines)

    reading = asyncio.create_task(read())
    for count in (1, 2):
        await fleet.load("m")
        await eventually(lambda: sum("listening on" in line for line in seen) == count)
        await fleet.unload("m", force=True)
    later = fleet.follow_log("m", lines=5)
    assert len(await anext(later)) == 5
    follower.close()
    later.close()
    await asyncio.wait_for(reading, 5)
