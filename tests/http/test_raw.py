"""Malformed and ambiguous requests over raw sockets, through the real runner."""

import asyncio
import json

import pytest

from proxy.http.uploads import Upload

from .test_operate import proxy as operated
from .world import house, raw, settings, until

BODY = b'{"model":"demo","messages":[]}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"

REFUSED = {
    "TE with CL": POST + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "CL with TE": POST + b"Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + CHUNKED,
    "CL twice": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "two CL": POST + LENGTH + b"Content-Length: 5\r\n\r\n" + BODY,
    "CL list": POST + b"Content-Length: 30, 30\r\n\r\n" + BODY,
    "CL sign": POST + b"Content-Length: +30\r\n\r\n" + BODY,
    "CL negative": POST + b"Content-Length: -1\r\n\r\n" + BODY,
    "TE twice": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "TE list": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED,
    "TE unknown": POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED,
    "TE blank": POST + b"Transfer-Encoding : chunked\r\n\r\n" + CHUNKED,
    "TE over 1.0": POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,
    "obs-fold": POST + b"X-A: b\r\n c\r\n" + LENGTH + b"\r\n" + BODY,
    "obs-fold CL": POST + b"Content-Length:\r\n 30\r\n\r\n" + BODY,
    "64 KiB header": POST + b"X-A: " + b"a" * 65536 + b"\r\n" + LENGTH + b"\r\n" + BODY,
    "64 KiB of headers": POST
    + b"".join(b"X-%d: " % n + b"a" * 1000 + b"\r\n" for n in range(64))
    + LENGTH
    + b"\r\n"
    + BODY,
    "200 headers": POST + b"".join(b"X-%d: a\r\n" % n for n in range(200)) + LENGTH + b"\r\n" + BODY,
    "64 KiB target": b"GET /" + b"a" * 65536 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "absolute target": b"POST http://localhost/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    + LENGTH
    + b"\r\n"
    + BODY,
    "foreign absolute target": b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "CONNECT": b"CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no Host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    "two keys": b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    "bare CR": POST + b"X-A: a\rb\r\n" + LENGTH + b"\r\n" + BODY,
    "NUL": POST + b"X-A: a\0b\r\n" + LENGTH + b"\r\n" + BODY,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "fragment": b"GET /v1/models#x HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "blank in a name": POST + b"X A: b\r\n" + LENGTH + b"\r\n" + BODY,
    "bad chunk size": POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BODY,
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "Expect on a read": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nExpect: more\r\n\r\n",
    "Expect on no path": b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nExpect: more\r\n\r\n",
    "Expect on a post": POST + LENGTH + b"Expect: more\r\n\r\n" + BODY,
    "unknown method": b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
}

NOT_FOUND = {
    "double slash": b"GET //v1/models HTTP/1.1\r\n",
    "climbing": b"GET /api/../v1/models HTTP/1.1\r\n",
    "encoded slash": b"GET /v1%2Fmodels/x/y HTTP/1.1\r\n",
    "upstream climbing": b"GET /upstream/demo/../../api/models HTTP/1.1\r\n",
    "upstream encoded climbing": b"GET /upstream/demo/%2e%2e/props HTTP/1.1\r\n",
    "upstream encoded slash": b"GET /upstream/demo/slots%2F0 HTTP/1.1\r\n",
    "upstream encoded letter": b"GET /upstream/demo/prop%73 HTTP/1.1\r\n",
    "upstream double slash": b"GET /upstream/demo//props HTTP/1.1\r\n",
    "upstream backslash": b"GET /upstream/demo/..%5Cprops HTTP/1.1\r\n",
    "upstream metrics": b"GET /upstream/demo/metrics HTTP/1.1\r\n",
    "upstream without path": b"GET /upstream/demo HTTP/1.1\r\n",
    "upstream slot tail": b"GET /upstream/demo/slots/0/x HTTP/1.1\r\n",
}


def only_answer(out: bytes) -> tuple[int, dict]:
    """The status and JSON of the one response in `out`."""
    head, _, body = out.partition(b"\r\n\r\n")
    value = json.loads(body)  # a second response behind it would not be JSON
    assert b"traceback" not in out.lower()
    assert b"application/json" in head
    assert b"x-request-id" in head.lower()
    assert b"aiohttp" not in head
    return int(head.split()[1]), value


@pytest.mark.parametrize("name", REFUSED)
async def test_what_can_be_read_two_ways_is_refused(name):
    """One 400 in JSON, then the connection is closed: nothing behind it is taken for a request."""
    async with house() as h:
        status, value = only_answer(await raw(h.port, REFUSED[name] + SMUGGLED))
        assert status == 400
        assert value["error"]["type"] == "invalid_request_error"
        assert value["error"]["source"] == "llama-proxy"
        assert h.engine.requests == []
        assert h.live() == 0


