"""Event boundaries, content counting and token counts, on bytes alone."""

import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.sse import (
    Ending,
    Shape,
    Splitter,
    Usage,
    UsageMeter,
    comment,
    complete,
    content_chunks,
    data_event,
    ending,
    usage_in,
)

END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")


def boundaries(data: bytes) -> list[int]:
    """Where events end, by the standard's grammar (an independent reading of it)."""
    ends, at = [], 0
    while match := END.search(data, at):
        ends.append(match.end())
        at = match.end() - 1 if data[match.end() - 1 : match.end()] in b"\r\n" else match.end()
    return ends


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\n\r", b"\r\n\n"])
def test_every_kind_of_empty_line_ends_an_event(end):
    splitter = Splitter()
    assert splitter.feed(b"data: a" + end + b"data: b") == b"data: a" + end
    assert splitter.held == len(b"data: b")
    assert splitter.feed(end) == b"data: b" + end
    assert splitter.held == 0


@given(
    st.lists(
        st.binary(max_size=12) | st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\r", b"\n"]), max_size=30
    )
)
def test_all_bytes_pass_in_order_and_what_passes_ends_at_a_boundary(reads):
    """Whatever the reads: nothing is lost or changed, and each piece let through ends with an event."""
    splitter = Splitter()
    passed = b""
    for data in reads:
        piece = splitter.feed(data)
        passed += piece
        if piece:
            assert END.search(passed[-4:]), passed
            assert splitter.on_boundary
    assert passed + splitter.finish() == b"".join(reads)


@given(st.lists(st.sampled_from([b"data: a", b"\n\n", b"\r\n\r\n", b"x", b"\r\n", b"\n"]), max_size=20))
def test_no_whole_event_is_held_back(parts):
    splitter = Splitter()
    for part in parts:
        splitter.feed(part)
    assert not END.search(splitter.finish())


def test_an_event_split_at_every_byte_passes_whole():
    event = b'event: x\r\ndata: {"a":1}\r\n\r\n'
    for cut in range(1, len(event)):
        splitter = Splitter()
        first = splitter.feed(event[:cut])
        # CR LF CR is a whole empty line already; its LF goes through by itself
        assert first in {b"", event[:-1]}
        assert first + splitter.feed(event[cut:]) == event


def test_an_endless_event_passes_in_pieces_and_says_so():
    splitter = Splitter(limit=100)
    assert splitter.feed(b"data: " + b"x" * 50) == b""
    assert len(splitter.feed(b"y" * 60)) == 116
    assert not splitter.on_boundary
    assert splitter.feed(b"z\n\n") == b"z\n\n"
    assert splitter.on_boundary


@pytest.mark.parametrize(
    ("event", "wanted"),
    [
        (b'data: {"stop":true}', True),
        (b'event: x\r\ndata:{"a":1}\r\n', True),
        (b'data: {"a":\ndata: 1}', True),
        (b"data: [DONE]\n", True),
        (b"", True),
        (b"\n: a comment", True),
        (b'data: {"stop":true,"timings":{', False),
        (b"data: [DO", False),
        (b"event: error", False),
        (b"data:", False),
    ],
)
def test_half_an_event_is_told_from_one_without_its_empty_line(event, wanted):
    assert complete(event) is wanted


def test_comments_are_one_line_whatever_is_in_them():
    assert comment("queued\n\ndata: x") == b": queued data: x\n\n"


@pytest.mark.parametrize(
    ("shape", "event", "count"),
    [
        (Shape.CHAT, {"choices": [{"delta": {"role": "assistant", "content": None}}]}, 0),
        (Shape.CHAT, {"choices": [{"delta": {"content": ""}}]}, 0),
        (Shape.CHAT, {"choices": [{"delta": {"content": "a"}}]}, 1),
        (Shape.CHAT, {"choices": [{"delta": {"reasoning_content": "a"}}]}, 1),
        (Shape.CHAT, {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, 1),
        (Shape.CHAT, {"choices": [{"delta": {}}], "prompt_progress": {"total": 3}}, 0),
        (Shape.CHAT, {"choices": [{"delta": {"content": 'say "content":"x"'}}]}, 1),
        (Shape.TEXT, {"choices": [{"text": "a"}]}, 1),
        (Shape.TEXT, {"choices": [{"text": ""}]}, 0),
        (Shape.NATIVE, {"content": "a", "stop": False}, 1),
        (Shape.NATIVE, {"content": "", "stop": True}, 0),
        (Shape.RESPONSES, {"type": "response.output_text.delta", "delta": "a"}, 1),
        (Shape.RESPONSES, {"type": "response.created"}, 0),
        (Shape.MESSAGES, {"type": "content_block_delta", "delta": {"text": "a"}}, 1),
        (Shape.MESSAGES, {"type": "message_start"}, 0),
        (Shape.TRANSCRIPT, {"type": "transcript.text.delta", "delta": "a"}, 1),
    ],
)
def test_content_is_told_from_the_rest(shape, event, count):
    data = data_event(orjson.dumps(event))
    assert content_chunks(data, shape) == count
    assert content_chunks(data * 3, shape) == 3 * count


def meter(*events, prompts=1):
    counted = UsageMeter(prompts)
    for event in events:
        counted.feed_events(data_event(orjson.dumps(event)))
    return counted.usage


TIMES = {"cache_n": 3, "prompt_n": 7, "predicted_n": 5, "draft_n": 4, "draft_n_accepted": 2}


def test_chat_final_event_by_timings():
    final = {"choices": [{"finish_reason": "stop", "delta": {}}], "timings": TIMES}
    assert meter(final) == Usage(10, 3, 5, 4, 2)


def test_usage_event_wins_over_timings_which_tell_of_drafts():
    usage = {"prompt_tokens": 11, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}}
    assert meter({"choices": [], "usage": usage, "timings": TIMES}) == Usage(11, 2, 6, 4, 2)


