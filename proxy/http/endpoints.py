"""The inference paths: what each speaks, streams and accepts. The only table of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from proxy.http.passage import split
from proxy.sse import Shape
from proxy.types import Dialect


class Media(StrEnum):
    """What a request's body must be."""

    JSON = "json"
    FORM = "form"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One POST path of llama-server that goes through admission.

    `shape` is None where the answer never streams. `name` is the metric label.
    """

    name: str
    dialect: Dialect = Dialect.OPENAI
    shape: Shape | None = None
    media: Media = Media.JSON


def _table() -> Mapping[str, Endpoint]:
    openai, responses, anthropic = Dialect.OPENAI, Dialect.RESPONSES, Dialect.ANTHROPIC
    streams: dict[str, tuple[Dialect, Shape]] = {
        "/v1/chat/completions": (openai, Shape.CHAT),
        "/chat/completions": (openai, Shape.CHAT),
        "/v1/completions": (openai, Shape.TEXT),
        "/completion": (openai, Shape.NATIVE),
        "/completions": (openai, Shape.NATIVE),
        "/infill": (openai, Shape.NATIVE),
        "/v1/responses": (responses, Shape.RESPONSES),
        "/responses": (responses, Shape.RESPONSES),
        "/v1/messages": (anthropic, Shape.MESSAGES),
    }
    forms = ("/v1/audio/transcriptions", "/audio/transcriptions")
    answers = {
        "/v1/messages/count_tokens": anthropic,
        "/v1/chat/completions/input_tokens": openai,
        "/v1/responses/input_tokens": responses,
        "/v1/embeddings": openai,
        "/embeddings": openai,
        "/embedding": openai,
        "/v1/rerank": openai,
        "/rerank": openai,
        "/v1/reranking": openai,
        "/reranking": openai,
        "/tokenize": openai,
        "/detokenize": openai,
        "/apply-template": openai,
    }
    table = {path: Endpoint(path, dialect, shape) for path, (dialect, shape) in streams.items()}
    table.update({path: Endpoint(path, openai, Shape.TRANSCRIPT, Media.FORM) for path in forms})
    table.update({path: Endpoint(path, dialect) for path, dialect in answers.items()})
    return table


INFERENCE: Final = _table()


def dialect_of(path: str, raw_path: str) -> Dialect:
    """Return the dialect of errors for any path (decoded, and as received), known or not."""
    passed = split(raw_path)
    path = passed.path if passed is not None else path
    if path.startswith("/v1/messages"):
        return Dialect.ANTHROPIC
    if path.startswith(("/v1/responses", "/responses")):
        return Dialect.RESPONSES
    return Dialect.OPENAI
