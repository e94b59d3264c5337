"""What a peer may answer besides the usual: each kind ends well or with a plain reason, and never spoils the next."""

import asyncio
import contextlib
import gzip
import shutil
import ssl
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.backends import pool
from proxy.backends.client import EngineClient
from proxy.backends.wire import HEAD_LIMIT, HELD, Wire
from proxy.upstream import UpstreamDied, UpstreamRequest
from tests.backends.conftest import Collect, eventually
from tests.backends.test_client import Peer, post, respond


def raw(answer: bytes, close: bool = False):
    async def script(_reader, writer, _served):
        writer.write(answer)
        await writer.drain()
        return not close

    return script


async def test_interim_answers_are_passed_over():
    answer = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 2\r\n\r\nok"
    async with Peer(raw(b"HTTP/1.1 100 Continue\r\n\r\n" + answer)) as peer:
        exchange = await peer.client.open(post())
        assert exchange.head.status == 200
        assert exchange.head.headers == (("X", "y"), ("Content-Length", "2"))
        assert await exchange.read(10) == b"ok"
        assert (await peer.client.open(post())).head.reused_connection


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_body_without_a_length_ends_with_its_connection(version):
    async with Peer(raw(b"HTTP/%b 200 OK\r\n\r\nall of it" % version, close=True)) as peer:
        exchange = await peer.client.open(post())
        assert await exchange.read(100) == b"all of it"
        await (await peer.client.open(post())).read(100)
        assert peer.connections == 2


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(status):
    async with Peer(raw(b"HTTP/1.1 %d X\r\n\r\n" % status)) as peer:
        for _ in range(2):
            exchange = await peer.client.open(post())
            assert exchange.head.status == status and await exchange.read(1) == b""
        assert peer.connections == 1


async def test_a_connection_behind_a_chunked_answer_is_not_used_again():
    """llama-server closes it behind every stream, a moment after the last byte and against its own Keep-Alive."""
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n2\r\nok\r\n0\r\n\r\n"

    async def closes_late(_reader, writer, _served):
        writer.write(answer)
        await asyncio.sleep(0.05)
        return False

    async with Peer(closes_late) as peer:
        for _ in range(5):
            exchange = await peer.client.open(post())
            assert not exchange.head.reused_connection and await exchange.read(10) == b"ok"
        assert peer.connections == 5


async def test_an_answer_to_head_has_no_body_whatever_it_says():
    async with Peer(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")) as peer:
        for _ in range(2):
            exchange = await peer.client.open(UpstreamRequest("HEAD", "/x", ()))
            assert exchange.head.get("content-length") == "100" and await exchange.read(1) == b""
        assert peer.connections == 2
        assert b"Content-Length" not in peer.requests[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "did not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "did not answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "did not answer in HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "another protocol"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * (HEAD_LIMIT + 100_000), "the head of its answer is larger"),
        (b"HTTP/1.1 200 OK\r\nX-Cut: ye", "it closed the connection"),
        (b"", "it closed the connection"),
    ],
    ids=["ssh", "length", "two-lengths", "upgrade", "long", "cut", "nothing"],
)  # fmt: skip
async def test_what_is_no_answer_is_said_in_words(answer, words):
    async with Peer(raw(answer, close=words.startswith("it closed"))) as peer:
        with pytest.raises(UpstreamDied, match=words) as died:
            await asyncio.wait_for(peer.client.open(post()), 5)
        assert died.value.before_head and not died.value.reused and peer.client.exchanges == 0


async def test_a_malformed_end_of_a_body_cuts_it():
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n"
    async with Peer(raw(answer)) as peer:
        exchange, sink = await peer.client.open(post()), Collect()
        with pytest.raises(UpstreamDied, match="did not answer in HTTP") as died:
            await exchange.attach(sink)
        assert sink.body == b"hello" and not died.value.before_head


async def test_trailers_are_left_out():
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Late: 1\r\n\r\n"
    async with Peer(raw(answer)) as peer:
        for _ in range(2):
            exchange = await peer.client.open(post())
            assert await exchange.read(10) == b"ok"
            assert exchange.head.get("x-late") == ""


@pytest.mark.parametrize("late", [False, True])
async def test_bytes_nobody_asked_for_spoil_the_connection(late):
    """A second answer behind the first, at once or while the connection rests: it never answers the next request."""
    more = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    go = asyncio.Event()

    async def script(_reader, writer, _served):
        good = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood"
        if not late:
            writer.write(good + more)
            return True
        writer.write(good)
        await go.wait()
        go.clear()
        writer.write(more)
        return True

    async with Peer(script) as peer:
        for n in range(3):
            exchange = await peer.client.open(post())
            assert await exchange.read(10) == b"good"
            if late:
                before = len(wires(peer.client))
                go.set()
                await eventually(lambda before=before: len(wires(peer.client)) < before, 5)
            assert peer.connections == n + 1


def wires(client: EngineClient) -> set[Wire]:
    return client._pool._wires  # noqa: SLF001 - what it holds is what is asked


