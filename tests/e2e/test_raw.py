"""Requests that two servers could read differently, on the real proxy with the real engine behind it."""

import socket
from urllib.parse import urlsplit

import pytest

from tests.e2e.client import RawStream
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine

BODY = b'{"model":"tiny","prompt":"a","max_tokens":2}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + LENGTH + b"\r\n" + BODY

REFUSED = {
    "TE with CL": POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "CL with TE": POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "TE with a short CL": POST + b"Content-Length: 4\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "CL twice, equal": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "CL twice, unequal": POST + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
    "CL list": POST + b"Content-Length: 44, 44\r\n\r\n" + BODY,
    "obs-fold": POST + b"X-A: b\r\n c\r\n" + LENGTH + b"\r\n" + BODY,
    "obs-fold with a tab": POST + b"X-A: b\r\n\tc\r\n" + LENGTH + b"\r\n" + BODY,
    "obs-fold of TE": POST + LENGTH + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS,
    "64 KiB in one field": POST + b"X-A: " + b"a" * 65536 + b"\r\n" + LENGTH + b"\r\n" + BODY,
    "64 KiB in many fields": POST + b"".join(b"X-%d: " % n + b"a" * 1024 + b"\r\n" for n in range(64)) + LENGTH + b"\r\n" + BODY,
    "64 KiB in a name": POST + b"X" * 65536 + b": a\r\n" + LENGTH + b"\r\n" + BODY,
    "64 KiB in the target": b"GET /v1/models?" + b"a" * 65536 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "absolute target": b"POST http://localhost/v1/completions HTTP/1.1\r\nHost: localhost\r\n" + LENGTH + b"\r\n" + BODY,
    "foreign absolute target": b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "foreign Host under an absolute target": b"GET http://localhost/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "authority target": b"CONNECT evil.example:80 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
}  # fmt: skip


def exchange(url: str, data: bytes) -> bytes:
    """Send bytes; return all that comes until the proxy closes."""
    at = urlsplit(url)
    assert at.hostname is not None
    out = b""
    with socket.create_connection((at.hostname, at.port or 80), timeout=10) as sock:
        try:
            sock.sendall(data)
            while more := sock.recv(65536):
                out += more
        except ConnectionError:
            pass  # closed with our bytes unread; what it said before has arrived
    return out


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_read_two_ways_is_refused(shared: Proxy, name: str) -> None:
    """One 400 in JSON and the end of the connection; neither it nor what is behind it reaches an engine."""
    assert shared.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1})[0] == 200
    before = shared.metric("llama_proxy_requests_total", model="tiny")
    generated = shared.metric("llama_proxy_generated_tokens_total", model="tiny")
    out = exchange(shared.url, REFUSED[name] + SMUGGLED)
    status, _, rest = out.partition(b"\r\n")
    assert status.split()[1] == b"400", out
    assert b'"source":"llama-proxy"' in rest
    assert b"HTTP/1." not in rest
    assert shared.metric("llama_proxy_requests_total", model="tiny") == before
    assert shared.metric("llama_proxy_generated_tokens_total", model="tiny") == generated
    assert "Traceback" not in shared.log.read_text()


def test_connection_cannot_name_our_fields_away(shared: Proxy) -> None:
    """`Connection: x-request-id` strips the client's field and not ours: the engine itself shows our tag."""
    stream = RawStream(
        shared.url,
        "/v1/completions",
        {"model": "mid", "prompt": "a", "max_tokens": 6000, "stream": True, "ignore_eos": True},
        headers={
            "Connection": "x-request-id, x-phase-gather-ms, host, keep-alive",
            "x-request-id": "mine-7",
            "x-phase-gather-ms": "60000",
            "x-conversation-id": "mine",
        },
    )
    assert stream.head() == 200
    assert stream.headers["x-request-id"] == "mine-7"
    assert stream.event()
    # nothing else in this file is for that model
    [tag] = {e["request"] for e in shared.get("/slots?model=mid&phase_since=0")["events"] if e["request"]}
    assert tag.startswith("mine-7.")
    stream.close()
    until("it is gone", lambda: not any(s["is_processing"] for s in shared.get("/slots?model=mid")))
    events = shared.get("/slots?model=mid&phase_since=0")["events"]
    assert [e["tokens"] < 5000 for e in events if e["event"] == "release"] == [True], "it ran to its end"
    until("the ledger is empty", lambda: shared.metric("llama_proxy_requests_inflight") == 0)
