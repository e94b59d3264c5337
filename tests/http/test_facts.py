"""What bodies say, on bytes alone."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import ErrorCode, ProxyError
from proxy.http.endpoints import INFERENCE, Media, dialect_of
from proxy.http.facts import form_facts, json_facts, media_of
from proxy.types import Dialect

CHAT = INFERENCE["/v1/chat/completions"]
AUDIO = INFERENCE["/v1/audio/transcriptions"]
EMBED = INFERENCE["/v1/embeddings"]


def refusal(data: bytes, endpoint=CHAT) -> ProxyError:
    with pytest.raises(ProxyError) as caught:
        json_facts(endpoint, data)
    return caught.value


def test_the_bytes_pass_as_they_are():
    data = b'{ "model" : "a\\u00e9" ,\n "stream":true, "n":2, "big":123456789012345678901234567890 }'
    facts = json_facts(CHAT, data)
    assert facts.body.data is data
    assert (facts.model, facts.stream, facts.work.tasks, facts.prompts) == ("aé", True, 2, 1)


def test_id_slot_alone_is_taken_out():
    facts = json_facts(CHAT, b'{"model":"a","id_slot":3,"messages":[{"id_slot":1}]}')
    assert json.loads(facts.body.data) == {"model": "a", "messages": [{"id_slot": 1}]}


@pytest.mark.parametrize(
    ("data", "code", "param", "words"),
    [
        (b"", ErrorCode.INVALID_JSON, None, "empty"),
        (b'{"a":1,}', ErrorCode.INVALID_JSON, None, "line 1, column 7"),
        (b'{"a":\n nope}', ErrorCode.INVALID_JSON, None, "line 2"),
        (
            b'{"id_slot":1,"a":' + b"[" * 600 + b"]" * 600 + b"}",
            ErrorCode.INVALID_JSON,
            "id_slot",
            "leave it out",
        ),
        (b"[1]", ErrorCode.INVALID_REQUEST, None, "an array"),
        (b"null", ErrorCode.INVALID_REQUEST, None, "null"),
        (b'{"model":5}', ErrorCode.INVALID_REQUEST, "model", "a number"),
        (b'{"model":["a"]}', ErrorCode.INVALID_REQUEST, "model", "an array"),
        (b'{"stream":"yes"}', ErrorCode.INVALID_REQUEST, "stream", "a string"),
        (b'{"stream":1}', ErrorCode.INVALID_REQUEST, "stream", "a number"),
    ],
)
def test_mistakes_are_named_with_their_place(data, code, param, words):
    error = refusal(data)
    assert (error.code, error.param) == (code, param)
    assert words in error.message


def test_null_is_absent_and_stream_means_nothing_where_nothing_streams():
    facts = json_facts(CHAT, b'{"model":null,"stream":null}')
    assert (facts.model, facts.stream) == (None, False)
    assert json_facts(EMBED, b'{"input":["a","b"],"stream":"x"}').work.tasks == 2


def test_media_types():
    assert media_of(None, CHAT) is Media.JSON
    assert media_of("application/json; charset=utf-8", CHAT) is Media.JSON
    assert media_of("application/vnd.api+json", CHAT) is Media.JSON
    assert media_of("multipart/form-data; boundary=x", AUDIO) is Media.FORM
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        with pytest.raises(ProxyError) as caught:
            media_of(kind, CHAT)
        assert caught.value.status == 415
    with pytest.raises(ProxyError):
        media_of("application/json", AUDIO)


def form(*parts: tuple[str, bytes], boundary: bytes = b"xYz", preamble: bytes = b"") -> bytes:
    made = preamble
    for head, value in parts:
        made += (
            b"--"
            + boundary
            + b"\r\nContent-Disposition: form-data; "
            + head.encode()
            + b"\r\n\r\n"
            + value
            + b"\r\n"
        )
    return made + b"--" + boundary + b"--\r\n"


def test_the_model_of_a_form_is_found_around_a_file():
    noise = b'RIFF\r\n\r\nContent-Disposition: form-data; name="model"\r\n\r\nwrong\r\n--xY' + bytes(
        range(256)
    )
    data = form(
        ('name="file"; filename="name=\\"model\\".wav"', noise),
        ('name="model"', b"whisper"),
        ("name=stream", b"true"),
    )
    facts = form_facts(AUDIO, data, "multipart/form-data; boundary=xYz")
    assert facts.body.data is data
    assert (facts.model, facts.stream, facts.work.tasks) == ("whisper", True, 1)
    assert (
        form_facts(
            AUDIO, form(("name=model", b"m"), preamble=b"hello\r\n"), 'multipart/form-data; boundary="xYz"'
        ).model
        == "m"
    )


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (form(("name=model", b"m")), "multipart/form-data"),
        (b"nothing here", "multipart/form-data; boundary=xYz"),
        (form(("name=model", b"m"))[:-9], "multipart/form-data; boundary=xYz"),
        (b"--xYz", "multipart/form-data; boundary=xYz"),
        (form(("name=stream", b"maybe")), "multipart/form-data; boundary=xYz"),
    ],
)
def test_broken_forms_are_refused(data, kind):
    with pytest.raises(ProxyError) as caught:
        form_facts(AUDIO, data, kind)
    assert caught.value.status == 400


@given(st.binary(max_size=300))
def test_noise_in_forms_ends(data):
    try:
        form_facts(AUDIO, b"--b\r\n" + data, "multipart/form-data; boundary=b")
    except ProxyError as error:
        assert error.status == 400


@given(st.binary(max_size=300))
def test_noise_in_json_is_refused_or_read(data):
    try:
        json_facts(CHAT, data)
    except ProxyError as error:
        assert error.status == 400


def test_dialects_by_path():
    assert dialect_of("/v1/messages/count_tokens", "/v1/messages/count_tokens") is Dialect.ANTHROPIC
    assert dialect_of("/upstream/m/v1/messages", "/upstream/m/v1/messages") is Dialect.ANTHROPIC
    # only what is as received tells where a model's name ends
    assert dialect_of("/upstream/a/b/v1/messages", "/upstream/a%2Fb/v1/messages?x=/") is Dialect.ANTHROPIC
    assert dialect_of("/v1/messages", "/v1/%6Dessages") is Dialect.ANTHROPIC
    assert dialect_of("/v1/responses", "/v1/responses") is Dialect.RESPONSES
    assert dialect_of("/upstream/x", "/upstream/x") is Dialect.OPENAI
    for path, endpoint in INFERENCE.items():
        assert endpoint.dialect is dialect_of(path, path)