async def test_an_answer_before_the_whole_request_was_read_ends_the_connection():
    """A refusal of a body that is too large reaches the caller; the rest of the body is not sent."""

    writers = []

    async def refuse(reader, writer):
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        await writer.drain()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    client = EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    exchange = await asyncio.wait_for(client.open(post(body=b"x" * 50_000_000)), 10)
    assert exchange.head.status == 413 and await exchange.read(10) == b"big"
    await eventually(lambda: not wires(client))
    await client.close()
    writers[0].transport.abort()
    server.close()
    await server.wait_closed()
    # a transport that was aborted is closed one turn later
    await asyncio.sleep(0)


async def test_a_paused_connection_serves_again():
    """A body larger than what may wait for its reader, then another exchange on the same connection."""
    body = bytes(range(256)) * (20 * HELD // 256)
    async with Peer(respond(body)) as peer:
        for _ in range(3):
            assert await (await peer.client.open(post())).read(len(body)) == body
        # closed without being read: all of it is here, so the connection is kept
        assert peer.connections == 1


async def test_kept_connections_are_let_go_in_time(monkeypatch):
    monkeypatch.setattr(pool, "IDLE_CONNECTION_S", 2.0)
    async with Peer(respond(b"x")) as peer:
        asked = [asyncio.create_task(peer.client.open(post())) for _ in range(5)]
        for one in [await task for task in asked]:
            await one.read(10)
        assert len(wires(peer.client)) == 5
        await eventually(lambda: not wires(peer.client))
        await (await peer.client.open(post())).read(10)
        assert peer.connections == 6


async def test_a_probe_is_asked_again_when_its_kept_connection_was_closed():
    """Once: an engine that closes every connection unanswered is a failure, not a loop."""

    async def script(_reader, writer, served):
        if served:
            return False
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        return True

    async with Peer(script) as peer:
        for _ in range(3):
            assert (await peer.client.get("/slots", 5)).body == b"ok"
        assert peer.connections == 3 and len(peer.requests) == 5


async def test_the_name_and_password_of_a_url():
    async with Peer(respond(b"x")) as peer:
        peer.client = EngineClient(f"http://us%40er:pa:ss@127.0.0.1:{peer.port}/prefix/")
        await (await peer.client.open(post("/v1/x?y"))).read(10)
        head = peer.requests[0]
        assert head.startswith(b"POST /prefix/v1/x?y HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % peer.port)
        assert b"Authorization: Basic dXNAZXI6cGE6c3M=\r\n" in head


async def test_a_connection_that_cannot_be_made_names_the_address():
    async with Peer(respond(b"x")) as peer:
        peer.server.close()
        with pytest.raises(UpstreamDied, match=rf"no connection to 127\.0\.0\.1:{peer.port}: .*refused"):
            await peer.client.open(post())


async def test_compressed_bodies_pass_as_they_are():
    body = gzip.compress(b"x" * 1000)
    async with Peer(respond(body, b"Content-Encoding: gzip\r\n")) as peer:
        assert await (await peer.client.open(post())).read(10_000) == body


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_tls(tmp_path, monkeypatch):
    """An engine behind TLS serves when its certificate is trusted, and is refused with the reason when not."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        + ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    served = asyncio.Event()

    async def serve(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret")
        writer.transport.abort()
        served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    base = f"https://localhost:{server.sockets[0].getsockname()[1]}"
    stranger = EngineClient(base)
    with pytest.raises(UpstreamDied, match="certificate verify failed"):
        await stranger.open(post())
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    client = EngineClient(base)
    for wanted in (False, True):
        exchange = await client.open(post(body=b"x" * 3_000_000))
        assert exchange.head.reused_connection is wanted and await exchange.read(10) == b"secret"
    for one in (client, stranger):
        await one.close()
    await asyncio.wait_for(served.wait(), 5)
    server.close()
    await server.wait_closed()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_however_an_answer_is_cut_into_reads_it_is_the_same(data):
    """Any body, sized or chunked, in pieces of any size: the same head and the same bytes come out."""
    body = data.draw(st.binary(max_size=300))
    serves_again = data.draw(st.booleans())
    if serves_again:
        sized = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    else:
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(body))), max_size=5)) | {len(body)})
        parts = [body[a:b] for a, b in zip([0, *cuts], cuts, strict=False) if body[a:b]]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        sized = b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\nA: b\r\n" + sized
    at = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=20)) | {len(answer)})

    async def replay():
        class Transport(asyncio.Transport):
            def write(self, data):
                pass

            def is_closing(self):
                return False

            def abort(self):
                raise AssertionError("torn down")

        wire = Wire(lambda _wire: None)
        wire.connection_made(Transport())
        asking = asyncio.ensure_future(wire.ask(b"GET / HTTP/1.1\r\n\r\n", b"", head_only=False))
        await asyncio.sleep(0)
        for a, b in zip([0, *at], at, strict=False):
            wire.data_received(answer[a:b])
        status, fields = await asking
        got = b""
        while part := await wire.some():
            got += part
        return status, fields[0], got, wire.rest()

    assert asyncio.run(replay()) == (200, (b"A", b"b"), body, serves_again)
