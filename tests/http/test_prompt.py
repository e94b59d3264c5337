"""What a body says of its prompt and of the length of its answer."""

import asyncio
import io
import json
import time

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http.endpoints import INFERENCE
from proxy.http.facts import form_facts, json_facts, limited
from proxy.http.limits import REFUSED, UNLIMITED, TokenLimits, asked_in_form, asked_tokens
from proxy.http.prompt import (
    BLOCK_BYTES,
    FIRST_LINKS,
    LAST_LINKS,
    MAX_HASHED_BYTES,
    MEDIA_BYTES,
    read_prompt,
)
from proxy.sse import Shape

from .test_facts import form
from .world import house, settings, until

CHAT = INFERENCE["/v1/chat/completions"]
MESSAGES = INFERENCE["/v1/messages"]
RESPONSES = INFERENCE["/v1/responses"]
TEXT = INFERENCE["/v1/completions"]
AUDIO = INFERENCE["/v1/audio/transcriptions"]
EMBED = INFERENCE["/v1/embeddings"]


def prompt(endpoint, **body):
    return read_prompt(endpoint, body, len(orjson.dumps(body)))


def say(role, text):
    return {"role": role, "content": text}


def test_a_conversation_that_goes_on_shares_its_beginnings():
    talk = [say("system", "be kind"), say("user", "hi"), say("assistant", "hello"), say("user", "more")]
    chains = [prompt(CHAT, messages=talk[:length]).prefix for length in range(1, 5)]
    assert [len(chain) for chain in chains] == [1, 2, 3, 4]
    for shorter, longer in zip(chains, chains[1:], strict=False):
        assert longer[: len(shorter)] == shorter
    other = prompt(CHAT, messages=[*talk[:3], say("user", "else")]).prefix
    assert other[:3] == chains[3][:3]
    assert other[3] != chains[3][3]
    assert not set(prompt(CHAT, messages=talk[1:]).prefix) & set(chains[3])


def test_other_tools_are_another_conversation():
    talk = [say("user", "hi")]
    plain = prompt(CHAT, messages=talk).prefix
    assert prompt(CHAT, messages=talk, tools=[]).prefix == plain
    assert prompt(CHAT, messages=talk, tools=[{"type": "function"}]).prefix != plain
    assert (
        prompt(MESSAGES, messages=talk, system="a").prefix
        != prompt(MESSAGES, messages=talk, system="b").prefix
    )
    assert prompt(RESPONSES, input="x").prefix == prompt(RESPONSES, input=["x"]).prefix


def test_text_counts_and_pictures_do_not():
    text = prompt(CHAT, messages=[say("user", "é" * 50), say("user", [{"type": "text", "text": "a" * 30}])])
    assert text.size == 130
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    assert prompt(CHAT, messages=[say("user", [picture])]).size == MEDIA_BYTES
    assert prompt(MESSAGES, messages=[say("user", "abc")], system="defg").size == 3 + len('"defg"')
    assert prompt(TEXT, prompt=["abc", "de"]).size == 5
    assert prompt(TEXT, prompt=[1, 2, 3]).size == 12
    assert prompt(EMBED, input="abc").size == len(b'{"input":"abc"}')
    assert json_facts(INFERENCE["/tokenize"], b'{"content":"abc"}').prompt.size == 0


def test_plain_prompts_are_linked_in_blocks():
    a, b = "x" * 3 * BLOCK_BYTES, "y" * 10
    one, two = prompt(TEXT, prompt=a).prefix, prompt(TEXT, prompt=a + b).prefix
    assert len(one) == 3
    assert two[:3] == one
    assert prompt(TEXT, prompt=[a]).prefix == one


def test_long_chains_keep_both_ends():
    talk = [say("user", str(number)) for number in range(500)]
    chain = prompt(CHAT, messages=talk).prefix
    assert len(chain) == FIRST_LINKS + LAST_LINKS
    longer = prompt(CHAT, messages=[*talk, say("assistant", "a"), say("user", "b")]).prefix
    assert chain[-1] == longer[-3]


