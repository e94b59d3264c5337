"""The client against raw sockets that misbehave on purpose, and against the real engine."""

import asyncio
import contextlib

import pytest

from proxy.backends.client import EngineClient, ProbeError
from proxy.backends.probes import Health, health, slots
from proxy.upstream import UpstreamDied, UpstreamRequest
from tests.backends.conftest import Collect, eventually


class Peer:
    """A raw HTTP peer: hands each connection's request to a script and remembers what it read."""

    def __init__(self, script):
        self.script = script
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()
        self._writers = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        self.client = EngineClient(f"http://127.0.0.1:{self.port}", "engine-key")
        return self

    async def __aexit__(self, *_):
        await self.client.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self.server.close()
        await self.server.wait_closed()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=5)
        # a transport that was aborted is closed one turn later
        await asyncio.sleep(0)

    async def _serve(self, reader, writer):
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        served = 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(x.split(b":")[1])
                        for x in head.split(b"\r\n")
                        if x.lower().startswith(b"content-length")
                    ),
                    0,
                )
                self.requests.append(head + await reader.readexactly(length))
                if not await self.script(reader, writer, served):
                    break
                served += 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            self.closed.set()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


def post(target="/v1/x", headers=(), body=b"{}"):
    return UpstreamRequest("POST", target, headers, body)


def respond(payload: bytes, more: bytes = b"", close: bool = False):
    async def script(_reader, writer, _served):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n%b" % (len(payload), more, payload))
        await writer.drain()
        return not close

    return script


async def test_what_goes_out_and_comes_back():
    """Path and body byte for byte, nothing added but Host, length and the engine's key; credentials stay here."""
    more = b"X-Odd: caf\xc3\xa9\r\nSet-Cookie: a=b\r\nset-cookie: c=d\r\nContent-Encoding: gzip\r\n"
    async with Peer(respond(b"not gzip at all", more)) as peer:
        headers = (
            ("X-Mixed-Case", "Kept"),
            ("Authorization", "Bearer client"),
            ("x-api-key", "client"),
            ("Cookie", "a=b"),
            ("Host", "evil"),
            ("Connection", "close"),
            ("Expect", "100-continue"),
            ("Transfer-Encoding", "chunked"),
            ("x-request-id", "t.1"),
        )
        exchange = await peer.client.open(post("/v1/a%2Fb//c?q=%20+x&y", headers, b'{"a": "\xc3\xa9"}'))
        assert exchange.head.status == 200 and not exchange.head.reused_connection
        assert ("X-Odd", "café") in exchange.head.headers
        assert [v for n, v in exchange.head.headers if n.lower() == "set-cookie"] == ["a=b", "c=d"]
        assert exchange.head.get("content-encoding") == "gzip"
        assert await exchange.read(100) == b"not gzip at all"
        exchange.close()
        head, body = peer.requests[0].split(b"\r\n\r\n", 1)
        lines = head.split(b"\r\n")
        assert lines[0] == b"POST /v1/a%2Fb//c?q=%20+x&y HTTP/1.1" and body == b'{"a": "\xc3\xa9"}'
        assert sorted(line.split(b":")[0] for line in lines[1:]) == sorted(
            [b"Host", b"X-Mixed-Case", b"x-request-id", b"Authorization", b"Content-Length"]
        )
        assert b"Authorization: Bearer engine-key" in lines and b"client" not in head


async def test_a_connection_is_used_again_and_said_so():
    async with Peer(respond(b"x")) as peer:
        for wanted in (False, True):
            exchange = await peer.client.open(post())
            assert exchange.head.reused_connection is wanted
            await exchange.read(10)
            exchange.close()
        assert peer.connections == 1
        await asyncio.wait_for(peer.client.idle(), 20)


async def test_large_bodies_go_whole():
    async with Peer(respond(b"x")) as peer:
        body = bytes(range(256)) * 20_000
        exchange = await peer.client.open(post(body=body))
        await exchange.read(10)
        assert peer.requests[0].endswith(body) and len(peer.requests[0]) > len(body)


async def test_a_refused_connection():
    async with Peer(respond(b"x")) as peer:
        peer.server.close()
        with pytest.raises(UpstreamDied) as died:
            await peer.client.open(post())
        assert died.value.before_head and not died.value.reused


