"""What a request's body says: model, stream, tasks, prompt. Pure; the bytes themselves pass on unchanged.

Two exceptions: a top-level `id_slot` is taken out, because a client that pins slots defeats admission, and an
operator's limit on answers is written in (`limited`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from proxy.admission import Work, count_work
from proxy.errors import ErrorCode, ProxyError
from proxy.http.endpoints import Endpoint, Media
from proxy.http.limits import asked_in_form, asked_tokens, with_limit
from proxy.http.prompt import MEDIA_BYTES, NO_PROMPT, Prompt, read_prompt
from proxy.sse import Shape

_BOUNDARY: Final = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_DISPOSITION: Final = re.compile(
    rb'^content-disposition:[^\r\n]*?[;\s]name=(?:"([^"\r\n]*)"|([^\s;\r\n]+))', re.IGNORECASE | re.MULTILINE
)
_SMALL_FIELD: Final = 1024
_CARRIED: Final = frozenset({b"model", b"stream"})
_LIMIT: Final = b"max_tokens"


class Body:
    """The bytes for the engine, kept until its answer begins: nobody may hold them while a stream runs."""

    __slots__ = ("_data", "size")

    def __init__(self, data: bytes) -> None:
        self._data: bytes | None = data
        self.size = len(data)

    @property
    def data(self) -> bytes:
        """The bytes; `RuntimeError` once they were dropped."""
        if self._data is None:
            raise RuntimeError("the body was let go before")
        return self._data

    def drop(self) -> None:
        """Let go of the bytes: they will not be sent again."""
        self._data = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What forwarding needs to know. `model` is as the client wrote it, None when it did not.

    `body` is what goes to the engine. `max_tokens` is the limit of one answer as `limits.asked_tokens` tells it.
    `marked`: the last event of a stream is told from the others.
    """

    model: str | None
    stream: bool
    work: Work
    body: Body
    prompt: Prompt = NO_PROMPT
    max_tokens: int | None = None
    marked: bool = True

    @property
    def prompts(self) -> int:
        """Number of different prompts."""
        return max(1, self.work.tasks // max(1, self.work.n))


def media_of(content_type: str | None, endpoint: Endpoint) -> Media:
    """Return how to read the body, or raise 415.

    A missing content type is taken for JSON. Form posts and plain text, which a foreign web page
    could send without asking, are not.
    """
    kind = (content_type or "application/json").partition(";")[0].strip().lower()
    if endpoint.media is Media.FORM and kind == "multipart/form-data":
        return Media.FORM
    if endpoint.media is Media.JSON and (kind == "application/json" or kind.endswith("+json")):
        return Media.JSON
    wanted = "multipart/form-data" if endpoint.media is Media.FORM else "application/json"
    raise ProxyError(
        ErrorCode.UNSUPPORTED_MEDIA_TYPE, f"Content-Type {kind!r} is not accepted here: send {wanted}"
    )


def parse(data: bytes) -> dict[str, Any]:
    """Return the body's JSON object, or raise 400 with the place of the mistake."""
    if not data:
        raise ProxyError(ErrorCode.INVALID_JSON, "the body is empty: a JSON object is expected")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ProxyError(
            ErrorCode.INVALID_JSON,
            f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno}, "
            f"character {error.pos})",
        ) from None
    if not isinstance(value, dict):
        raise ProxyError(
            ErrorCode.INVALID_REQUEST, f"the body must be a JSON object, not {_json_type(value)}"
        )
    return value


def json_facts(endpoint: Endpoint, data: bytes) -> Facts:
    """Read the facts out of a JSON body."""
    body = parse(data)
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise _wrong_type("model", "a string", model)
    stream = body.get("stream")
    if endpoint.shape is not None and stream is not None and not isinstance(stream, bool):
        raise _wrong_type("stream", "true or false", stream)
    if "id_slot" in body:
        del body["id_slot"]
        data = _dump(body, "id_slot", "'id_slot' cannot be taken out of this body ({}): leave it out")
    work = count_work(endpoint.name, body)
    return Facts(
        model=model or None,
        stream=endpoint.shape is not None and stream is True,
        work=work,
        body=Body(data),
        prompt=read_prompt(endpoint, body, len(data)) if work.tasks else NO_PROMPT,
        max_tokens=asked_tokens(body, endpoint.shape),
        marked=endpoint.shape is not Shape.NATIVE or not body.get("response_fields"),
    )


