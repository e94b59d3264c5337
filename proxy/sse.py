"""Server-sent events as bytes: where events end, which carry content, what the last ones count. Pure.

Nothing here alters a byte of an engine's stream. Sources: the SSE chapter of the HTML standard (line
ends are CR LF, LF or CR; an event ends at an empty line) and the response shapes of llama-server.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

HOLD_LIMIT: Final = 8 * 1024 * 1024
"""Bytes of one unfinished event that are held back; a longer event passes in pieces."""


class Shape(StrEnum):
    """Whose events a stream carries."""

    CHAT = "chat"
    TEXT = "text"
    NATIVE = "native"
    RESPONSES = "responses"
    MESSAGES = "messages"
    TRANSCRIPT = "transcript"


# A key with its quotes and colon cannot occur inside a JSON string (its quotes would be escaped), so
# these find keys without parsing. The look-ahead leaves out empty deltas.
_CONTENT: Final[Mapping[Shape, re.Pattern[bytes]]] = {
    Shape.CHAT: re.compile(rb'"(?:content|reasoning_content)": ?"(?!")|"tool_calls": ?\['),
    Shape.TEXT: re.compile(rb'"text": ?"(?!")'),
    Shape.NATIVE: re.compile(rb'"content": ?"(?!")'),
    Shape.RESPONSES: re.compile(rb'"type": ?"response\.[a-z_.]+\.delta"'),
    Shape.MESSAGES: re.compile(rb'"type": ?"content_block_delta"'),
    Shape.TRANSCRIPT: re.compile(rb'"type": ?"transcript\.text\.delta"'),
}

_END: Final[Mapping[Shape, re.Pattern[bytes]]] = {
    Shape.CHAT: re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]"),
    Shape.TEXT: re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]"),
    Shape.TRANSCRIPT: re.compile(rb"(?:^|[\r\n])data: ?\[DONE\]"),
    Shape.NATIVE: re.compile(rb'"stop": ?true'),
    Shape.RESPONSES: re.compile(rb'"type": ?"response\.(?:completed|incomplete|failed)"'),
    Shape.MESSAGES: re.compile(rb'"type": ?"message_stop"'),
}
_ERROR: Final = re.compile(rb'(?:^|[\r\n])(?:data: ?\{"error"|event: ?error)')

_OBJECT: Final = rb"(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})"
_USAGE: Final = re.compile(rb'"usage": ?' + _OBJECT)
_TIMINGS: Final = re.compile(rb'"timings": ?' + _OBJECT)
_FINAL: Final = re.compile(rb'"finish_reason": ?"|"stop": ?true|"type": ?"response\.completed"')


class Splitter:
    """Cuts a stream after its last complete event and holds the rest back.

    So whatever is injected (an error event, a comment) stands between events, and half an event,
    of no use to any client, is never sent.
    """

    __slots__ = ("_after_cr", "_limit", "_open", "_rest")

    def __init__(self, limit: int = HOLD_LIMIT) -> None:
        self._rest = bytearray()
        self._limit = limit
        self._open = False
        self._after_cr = False

    @property
    def on_boundary(self) -> bool:
        """Whether what was let through ends with a whole event."""
        return not self._open

    @property
    def held(self) -> int:
        """Number of bytes held back."""
        return len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that may pass now: all up to the last event end, possibly none."""
        rest = self._rest
        if self._after_cr:
            # the CR that ended an event was half of a CR LF: the rest of that line end goes with it
            self._after_cr = False
            if data.startswith(b"\n"):
                return b"\n" + self.feed(data[1:])
        if not rest and data.endswith(b"\n\n"):
            self._open = False
            return data
        # only a boundary that ends in the new bytes is news; it may begin in the last old byte
        start = max(0, len(rest) - 1)
        rest += data
        cut = _last_boundary(rest, start)
        if cut == 0:
            if len(rest) <= self._limit:
                return b""
            self._open = True
            cut = len(rest)
        else:
            self._open = False
        whole = bytes(rest[:cut])
        del rest[:cut]
        self._after_cr = not rest and whole.endswith(b"\r") and not self._open
        return whole

    def finish(self) -> bytes:
        """Return what is held, for a stream that ended properly without a last empty line."""
        whole = bytes(self._rest)
        self._rest.clear()
        return whole


def _last_boundary(data: bytearray, start: int) -> int:
    """Return the index after the last empty line that ends at or after `start`, 0 when there is none.

    Two line ends in a row meet as LF LF, LF CR or CR CR; CR LF is one line end.
    """
    best = max(data.rfind(b"\n\n", start), data.rfind(b"\n\r", start), data.rfind(b"\r\r", start))
    if best < 0:
        return 0
    end = best + 2
    if data[end - 1] == 0x0D and data[end : end + 1] == b"\n":
        end += 1
    return end


def comment(text: str) -> bytes:
    """Return a one-line comment with its empty line: clients ignore it, idle timers see it."""
    return b": " + " ".join(text.split()).encode() + b"\n\n"


def data_event(payload: bytes, event: str = "") -> bytes:
    """Return one event around a payload that has no line ends."""
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + payload + b"\n\n"


