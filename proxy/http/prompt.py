"""How long a request's prompt is, and which conversation it continues: hints for admission. Pure.

The digest chain names every beginning of a conversation, shortest first: requests that share a digest share
the prompt up to there, which the engine may still hold in its cache. Media count as a fixed size: an image's
bytes say nothing of its tokens.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.http.endpoints import Endpoint
from proxy.sse import Shape

DIGEST_BYTES: Final = 16
FIRST_LINKS: Final = 16
LAST_LINKS: Final = 48
"""Links kept from both ends of a long chain: what many share stands first, what a next turn shares last."""
MAX_PIECES: Final = 4096
"""Messages, parts or prompts that are looked at; longer requests are measured by their body."""
MAX_HASHED_BYTES: Final = 4 * 1024 * 1024
BLOCK_BYTES: Final = 4096
"""A plain prompt has no messages: its links are at multiples of this."""
MEDIA_BYTES: Final = 2048
BYTES_PER_TOKEN: Final = 4
"""A prompt given as token numbers counts so many bytes each."""
_TEXTS: Final = ("text", "content", "arguments", "output", "thinking", "input")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`size` of the prompt's text in bytes (0: nothing is processed), `prefix` the digest chain, shortest first."""

    size: int = 0
    prefix: tuple[bytes, ...] = ()


NO_PROMPT: Final = Prompt()


class _Chain:
    """Digests of growing beginnings."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._links: list[bytes] = []
        self.left = MAX_HASHED_BYTES

    def take(self, value: Any) -> int | None:
        """Take a piece of a conversation; return its size, None when it is too much and was not taken."""
        if _measure(value) > self.left:
            return None
        data = _dumped(value)
        if data is None or len(data) > self.left:
            return None
        self.feed(data)
        return len(data)

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes; their number is part of it, so that pieces cannot run together."""
        self._hash.update(b"%d:" % len(data))
        self._hash.update(data)
        self.left -= len(data)

    def link(self) -> None:
        """End a beginning here."""
        self._links.append(self._hash.digest())

    def links(self) -> tuple[bytes, ...]:
        """Return the kept links."""
        links = self._links
        if len(links) > FIRST_LINKS + LAST_LINKS:
            links = links[:FIRST_LINKS] + links[-LAST_LINKS:]
        return tuple(links)


def read_prompt(endpoint: Endpoint, body: dict[str, Any], size: int) -> Prompt:
    """Return what a JSON body of `size` bytes says of its prompt. Work is bounded whatever the body holds."""
    match endpoint.shape:
        case Shape.CHAT | Shape.MESSAGES:
            return _conversation(body, ("tools", "system"), body.get("messages"), size)
        case Shape.RESPONSES:
            return _conversation(body, ("tools", "instructions"), body.get("input"), size)
        case Shape.TEXT | Shape.NATIVE:
            return _plain(body.get("prompt"), size) if "prompt" in body else Prompt(size)
        case _:
            return Prompt(size)


def _conversation(body: dict[str, Any], heads: tuple[str, ...], messages: Any, size: int) -> Prompt:
    if isinstance(messages, str):
        messages = [messages]
    if not isinstance(messages, list):
        return Prompt(size)
    chain = _Chain()
    total, whole = 0, True
    # what the template puts before the first message: another set of tools is another prompt
    for value in (body.get(head) or "" for head in heads):
        taken = chain.take(value)
        total += _measure(value) if taken is None else taken if value else 0
        whole = whole and taken is not None
    pieces = MAX_PIECES
    for message in messages:
        text, seen = _text_bytes(message, pieces)
        total += text
        pieces -= seen
        if pieces <= 0:
            return Prompt(size, chain.links())
        # never a link behind a piece that was left out
        whole = whole and chain.take(message) is not None
        if whole:
            chain.link()
    return Prompt(total, chain.links())


def _text_bytes(message: Any, pieces: int) -> tuple[int, int]:
    """Return a message's text in bytes and how many pieces were looked at."""
    if isinstance(message, str):
        return _length(message), 1
    if not isinstance(message, dict):
        return 0, 1
    total, seen = 0, 1
    for name in ("content", "arguments", "output", "reasoning_content"):
        value = message.get(name)
        if isinstance(value, str):
            total += _length(value)
        elif isinstance(value, list):
            for part in value[:pieces]:
                total += _part_bytes(part)
            seen += len(value)
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        total += len(_dumped(calls[:pieces]) or b"")
        seen += len(calls)
    return total, seen


def _part_bytes(part: Any) -> int:
    if isinstance(part, str):
        return _length(part)
    if not isinstance(part, dict):
        return 0
    texts = [_length(part[name]) for name in _TEXTS if isinstance(part.get(name), str)]
    return sum(texts) if texts else MEDIA_BYTES


def _measure(value: Any) -> int:
    """Return at least how much a piece would serialise to, without walking into deep values."""
    if isinstance(value, dict):
        value = value.get("content")
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(len(text) for part in value[:MAX_PIECES] for text in _strings(part))
    return 0


def _strings(part: Any) -> Iterator[str]:
    """Yield the long texts of a content part: its own, and an image's or sound's data."""
    if isinstance(part, str):
        yield part
    for value in part.values() if isinstance(part, dict) else ():
        for text in value.values() if isinstance(value, dict) else (value,):
            if isinstance(text, str):
                yield text


def _plain(prompt: Any, size: int) -> Prompt:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Prompt(_length(prompt), _blocks(prompt[:MAX_HASHED_BYTES].encode("utf-8", "surrogatepass")))
    if not isinstance(prompt, list) or not prompt:
        return Prompt(size)
    if len(prompt) <= MAX_PIECES:
        return Prompt(min(size, sum(_item_bytes(item) for item in prompt)))
    return Prompt(min(size, BYTES_PER_TOKEN * len(prompt)) if isinstance(prompt[0], int) else size)


def _item_bytes(item: Any) -> int:
    if isinstance(item, str):
        return _length(item)
    return BYTES_PER_TOKEN * (len(item) if isinstance(item, list) else 1)


def _blocks(data: bytes) -> tuple[bytes, ...]:
    chain = _Chain()
    view = memoryview(data)[:MAX_HASHED_BYTES]
    for start in range(0, len(view), BLOCK_BYTES):
        chain.feed(view[start : start + BLOCK_BYTES])
        chain.link()
    return chain.links()


def _dumped(value: Any) -> bytes | None:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        # too deep: the engine will have its own opinion of it
        return None


def _length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
