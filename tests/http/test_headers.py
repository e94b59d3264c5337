"""Header fields and request ids, on values alone."""

import re

from hypothesis import given
from hypothesis import strategies as st

from proxy.headers import connection_named, request_id, retry_headers, to_client, to_engine


def test_hop_by_hop_and_named_fields_stay_behind_both_ways():
    given_fields = [
        ("Connection", "close, X-Gone"),
        ("connection", "X-Also"),
        ("X-Gone", "1"),
        ("x-also", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Transfer-Encoding", "chunked"),
        ("TE", "trailers"),
        ("Upgrade", "h2c"),
        ("Proxy-Connection", "x"),
        ("X-Stays", "a"),
        ("X-Stays", "b"),
    ]
    assert connection_named(given_fields) == {"close", "x-gone", "x-also"}
    assert to_client(given_fields) == [("X-Stays", "a"), ("X-Stays", "b")]
    assert to_engine(given_fields, tag="t.1", gather_ms=20) == [
        ("X-Stays", "a"),
        ("X-Stays", "b"),
        ("x-request-id", "t.1"),
        ("x-phase-gather-ms", "20"),
    ]


def test_connection_cannot_name_our_own_fields_away():
    fields = [("Connection", "x-request-id, x-phase-gather-ms"), ("x-request-id", "theirs")]
    assert to_engine(fields, tag="ours.1", gather_ms=0) == [
        ("x-request-id", "ours.1"),
        ("x-phase-gather-ms", "0"),
    ]


def test_credentials_and_browser_fields_never_reach_an_engine():
    fields = [
        (name, "secret")
        for name in (
            *(
                "Authorization",
                "X-Api-Key",
                "Cookie",
                "Origin",
                "Referer",
                "Host",
                "Content-Length",
                "Expect",
            ),
            *(
                "Accept-Encoding",
                "Sec-Fetch-Site",
                "Access-Control-Request-Method",
                "x-keepalive",
                "x-priority",
                "x-conversation-id",
            ),
        )
    ]
    assert to_engine(fields, tag="t.1", gather_ms=None) == [("x-request-id", "t.1")]


def test_the_engines_cookies_ids_and_cors_are_not_passed():
    fields = [
        ("Set-Cookie", "a"),
        ("x-request-id", "t.1"),
        ("Access-Control-Allow-Origin", "*"),
        ("Server", "s"),
    ]
    assert to_client(fields) == [("Server", "s")]


@given(st.text(max_size=200))
def test_any_given_id_leads_to_a_safe_one(text):
    made = request_id(text)
    assert re.fullmatch(r"[A-Za-z0-9._:/=+@~-]{1,128}", made.shown)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,48}", made.tag)


def test_a_good_id_is_kept_and_a_long_one_is_echoed_but_not_used_as_tag():
    assert request_id("abc-1") == request_id("abc-1")
    assert request_id("abc-1").tag == "abc-1"
    long = "a" * 100
    assert request_id(long).shown == long
    assert request_id(long).tag != long
    assert request_id("a b").shown != "a b"
    assert request_id(None).shown != request_id(None).shown


def test_retry_after_in_both_forms():
    assert retry_headers(None) == {}
    assert retry_headers(1.25) == {"Retry-After": "2", "retry-after-ms": "1250"}
    assert retry_headers(0) == {"Retry-After": "1", "retry-after-ms": "1"}
