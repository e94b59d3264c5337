"""Clients that leave, in every phase, through the real runner: the engine hears of it, nothing leaks."""

import asyncio
import contextlib
import json
import socket

import pytest

from proxy.errors import ErrorCode, ProxyError
from proxy.http.reply import Reply
from proxy.types import MemberState, TicketState
from proxy.upstream import Head

from .test_forward import CHAT, chat
from .world import House, house, settings, until


class Client:
    """A bare connection that posts one request and can vanish."""

    def __init__(self, h: House, body: dict, path: str = CHAT) -> None:
        self.h, self.path, self.data = h, path, json.dumps(body).encode()

    async def __aenter__(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.h.port)
        self.writer.write(self.request())
        return self

    def request(self) -> bytes:
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(self.data)}\r\n\r\n".encode()
            + self.data
        )

    async def __aexit__(self, *_):
        self.writer.transport.abort()

    def vanish(self, how: str) -> None:
        if how == "abort":
            self.writer.transport.abort()
        elif how == "half":
            self.writer.write_eof()
        else:
            self.writer.close()


def states(h: House) -> list[TicketState]:
    return [ticket.state for ticket in h.admission.tickets()]


HOW = pytest.mark.parametrize("how", ["abort", "close", "half"])
STREAM = pytest.mark.parametrize("stream", [True, False])


@HOW
@STREAM
async def test_while_the_model_loads(how, stream):
    async with house(auto=False) as h:
        async with Client(h, chat(stream)) as client:
            await until(lambda: h.live() == 1)
            client.vanish(how)
            await until(lambda: h.live() == 0, 20)
        h.ready("demo")
        assert h.engine.requests == []
        await until(lambda: h.sample("client_disconnects_total", model="demo", state="queued") == 1)


@HOW
@STREAM
async def test_while_queued_behind_another(how, stream):
    async with house(slots=1) as h:
        async with Client(h, chat(True, tokens=2000, pace_ms=5)) as first:
            await h.engine.seen(1)
            # one standby may go ahead to the engine; the third waits here
            async with Client(h, chat(stream, prefill_ms=60_000)), Client(h, chat(stream)) as third:
                await until(lambda: TicketState.QUEUED in states(h) and h.live() == 3)
                third.vanish(how)
                await until(lambda: h.live() == 2, 20)
            first.vanish("abort")
            await until(lambda: h.live() == 0)
            assert len(h.engine.requests) <= 2


@HOW
@STREAM
async def test_while_waiting_for_the_head_the_ticket_stays_charged_until_the_engine_lets_go(how, stream):
    async with house() as h:
        h.member = MemberState.PREFILL
        async with Client(h, chat(stream, prefill_ms=60_000)) as client:
            seen = await h.engine.seen(1)
            client.vanish(how)
            await asyncio.wait_for(seen.gone.wait(), 20)
        await until(lambda: h.live() == 0)
        await until(lambda: h.sample("client_disconnects_total", model="demo", state="granted") == 1)
        assert h.outcomes()["cancelled"] == 1


async def test_a_left_ticket_is_cancelling_while_the_engine_still_works():
    """The engine closes the book, not the client: charged as `cancelling` until a snapshot is free of it."""
    async with house(slots=1) as h:
        async with Client(h, chat(True, prefill_ms=60_000)) as client:
            seen = await h.engine.seen(1)
            await until(lambda: h.engine.active != {})
            h.engine.active = dict(h.engine.active)  # a batch that the engine cannot interrupt
            stuck = dict(h.engine.active)
            h.mute = True  # no look at it until it is stuck
            client.vanish("abort")
            await asyncio.wait_for(seen.gone.wait(), 20)
            await asyncio.sleep(0)
            h.engine.active.update(stuck)
            h.mute = False
            await until(lambda: states(h) == [TicketState.CANCELLING])
            assert h.admission.view("demo").charged == 1
            await asyncio.sleep(0.2)
            assert states(h) == [TicketState.CANCELLING]
            h.engine.active.clear()
            await until(lambda: h.live() == 0, 20)