def test_timings_of_every_token_are_not_added_up():
    token = {"choices": [{"finish_reason": None, "delta": {"content": "a"}}], "timings": TIMES}
    final = {"choices": [{"finish_reason": "stop", "delta": {}}], "timings": TIMES}
    assert meter(token, token, final) == Usage(10, 3, 5, 4, 2)


def test_n_choices_add_up_over_one_prompt_and_prompts_over_several():
    final = {"choices": [{"finish_reason": "stop", "delta": {}}], "timings": TIMES}
    assert meter(final, final) == Usage(10, 3, 10, 8, 4)
    assert meter(final, final, prompts=2) == Usage(20, 6, 10, 8, 4)


def test_anthropic_start_and_end_together():
    start = {
        "type": "message_start",
        "message": {"usage": {"cache_read_input_tokens": 3, "input_tokens": 7, "output_tokens": 0}},
    }
    end = {"type": "message_delta", "usage": {"output_tokens": 5}}
    assert meter(start, end) == Usage(10, 3, 5, None, None)


def test_responses_completed():
    usage = {"input_tokens": 10, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 3}}
    done = {"type": "response.completed", "response": {"usage": usage}, "timings": TIMES}
    assert meter(done) == Usage(10, 3, 5, 4, 2)


def test_native_final_event_with_a_prompt_that_quotes_usage():
    final = {"content": "", "stop": True, "prompt": '"usage":{"prompt_tokens":999}', "timings": TIMES}
    assert meter(final) == Usage(10, 3, 5, 4, 2)


def test_long_bodies_are_read_at_both_ends_only():
    body = orjson.dumps({"usage": {"prompt_tokens": 4}, "data": ["x" * 100_000]})
    counted = UsageMeter()
    counted.feed_body(body[:8192], body[-8192:])
    assert counted.usage == Usage(prompt=4)


@given(st.binary(max_size=200))
def test_noise_never_raises(data):
    usage_in(data)
    usage_in(b'"usage":{' + data)
    UsageMeter().feed_events(b'"usage":{' + data + b"}\n\n")
    for shape in Shape:
        content_chunks(data, shape)


@pytest.mark.parametrize(
    ("shape", "last", "wanted"),
    [
        (Shape.CHAT, b'data: {"choices":[]}\n\ndata: [DONE]\n\n', Ending.WHOLE),
        (Shape.CHAT, b'data: {"choices":[]}\n\n', Ending.CUT),
        (Shape.CHAT, b'data: {"error":{"message":"x"}}\n\n', Ending.ERROR),
        (Shape.CHAT, b"", Ending.CUT),
        (Shape.CHAT, b'data: {"choices":[{"delta":{"content":"data: [DONE]"}}]}\n\n', Ending.CUT),
        (Shape.TEXT, b"data: {}\r\n\r\ndata: [DONE]\r\n\r\n", Ending.WHOLE),
        (Shape.TEXT, b"data: {}\r\rdata:[DONE]\r\r", Ending.WHOLE),
        (Shape.NATIVE, b'data: {"error":{"message":"x"}}\n\n', Ending.ERROR),
        (Shape.NATIVE, b'data: {"content":"","stop":true}\n\n', Ending.WHOLE),
        (Shape.NATIVE, b'data: {"content":"\\"stop\\":true","stop":false}\n\n', Ending.CUT),
        (Shape.CHAT, b'data: {}\r\rdata: {"error":{}}\n\n', Ending.ERROR),
        (Shape.MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', Ending.WHOLE),
        (Shape.MESSAGES, b'event: error\ndata: {"message":"x"}\n\n', Ending.ERROR),
        (Shape.RESPONSES, b'data: {"type":"response.completed"}\n\n', Ending.WHOLE),
        (Shape.RESPONSES, b'data: {"error":{}}\n\n', Ending.ERROR),
    ],
)
def test_endings(shape, last, wanted):
    assert ending(last, shape) is wanted


def test_the_end_of_events_with_chosen_fields_cannot_be_told():
    last = b'data: {"content":""}\n\n'
    assert ending(last, Shape.NATIVE, marked=False) is Ending.WHOLE
    assert ending(b"", Shape.NATIVE, marked=False) is Ending.CUT