async def test_a_body_that_turns_bad_behind_its_first_segment_is_refused_at_once(caplog, monkeypatch):
    """Nobody waits for the rest of what cannot be read."""
    came, add = [], Upload.add
    monkeypatch.setattr(Upload, "add", lambda self, size: (came.append(size), add(self, size))[1])
    async with house() as h:
        reader, writer = await asyncio.open_connection("127.0.0.1", h.port)
        try:
            writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + BODY[:5] + b"\r\n")
            await until(lambda: came == [5])
            writer.write(b"zz\r\n" + SMUGGLED)
            status, value = only_answer(await asyncio.wait_for(reader.read(), 20))
        finally:
            writer.close()
        assert status == 400 and "chunk size" in value["error"]["message"]
        assert h.engine.requests == [] and h.live() == 0
    assert "Unhandled" not in caplog.text


async def test_an_order_that_turns_bad_behind_its_first_segment_is_the_operators_mistake(monkeypatch):
    begun = []
    monkeypatch.setattr("proxy.http.orders.check_length", lambda *_: begun.append(1))
    async with operated() as (_, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client._base_url.port)
        try:
            head = b"POST /api/gate HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer adm\r\n"
            kind = b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head + kind + b"1\r\n{\r\n")
            await until(lambda: begun)
            writer.write(b"zz\r\n" + SMUGGLED)
            status, value = only_answer(await asyncio.wait_for(reader.read(), 20))
        finally:
            writer.close()
        assert status == 400 and "chunk size" in value["error"]["message"]


@pytest.mark.parametrize("name", NOT_FOUND)
async def test_paths_that_need_interpretation_match_nothing(name):
    async with house() as h:
        h.ready("demo")
        out = await raw(h.port, NOT_FOUND[name] + b"Host: localhost\r\nConnection: close\r\n\r\n")
        status, value = only_answer(out)
        assert (status, value["error"]["code"]) == (404, "not_found")
        assert h.engine.requests == []


async def test_an_encoded_letter_does_not_lead_round_the_operators_check():
    """`/%61pi/models` is `/api/models` for the router, so it must be for the key check, too."""
    keys = {"api_keys": [{"name": "a", "key": "user-key"}], "admin_keys": [{"name": "r", "key": "root-key"}]}
    async with house(settings(server=keys)) as h:
        head = b"GET /%61pi/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer user-key\r\n\r\n"
        status, value = only_answer(await raw(h.port, head))
        assert (status, value["error"]["code"]) == (403, "permission_denied")


async def test_connection_header_cannot_take_our_request_id_away():
    async with house() as h:
        request = (
            POST + b"Connection: x-request-id, close\r\nx-request-id: mine\r\n" + LENGTH + b"\r\n" + BODY
        )
        out = await raw(h.port, request)
        assert b"\r\nx-request-id: mine\r\n" in out
        assert h.engine.requests[0].header("x-request-id") == ["mine.1"]
        await until(lambda: h.live() == 0)


async def test_an_upgrade_is_ignored():
    async with house() as h:
        request = POST + b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n" + LENGTH + b"\r\n" + BODY
        out = await raw(h.port, request)
        assert out.startswith(b"HTTP/1.1 200")
        assert h.engine.requests[0].header("upgrade") == []


async def test_no_continue_for_a_body_that_will_be_refused():
    configured = settings(server={"max_body_bytes": 1000})
    async with house(configured) as h:
        status, value = only_answer(
            # the connection stays for a while: the body may still come
            await raw(h.port, POST + b"Expect: 100-continue\r\nContent-Length: 5000\r\n\r\n", 3.0)
        )
        assert (status, value["error"]["code"]) == (413, "request_too_large")
        out = await raw(
            h.port, POST + b"Connection: close\r\nExpect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY
        )
        assert out.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
        status, _ = only_answer(await raw(h.port, POST + b"Expect: coffee\r\n" + LENGTH + b"\r\n" + BODY))
        assert status == 400
    async with house(settings(server={"api_keys": [{"name": "a", "key": "good"}]})) as h:
        wrong = b"Authorization: Bearer bad\r\nExpect: 100-continue\r\n"
        status, value = only_answer(await raw(h.port, POST + wrong + LENGTH + b"\r\n" + BODY))
        assert (status, value["error"]["code"]) == (401, "invalid_api_key")


async def test_http_1_0_clients_get_whole_streams():
    async with house() as h:
        body = b'{"model":"demo","messages":[],"stream":true}'
        request = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        out = await raw(h.port, request + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head, _, payload = out.partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert payload == bytes(h.engine.requests[0].sent)