def form_facts(endpoint: Endpoint, data: bytes, content_type: str) -> Facts:
    """Read the facts out of a multipart form without touching its bytes."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise ProxyError(ErrorCode.INVALID_REQUEST, "Content-Type multipart/form-data without a boundary")
    parts = list(_parts(data, (match[1] or match[2]).encode("latin-1", "replace")))
    fields = {
        part.name: data[part.value_start : part.value_end]
        for part in parts
        if part.name in _CARRIED and part.small
    }
    model = fields.get(b"model", b"").decode("utf-8", "replace").strip()
    stream = fields.get(b"stream", b"").strip().lower()
    if stream not in {b"", b"true", b"false", b"1", b"0"}:
        raise ProxyError(
            ErrorCode.INVALID_REQUEST, "the form field 'stream' must be true or false", param="stream"
        )
    return Facts(
        model=model or None,
        stream=stream in {b"true", b"1"},
        work=count_work(endpoint.name, None),
        body=Body(data),
        prompt=Prompt(MEDIA_BYTES),
        max_tokens=asked_in_form(
            data[part.value_start : part.value_end] for part in parts if part.name == _LIMIT
        ),
    )


def limited(facts: Facts, endpoint: Endpoint, tokens: int, content_type: str | None) -> Facts:
    """Return the facts of the same request with `tokens` as the limit of its answer, written into its body.

    Everything else in the body keeps its meaning; a JSON body is written anew.
    """
    data = facts.body.data
    if media_of(content_type, endpoint) is Media.FORM:
        new = _form_with_limit(data, content_type or "", tokens)
    else:
        body = parse(data)
        if endpoint.shape is None:
            raise ValueError(f"{endpoint.name} has no answer to limit")
        with_limit(body, endpoint.shape, tokens)
        new = _dump(body, _LIMIT.decode(), "a limit cannot be written into this body ({}): give max_tokens")
    return replace(facts, body=Body(new), max_tokens=tokens)


def _form_with_limit(data: bytes, content_type: str, tokens: int) -> bytes:
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise ProxyError(ErrorCode.INVALID_REQUEST, "Content-Type multipart/form-data without a boundary")
    boundary = (match[1] or match[2]).encode("latin-1", "replace")
    parts = list(_parts(data, boundary))
    made = bytearray(b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n' % (boundary, _LIMIT))
    made += b"%d\r\n" % tokens
    # what stands before the first part means nothing
    at = parts[0].start if parts else data.index(b"--" + boundary)
    for part in parts:
        if part.name == _LIMIT:
            made += data[at : part.start]
            at = part.end
    return bytes(made + data[at:])


def _dump(body: dict[str, Any], field: str, text: str) -> bytes:
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise ProxyError(ErrorCode.INVALID_JSON, text.format(error), param=field) from None


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a form: from its boundary (`start`) to the next one's (`end`)."""

    name: bytes
    start: int
    value_start: int
    value_end: int
    end: int

    @property
    def small(self) -> bool:
        return self.value_end - self.value_start <= _SMALL_FIELD


def _parts(data: bytes, boundary: bytes) -> Iterator[_Part]:
    """Yield the parts of a form (RFC 7578), skipping over files."""
    mark = b"--" + boundary
    at = 0 if data.startswith(mark) else data.find(b"\r\n" + mark) + 2
    if at < 2 and not data.startswith(mark):
        raise ProxyError(
            ErrorCode.INVALID_REQUEST, "the multipart body does not contain its boundary (see Content-Type)"
        )
    while True:
        head = at + len(mark)
        if data[head : head + 2] == b"--":
            return
        body = data.find(b"\r\n\r\n", head)
        end = data.find(b"\r\n" + mark, body if body >= 0 else head)
        if body < 0 or end < 0:
            raise ProxyError(
                ErrorCode.INVALID_REQUEST, "the multipart body is cut: its last boundary is missing"
            )
        found = _DISPOSITION.search(data, head, body + 2)
        name = (found[1] or found[2] or b"") if found else b""
        yield _Part(name, at, body + 4, max(body + 4, end), end + 2)
        at = end + 2


def _wrong_type(field: str, wanted: str, value: object) -> ProxyError:
    return ProxyError(
        ErrorCode.INVALID_REQUEST, f"'{field}' must be {wanted}, not {_json_type(value)}", param=field
    )


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