async def test_a_reused_connection_that_dies_is_told_apart_and_nothing_is_sent_twice():
    async def script(_reader, writer, served):
        if served:
            return False
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        return True

    async with Peer(script) as peer:
        await (await peer.client.open(post())).read(10)
        with pytest.raises(UpstreamDied) as died:
            await peer.client.open(post())
        assert died.value.before_head and died.value.reused
        assert len(peer.requests) == 2


async def test_a_connection_that_served_a_probe_counts_as_reused():
    """The engine closes a connection after 100 requests, whoever sent them: the retry must know."""
    async with Peer(respond(b"x")) as peer:
        await peer.client.get("/slots", 5)
        exchange = await peer.client.open(post())
        assert exchange.head.reused_connection
        await exchange.read(10)
        assert peer.connections == 1


async def test_a_body_that_is_cut():
    """Too few bytes, or a chunked body without its end: `UpstreamDied` after what did arrive."""
    for head in (b"Content-Length: 100", b"Transfer-Encoding: chunked"):

        async def script(_reader, writer, _served, head=head):
            piece = b"5\r\nhello\r\n" if b"chunked" in head else b"hello"
            writer.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (head, piece))
            await writer.drain()
            return False

        async with Peer(script) as peer:
            exchange, sink = await peer.client.open(post()), Collect()
            with pytest.raises(UpstreamDied) as died:
                await exchange.attach(sink)
            assert not died.value.before_head and sink.body == b"hello"
            assert peer.client.exchanges == 0


async def test_reads_are_passed_on_as_they_come():
    """An event is written when the one before has reached the sink: every read of it holds exactly one."""

    class Paced(Collect):
        async def write(self, data: bytes) -> None:
            await super().write(data)
            taken.set()

    async def script(_reader, writer, _served):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for n in range(100):
            event = b"data: %d\n\n" % n
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await taken.wait()
            taken.clear()
        writer.write(b"0\r\n\r\n")
        return True

    taken = asyncio.Event()
    async with Peer(script) as peer:
        sink = Paced()
        await asyncio.wait_for((await peer.client.open(post())).attach(sink), 60)
        assert sink.parts == [b"data: %d\n\n" % n for n in range(100)]


async def test_a_slow_sink_holds_the_engine_back():
    """Backpressure: while the sink waits, the peer can only write what the buffers hold."""
    written = 0

    async def script(_reader, writer, _served):
        nonlocal written
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 200000000\r\n\r\n")
        for _ in range(2000):
            writer.write(b"x" * 100_000)
            await writer.drain()
            written += 100_000
        return True

    class Stuck:
        async def write(self, data: bytes) -> None:
            await asyncio.Event().wait()

    async with Peer(script) as peer:
        exchange = await peer.client.open(post())
        pump = asyncio.create_task(exchange.attach(Stuck()))
        seen = -1
        while seen != written:
            seen = written
            await asyncio.sleep(0.2)
        assert 0 < written < 20_000_000
        pump.cancel()
        await asyncio.wait((pump,))
        exchange.close()


async def test_a_sinks_own_error_passes_through():
    class Gone:
        async def write(self, data: bytes) -> None:
            raise ConnectionResetError("client left")

    async with Peer(respond(b"x" * 1000)) as peer:
        exchange = await peer.client.open(post())
        with pytest.raises(ConnectionResetError, match="client left"):
            await exchange.attach(Gone())
        exchange.close()
        assert peer.client.exchanges == 0


