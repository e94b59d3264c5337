"""Loads on a real proxy: many raw streams at once, and the engine's own account of what became of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.client import RawStream, data
from tests.e2e.harness import Proxy

END_S = 180.0


@dataclass(slots=True)
class Answer:
    """What one streamed request came to. Times are monotonic seconds; `error` is empty when it ended well."""

    key: str = ""
    sent_at: float = 0.0
    first_at: float = 0.0
    second_at: float = 0.0
    ended_at: float = 0.0
    status: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the stream ended with its last event."""
        return not self.error and self.status == 200


def completion(words: str, tokens: int, **more: Any) -> dict[str, Any]:
    """Return the body of a streamed completion that runs to its length and reports its usage."""
    body = {"model": "m", "prompt": words, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return {**body, "temperature": 0, "stream_options": {"include_usage": True}, **more}


def ask(proxy: Proxy, body: Mapping[str, Any], headers: dict[str, str] | None = None) -> Answer:
    """Send one request and read it to its end; never raises for what the server does."""
    answer = Answer(sent_at=time.monotonic())
    try:
        stream = RawStream(proxy.url, "/v1/completions", body, END_S, headers)
        answer.status = stream.head()
        answer.headers = stream.headers
        if answer.status != 200:
            answer.error = stream.whole().decode(errors="replace")
        else:
            _read(stream, answer)
        stream.close()
    except (OSError, AssertionError) as error:
        answer.error = repr(error)
    answer.ended_at = time.monotonic()
    return answer


def _read(stream: RawStream, answer: Answer) -> None:
    last = b""
    while event := stream.event():
        last = event
        said = data(event)
        if not isinstance(said, dict):
            continue
        if "error" in said:
            answer.error = str(said["error"])
        if any(choice.get("text") for choice in said.get("choices", ())):
            answer.second_at = answer.second_at or (time.monotonic() if answer.first_at else 0.0)
            answer.first_at = answer.first_at or time.monotonic()
        if said.get("usage"):
            answer.tokens = said["usage"]["completion_tokens"]
            answer.prompt_tokens = said["usage"]["prompt_tokens"]
    if not answer.error and last != b"data: [DONE]":
        answer.error = f"the stream ended with {last!r}"


class Crowd:
    """Requests on threads, joined with a deadline."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.answers: list[Answer] = []

    def run(self, work: Callable[[], Answer]) -> None:
        """Start one request (or a client that returns its last one)."""

        def keep() -> None:
            self.answers.append(work())

        thread = threading.Thread(target=keep, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float = END_S) -> list[Answer]:
        """Wait for all; fails when one does not end."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        left = sum(thread.is_alive() for thread in self._threads)
        assert not left, f"{left} of {len(self._threads)} requests did not end within {timeout_s} s"
        return self.answers


def engine_events(proxy: Proxy, since: int = 0) -> list[dict[str, Any]]:
    """Return the engine's transitions after `since`, read through the proxy; fails when some were lost."""
    view = proxy.get(f"/slots?model=m&phase_since={since}")
    assert view["lost"] == 0, view["lost"]
    events: list[dict[str, Any]] = view["events"]
    return events


def cohort_sizes(events: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the members of each cohort at its seal, in order."""
    return [int(event["tokens"]) for event in events if event["event"] == "seal"]


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean; fails without values."""
    listed = list(values)
    assert listed
    return sum(listed) / len(listed)
