"""One HTTP exchange with the engine, in the foreground or on a thread that can be cut off.

The clock-free order of events is ``Event.order``: one counter for all exchanges of
this process. Within one connection it is the server's own order.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_order = itertools.count()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response: status, lower-case headers, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    def ok(self) -> Any:
        """Return the body as JSON, and fail when the status is not 200."""
        assert self.status == 200, f"HTTP {self.status}: {self.body[:500]!r}"
        return self.json()


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event: its place among all events, its arrival (monotonic, s), its data."""

    order: int
    at_s: float
    data: Json

    @property
    def index(self) -> int:
        """Which prompt or choice of the request this event belongs to."""
        return int(self.data.get("index", 0))

    @property
    def content(self) -> str:
        """The text this event carries; empty for progress and final events."""
        return str(self.data.get("content", ""))

    @property
    def tokens(self) -> list[int]:
        """The token ids this event carries."""
        return list(self.data.get("tokens", []))

    @property
    def progress(self) -> Json | None:
        """Prompt progress: total, cache, processed, time_ms."""
        found: Json | None = self.data.get("prompt_progress")
        return found

    @property
    def is_token(self) -> bool:
        """Whether a generated token is in this event (progress events carry none)."""
        return self.progress is None and not self.data.get("stop", False) and "tokens" in self.data

    @property
    def prompt_done(self) -> bool:
        """Whether this is the final progress of a prompt."""
        found = self.progress
        return found is not None and found["processed"] >= found["total"]


def request(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float = 240.0,
) -> Answer:
    """Do one exchange and return it whole; a bytes ``body`` is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        payload, sent = _payload(body, headers)
        connection.request(method, path, body=payload, headers=sent)
        response = connection.getresponse()
        data = response.read()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, data)
    finally:
        connection.close()


def _payload(body: Any, headers: Mapping[str, str] | None) -> tuple[bytes | None, dict[str, str]]:
    sent = {"connection": "close", **(headers or {})}
    if body is None or isinstance(body, bytes):
        return body, sent
    sent.setdefault("content-type", "application/json")
    return json.dumps(body).encode(), sent


class Exchange:
    """A POST on its own thread: collects events (a stream) or one body, and can be cut.

    ``close()`` cuts the connection, as a client that leaves does; with ``leave_after`` it is cut on the arrival of that
    event of a stream.
    """

    def __init__(
        self,
        port: int,
        path: str,
        body: Json,
        headers: Mapping[str, str] | None = None,
        *,
        leave_after: int | None = None,
        timeout_s: float = 240.0,
    ) -> None:
        self.body = body
        self._leave_after = leave_after
        self.status: int | None = None
        self.events: list[Event] = []
        self.raw = b""
        self.error: str | None = None
        self.done = False
        self.cut = False
        self.sent_at_s = time.monotonic()
        self.ended_at_s: float | None = None
        self._changed = threading.Condition()
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self._send(port, path, body, headers)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _send(self, port: int, path: str, body: Json, headers: Mapping[str, str] | None) -> None:
        payload, sent = _payload(body, headers)
        assert payload is not None
        head = [f"POST {path} HTTP/1.1", f"host: 127.0.0.1:{port}"]
        head += [f"{name}: {value}" for name, value in sent.items()]
        head.append(f"content-length: {len(payload)}")
        self._socket.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + payload)

    def _read(self) -> None:
        try:
            response = http.client.HTTPResponse(self._socket)
            response.begin()
            with self._changed:
                self.status = response.status
                self._changed.notify_all()
            kind = response.getheader("content-type") or ""
            if "text/event-stream" in kind:
                self._read_events(response)
            else:
                self.raw = response.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                self.done = True
                self.ended_at_s = time.monotonic()
                self._changed.notify_all()
            self._socket.close()

    def _read_events(self, response: http.client.HTTPResponse) -> None:
        while line := response.readline():
            text = line.decode().strip()
            if not text.startswith("data:"):
                if text.startswith("error:"):
                    self.error = text
                continue
            payload = text[5:].strip()
            # the engine sends ``null`` when the second prompt of an array begins
            if payload in ("[DONE]", "null"):
                continue
            event = Event(next(_order), time.monotonic(), json.loads(payload))
            with self._changed:
                self.events.append(event)
                if "error" in event.data:
                    self.error = payload
                self._changed.notify_all()
            if len(self.events) == self._leave_after:
                self.cut = True
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return

    def wait(self, wanted: Callable[[Event], bool], what: str, *, timeout_s: float = 180.0) -> Event:
        """Return the first event that is ``wanted``; fail when the stream ends without it."""
        deadline = time.monotonic() + timeout_s
        seen = 0
        with self._changed:
            while True:
                for event in self.events[seen:]:
                    if wanted(event):
                        return event
                seen = len(self.events)
                left = deadline - time.monotonic()
                assert not self.done, f"ended without {what}: {self.describe()}"
                assert left > 0, f"not within {timeout_s} s: {what}: {self.describe()}"
                self._changed.wait(left)

    def wait_progress(self, *, timeout_s: float = 180.0) -> Event:
        """Wait until a part of the prompt, but not all of it, was processed."""
        return self.wait(
            lambda e: (
                e.progress is not None and e.progress["cache"] < e.progress["processed"] < e.progress["total"]
            ),
            "progress within the prompt",
            timeout_s=timeout_s,
        )

    def wait_prompt_done(self, *, timeout_s: float = 180.0) -> Event:
        """Wait for the final progress of the prompt."""
        return self.wait(lambda e: e.prompt_done, "final progress", timeout_s=timeout_s)

    def wait_token(self, *, timeout_s: float = 180.0) -> Event:
        """Wait for the first generated token."""
        return self.wait(lambda e: e.is_token, "first token", timeout_s=timeout_s)

    def finish(self, *, timeout_s: float = 240.0) -> Exchange:
        """Wait for the end of the response and return self."""
        self._thread.join(timeout_s)
        assert self.done, f"no end within {timeout_s} s: {self.describe()}"
        return self

    def wait_done(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the end; return whether it came."""
        self._thread.join(timeout_s)
        return self.done

    def ok(self, *, timeout_s: float = 240.0) -> Exchange:
        """Wait for the end and fail unless it was a whole, error-free 200."""
        self.finish(timeout_s=timeout_s)
        assert self.status == 200, self.describe()
        assert self.error is None, self.describe()
        return self

    def json(self) -> Any:
        """Return the body of a response that was not a stream."""
        return json.loads(self.raw)

    def close(self) -> None:
        """Cut the connection now and wait for the reader to notice."""
        self.cut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)

    @property
    def text(self) -> str:
        """All content so far, of all choices, in order of arrival."""
        if self.events:
            return "".join(e.content for e in self.events if not e.data.get("stop"))
        return str(self.json()["content"])

    @property
    def token_ids(self) -> list[int]:
        """All generated token ids so far (needs ``return_tokens`` without a stream)."""
        if self.events:
            return [token for e in self.events if e.is_token for token in e.tokens]
        return list(self.json()["tokens"])

    @property
    def final(self) -> Json:
        """The event (or body) that ends the response: timings, stop_type, ..."""
        if self.events:
            return self.events[-1].data
        found: Json = self.json()
        return found

    def describe(self) -> str:
        """Return the state of the exchange for a failure message."""
        return (
            f"status={self.status} events={len(self.events)} done={self.done} "
            f"error={self.error} raw={self.raw[:300]!r}"
        )