def complete(event: bytes) -> bool:
    """Tell an event that only lacks its empty line from half of one: what it carries is `[DONE]` or all of a JSON value.

    Line ends and comments are nothing that could be cut.
    """
    lines = [line for line in re.split(rb"\r\n|\n|\r", event) if line and not line.startswith(b":")]
    carried = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    if not carried:
        return not lines
    payload = b"\n".join(carried)
    if payload == b"[DONE]":
        return True
    try:
        orjson.loads(payload)
    except orjson.JSONDecodeError:
        return False
    return True


def content_chunks(data: bytes, shape: Shape) -> int:
    """Return how many generated pieces the whole events in `data` carry (about one per token)."""
    return len(_CONTENT[shape].findall(data))


class Ending(StrEnum):
    """How an engine's stream stopped, by its last events."""

    WHOLE = "whole"
    ERROR = "error"
    CUT = "cut"


def ending(last: bytes, shape: Shape, *, marked: bool = True) -> Ending:
    """Tell a finished stream from one that only stopped; `last` is the last piece that was sent.

    llama-server ends a stream it gives up (while it shuts down) with a proper last chunk and without
    the event that every whole stream of its kind ends with. `marked` is false where the client asked for
    events that cannot tell (native `response_fields`): then any event may be the last.
    """
    if _END[shape].search(last):
        return Ending.WHOLE
    if _ERROR.search(last):
        return Ending.ERROR
    return Ending.CUT if marked or not last else Ending.WHOLE


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one response; None where nothing was said. `prompt` includes `cached`."""

    prompt: int | None = None
    cached: int | None = None
    generated: int | None = None
    drafted: int | None = None
    accepted: int | None = None


class UsageMeter:
    """Collects what a response says of its tokens, parsing only the small objects that say it.

    Each result of a request with several (n, prompt arrays) has its own: generated tokens add up;
    prompts add up when they are different ones (`prompts` > 1), else the same prompt is told n times.
    """

    __slots__ = ("_add_prompts", "_seen", "_total")

    def __init__(self, prompts: int = 1) -> None:
        self._add_prompts = prompts > 1
        self._total = Usage()
        self._seen = False

    def feed_events(self, data: bytes) -> None:
        """Look at whole events of a stream. Costs two substring searches when there is nothing."""
        if b'"usage"' not in data and b'"timings"' not in data:
            return
        for event in re.split(rb"\r\n\r\n|\n\n|\r\r", data):
            # timings may come with every token on request: only a final event's count
            if _USAGE.search(event) or (_TIMINGS.search(event) and _FINAL.search(event)):
                self._add(usage_in(event))

    def feed_body(self, head: bytes, tail: bytes) -> None:
        """Look at the first and last bytes of a JSON body (the same bytes for a short one)."""
        self._add(usage_in(head if head == tail else head + b"\n" + tail))

    @property
    def usage(self) -> Usage | None:
        """The sum so far, None when nothing was said."""
        return self._total if self._seen else None

    def _add(self, new: Usage | None) -> None:
        if new is None:
            return
        self._seen = True
        old = self._total
        join = _plus if self._add_prompts else _most
        self._total = Usage(
            prompt=join(old.prompt, new.prompt),
            cached=join(old.cached, new.cached),
            generated=_plus(old.generated, new.generated),
            drafted=_plus(old.drafted, new.drafted),
            accepted=_plus(old.accepted, new.accepted),
        )


def usage_in(data: bytes) -> Usage | None:
    """Return the tokens told by the last `usage` and `timings` objects in `data`, None without any.

    `usage` wins over `timings`; only `timings` tells of drafts.
    """
    usage, timings = _last_object(_USAGE, data), _last_object(_TIMINGS, data)
    if usage is None and timings is None:
        return None
    times = timings or {}
    cached = _int(times, "cache_n")
    prompt = _int(times, "prompt_n")
    if prompt is not None:
        prompt += cached or 0
    generated = _int(times, "predicted_n")
    if usage is not None:
        prompt, cached, generated = _from_usage(usage)
    return Usage(prompt, cached, generated, _int(times, "draft_n"), _int(times, "draft_n_accepted"))


def _from_usage(usage: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    generated = _first(_int(usage, "completion_tokens"), _int(usage, "output_tokens"))
    prompt = _int(usage, "prompt_tokens")
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = _int(details, "cached_tokens") if isinstance(details, dict) else None
    if prompt is None:
        prompt = _int(usage, "input_tokens")
        apart = _int(usage, "cache_read_input_tokens")
        if apart is not None and prompt is not None:
            # Anthropic's input_tokens leave the cached ones out
            cached, prompt = apart, prompt + apart
    return prompt, cached, generated


def _last_object(pattern: re.Pattern[bytes], data: bytes) -> dict[str, Any] | None:
    found = None
    for match in pattern.finditer(data):
        found = match
    if found is None:
        return None
    try:
        value = orjson.loads(found[1])
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _int(source: Mapping[str, Any], key: str) -> int | None:
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return None
    return int(value)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _plus(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else a + b


def _most(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else max(a, b)