def test_the_work_is_bounded():
    huge = "z" * (MAX_HASHED_BYTES + 1)
    talk = [say("user", "hi"), say("user", huge), say("user", "bye")]
    found = prompt(CHAT, messages=talk)
    assert found.size == len(huge) + 5
    assert found.prefix == prompt(CHAT, messages=talk[:1]).prefix
    picture = {"type": "image_url", "image_url": {"url": huge}}
    assert len(prompt(CHAT, messages=[talk[0], say("user", [picture])]).prefix) == 1
    many = [say("user", [{"type": "text", "text": "a"}] * 100_000)]
    assert prompt(CHAT, messages=many).size == len(orjson.dumps({"messages": many}))
    nested = "[" * 900 + "]" * 900
    assert read_prompt(TEXT, {"prompt": json.loads(nested)}, 1800).size <= 1800


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["content", "text", "role", "tool_calls", "image_url", "x"]), inner), max_leaves=20))  # fmt: skip
def test_nonsense_is_the_engines_to_refuse(value):
    for endpoint, field in (
        (CHAT, "messages"),
        (MESSAGES, "messages"),
        (RESPONSES, "input"),
        (TEXT, "prompt"),
    ):
        found = read_prompt(endpoint, {field: value, "tools": value, "system": value}, 1000)
        assert found.size >= 0
        assert all(len(link) == 16 for link in found.prefix)
        asked_tokens({"n_predict": value, "max_tokens": value}, Shape.CHAT)


# --- how long an answer may get ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "body", "asked"),
    [
        (Shape.CHAT, {}, None),
        (Shape.CHAT, {"max_tokens": None}, None),
        (Shape.CHAT, {"max_tokens": 5}, 5),
        (Shape.CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, 6),
        (Shape.CHAT, {"max_tokens": 5, "max_completion_tokens": 6, "n_predict": 7}, 7),
        (Shape.CHAT, {"max_tokens": 5, "n_predict": None}, 5),
        (Shape.NATIVE, {"n_predict": -1}, UNLIMITED),
        (Shape.NATIVE, {"n_predict": 5.9}, 5),
        (Shape.NATIVE, {"n_predict": "5"}, REFUSED),
        (Shape.NATIVE, {"n_predict": -2}, REFUSED),
        (Shape.MESSAGES, {"max_tokens": 5, "n_predict": 7}, 5),
        (Shape.RESPONSES, {"max_output_tokens": 5, "max_tokens": 7}, 5),
        (Shape.RESPONSES, {"max_output_tokens": None, "max_tokens": 7}, None),
        (Shape.RESPONSES, {"max_tokens": 7}, 7),
        (None, {"max_tokens": 7}, None),
    ],
)
def test_what_is_asked(shape, body, asked):
    """As llama-server reads it: names by precedence, null for absent."""
    assert asked_tokens(body, shape) == asked


@pytest.mark.parametrize(
    ("default", "cap", "shape", "asked", "settled"),
    [
        (None, None, Shape.CHAT, None, None),
        (100, None, Shape.CHAT, None, 100),
        (100, None, Shape.CHAT, 7000, 7000),
        (100, None, Shape.CHAT, UNLIMITED, UNLIMITED),
        (None, 50, Shape.CHAT, None, 50),
        (None, 50, Shape.CHAT, UNLIMITED, 50),
        (None, 50, Shape.CHAT, 51, 50),
        (None, 50, Shape.CHAT, 50, 50),
        (None, 50, Shape.CHAT, 49, 49),
        (100, 50, Shape.CHAT, None, 50),
        (20, 50, Shape.CHAT, None, 20),
        (None, 50, Shape.CHAT, REFUSED, REFUSED),
        (None, 5000, Shape.MESSAGES, None, None),
        (None, 4000, Shape.MESSAGES, None, 4000),
        (100, 50, None, None, None),
    ],
)
def test_what_is_settled(default, cap, shape, asked, settled):
    """A cap lowers a larger or absent limit and never raises one; a default is for absent ones alone."""
    assert TokenLimits(default, cap).settle(asked, shape) == settled