@pytest.mark.parametrize("stage", ["head", "body"])
async def test_closing_tears_the_socket_down_at_once(stage):
    """Cancelled while waiting for the head, or closed in the body: the peer sees it."""

    async def script(reader, writer, _served):
        if stage == "body":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
        await reader.read(1)
        raise ConnectionError

    async with Peer(script) as peer:
        if stage == "head":
            task = asyncio.create_task(peer.client.open(post()))
            await eventually(lambda: peer.requests)
            assert peer.client.exchanges == 1
            task.cancel()
            await asyncio.wait((task,))
        else:
            exchange = await peer.client.open(post())
            exchange.close()
            exchange.close()
        await asyncio.wait_for(peer.closed.wait(), 20)
        assert peer.client.exchanges == 0


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_an_upload_nobody_reads_is_given_up_at_once(how):
    """50 MB to a peer that does not read: giving up does not wait to send the rest."""
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def do_not_read(reader, writer):
        writer.transport.pause_reading()
        await accepted.put((reader, writer))

    server = await asyncio.start_server(do_not_read, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    task = asyncio.create_task(client.open(post(body=b"x" * 50_000_000)))
    reader, writer = await asyncio.wait_for(accepted.get(), 20)
    await asyncio.sleep(0.2)
    # nothing is read before it is given up: whoever waited to send the rest would wait for ever
    if how == "cancel":
        task.cancel()
        await asyncio.wait((task,), timeout=20)
        assert task.cancelled() and client.exchanges == 0
    await client.close("stopped")
    if how == "close":
        with pytest.raises(UpstreamDied, match="stopped"):
            await asyncio.wait_for(task, 20)
    writer.transport.resume_reading()
    received = 0
    with contextlib.suppress(ConnectionError):
        while data := await asyncio.wait_for(reader.read(1 << 20), 20):
            received += len(data)
    assert received < 40_000_000
    writer.transport.abort()
    server.close()
    await server.wait_closed()
    # a transport that was aborted is closed one turn later
    await asyncio.sleep(0)


async def test_closing_the_client_ends_everything_at_once():
    """A waiter for a head and a reader of a body both end with the reason; nothing opens any more."""

    async def script(reader, writer, _served):
        if b"/body" in peer.requests[-1]:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
        await reader.read(1)
        raise ConnectionError

    async with Peer(script) as peer:
        sink = Collect()
        pump = asyncio.create_task((await peer.client.open(post("/body"))).attach(sink))
        waiting = asyncio.create_task(peer.client.open(post("/head")))
        await eventually(lambda: len(peer.requests) == 2)
        assert peer.client.exchanges == 2
        # the peer ends neither of them
        await peer.client.close("model 'm' was unloaded")
        for task, before_head in ((pump, False), (waiting, True)):
            with pytest.raises(UpstreamDied, match="was unloaded") as died:
                await asyncio.wait_for(task, 20)
            assert died.value.before_head is before_head
        assert peer.client.exchanges == 0
        with pytest.raises(UpstreamDied, match="was unloaded"):
            await peer.client.open(post())


async def test_a_probe_has_a_hard_timeout():
    """A peer that never answers, and one that drips: both end in time and are told from refusal."""

    async def silent(reader, _writer, _served):
        await reader.read(1)
        return False

    async def dripping(_reader, writer, _served):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(1000):
            writer.write(b"[")
            await asyncio.sleep(0.05)
        return False

    for script in (silent, dripping):
        async with Peer(script) as peer:
            with pytest.raises(ProbeError, match=r"no answer within 0\.3 s") as failed:
                await asyncio.wait_for(slots(peer.client, None, 0.3), 20)
            assert failed.value.timed_out
            assert await health(peer.client, 0.1) is Health.DOWN


async def test_probes_say_what_they_got():
    async with Peer(respond(b'{"x": 1}')) as peer:
        with pytest.raises(ProbeError, match="an object without slots") as failed:
            await slots(peer.client, 3)
        assert not failed.value.timed_out
        assert b"GET /slots?phase_since=3 HTTP/1.1" in peer.requests[0]
    async with Peer(respond(b"x" * (9 << 20))) as peer:
        with pytest.raises(ProbeError, match="larger than"):
            await slots(peer.client, None)


async def test_odd_header_bytes_pass_and_control_characters_do_not():
    """Bytes that are not UTF-8 pass in both directions; what would split a header is refused."""
    async with Peer(respond(b"x", b"X-Raw: \xff\xfe\r\n")) as peer:
        exchange = await peer.client.open(
            post(headers=(("X-Raw", b"a\xffb caf\xc3\xa9".decode("utf-8", "surrogateescape")),))
        )
        assert ("X-Raw", b"\xff\xfe".decode("utf-8", "surrogateescape")) in exchange.head.headers
        await exchange.read(10)
        assert b"X-Raw: a\xffb caf\xc3\xa9\r\n" in peer.requests[0]
        for value in ("a\r\nEvil: 1", "a\nb", "a\0b"):
            with pytest.raises(ValueError):
                await peer.client.open(post(headers=(("X-Raw", value),)))
        assert peer.client.exchanges == 0 and len(peer.requests) == 1


@pytest.mark.parametrize("target", ["@evil.example/x", "http://evil.example/", "x", ""])
async def test_only_origin_form_targets(target):
    """A target that would change the authority never leaves."""
    async with Peer(respond(b"x")) as peer:
        with pytest.raises(ValueError, match="origin-form"):
            await peer.client.open(post(target))
        assert peer.client.exchanges == 0