@HOW
async def test_while_streaming(how):
    async with house() as h:
        async with Client(h, chat(True, tokens=100_000, pace_ms=2)) as client:
            seen = await h.engine.seen(1)
            await client.reader.readuntil(b"t3")
            client.vanish(how)
            await asyncio.wait_for(seen.gone.wait(), 20)
        await until(lambda: h.live() == 0)
        await until(lambda: h.sample("client_disconnects_total", model="demo", state="generating") == 1)


async def test_a_client_that_stops_reading_slows_the_engine_and_grows_nothing():
    """Back-pressure reaches the engine; a client lost in that state is noticed."""
    async with house() as h:
        async with Client(h, chat(True, tokens=20_000, pad=2000)) as client:
            seen = await h.engine.seen(1)
            client.writer.transport.pause_reading()
            last = -1
            async with asyncio.timeout(10):
                while len(seen.sent) != last:
                    last = len(seen.sent)
                    await asyncio.sleep(0.3)
            assert len(seen.sent) < 30_000_000
            client.vanish("abort")
            await asyncio.wait_for(seen.gone.wait(), 20)
        await until(lambda: h.live() == 0)


class _Small(Client):
    """A client whose connection holds next to nothing on the way: what it does not read waits in the proxy."""

    async def __aenter__(self):
        for site in self.h.listening():
            site.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.h.port))
        self.sock = sock
        await asyncio.get_running_loop().sock_sendall(sock, self.request())
        return self

    async def __aexit__(self, *_):
        self.sock.close()

    async def read(self, most: int) -> bytes:
        """Read what is there, and nothing ahead."""
        return await asyncio.get_running_loop().sock_recv(self.sock, most)


async def test_nothing_follows_the_end_of_an_answer(monkeypatch):
    """An order that comes while the last bytes wait for a slow client may cut them; a second end behind the
    first would be read as the next answer on the connection."""
    replies: list[Reply] = []
    ending = asyncio.Event()
    begin, finish = Reply.begin_sse, Reply.finish

    async def begun(reply: Reply, head: Head | None = None) -> None:
        replies.append(reply)
        await begin(reply, head)

    async def finishing(reply: Reply) -> None:
        ending.set()
        await finish(reply)

    monkeypatch.setattr(Reply, "begin_sse", begun)
    monkeypatch.setattr(Reply, "finish", finishing)
    async with house() as h:
        # three events fill what may wait for a client; two more, of less than is flushed at once, and the end
        # of the stream come when it has begun to take them
        body = chat(True, tokens=5, pad=31_700, pause_after=3, pause_ms=500)
        async with _Small(h, body) as client:
            await until(lambda: bool(replies) and replies[0].pending_bytes() > 65_536)
            read = bytearray()
            async with asyncio.timeout(20):
                while replies[0].pending_bytes() > 16_384 and not ending.is_set():
                    read += await client.read(1024)
            await asyncio.wait_for(ending.wait(), 20)
            assert replies[0].pending_bytes() > 65_536
            assert h.live() == 1
            told = ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "enough")
            h.admission.cancel(h.admission.tickets()[0].id, told)
            await until(lambda: h.live() == 0, 10)
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(2):
                    while part := await client.read(65536):
                        read += part
    end = b"\r\n0\r\n\r\n"
    assert read.startswith(b"HTTP/1.1 200")
    assert b"enough" not in read
    assert read.partition(end)[2] == b""


async def test_while_sending_the_body():
    async with house() as h:
        _, writer = await asyncio.open_connection("127.0.0.1", h.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        writer.write(b"Content-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        await until(lambda: h.outcomes()["cancelled"] == 1)
        assert h.live() == 0


async def test_a_hundred_clients_that_leave_at_any_moment_leave_nothing_behind():
    configured = settings(admission={"keepalive_s": 0.05})
    async with house(configured, slots=2) as h:

        async def visit(number: int) -> None:
            async with Client(
                h, chat(number % 2 == 0, tokens=30, pace_ms=3, prefill_ms=number % 7 * 10)
            ) as client:
                try:
                    async with asyncio.timeout(number % 23 * 0.02):
                        await client.reader.read()
                except TimeoutError:
                    client.vanish("abort" if number % 3 else "close")

        await asyncio.gather(*(visit(number) for number in range(100)))
        await until(lambda: h.live() == 0, 10.0)
        assert h.admission.broken_rules() == []
        assert sum(h.outcomes().values()) == 100