def test_a_limit_is_written_over_the_field_that_wins():
    def rewritten(endpoint, data):
        return json.loads(limited(json_facts(endpoint, data), endpoint, 9, None).body.data)

    assert rewritten(CHAT, b'{"model":"a","seed":18446744073709551615}') == {"model": "a", "seed": 18446744073709551615, "max_tokens": 9}  # fmt: skip
    assert rewritten(CHAT, b'{"max_tokens":5,"n_predict":70}') == {"max_tokens": 5, "n_predict": 9}
    assert rewritten(RESPONSES, b'{"max_output_tokens":null,"max_tokens":70}')["max_output_tokens"] == 9
    assert rewritten(MESSAGES, b'{"n_predict":70}') == {"n_predict": 70, "max_tokens": 9}


def test_a_limit_is_written_into_a_form():
    kind = "multipart/form-data; boundary=xYz"
    noise = bytes(range(256))
    data = form(("name=model", b"m"), ("name=max_tokens", b"700"), ('name="file"; filename=a', noise), ("name=max_tokens", b"3"))  # fmt: skip
    facts = form_facts(AUDIO, data, kind)
    assert facts.max_tokens == 700
    made = limited(facts, AUDIO, 9, kind)
    assert form_facts(AUDIO, made.body.data, kind).max_tokens == made.max_tokens == 9
    assert made.body.data.count(b"max_tokens") == 1
    assert noise in made.body.data
    assert form_facts(AUDIO, made.body.data, kind).model == "m"
    bare = form(("name=model", b"m"), preamble=b"hello\r\n")
    assert (
        form_facts(AUDIO, limited(form_facts(AUDIO, bare, kind), AUDIO, 9, kind).body.data, kind).max_tokens
        == 9
    )
    assert [asked_in_form([v]) for v in (b" 12abc", b"-1", b"x", b"")] == [12, UNLIMITED, REFUSED, REFUSED]


async def test_limits_reach_the_engine_and_others_keep_their_bytes():
    """Per model and per key; what is within them passes byte for byte."""
    configured = settings(
        server={
            "api_keys": [
                {"name": "a", "key": "ka", "max_tokens_cap": 50},
                {"name": "b", "key": "kb", "max_tokens_default": 7},
            ],
            "admin_keys": [{"name": "ops", "key": "adm"}],
        },
        models={"demo": {"path": "demo.gguf", "max_tokens_default": 20, "max_tokens_cap": 90}},
    )

    async with house(configured) as h, aiohttp.ClientSession(h.base) as client:

        async def sent(key: str, **body):
            raw = json.dumps({"messages": [say("user", "hi")], **body}, indent=1).encode()
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            async with client.post("/v1/chat/completions", data=raw, headers=headers) as answer:
                assert answer.status == 200
                await answer.read()
            got = h.engine.requests[-1].body
            return got == raw, json.loads(got).get("max_tokens"), json.loads(got)["messages"]

        said = [say("user", "hi")]
        assert await sent("ka") == (False, 20, said)
        assert await sent("ka", max_tokens=70) == (False, 50, said)
        assert await sent("ka", max_tokens=50) == (True, 50, said)
        assert await sent("kb") == (False, 7, said)
        assert await sent("kb", max_tokens=80) == (True, 80, said)
        assert await sent("kb", max_tokens=-1) == (False, 90, said)
        await until(lambda: h.live() == 0)


async def test_reading_a_large_body_does_not_hold_the_loop():
    """A body of 30 MB is read elsewhere: meanwhile the loop turns."""
    async with house() as h, aiohttp.ClientSession(h.base) as client:
        body = {"messages": [say("user", "x" * 1000)] * 30_000, "model": "demo"}
        turns = 0
        headers = {"Content-Type": "application/json"}
        raw = io.BytesIO(orjson.dumps(body))
        post = asyncio.ensure_future(client.post("/v1/chat/completions", data=raw, headers=headers))
        began = time.monotonic()
        while not post.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert (await post).status == 200
        print(f"{turns} turns of the loop in {time.monotonic() - began:.2f} s")
        assert turns > 10
