"""Events for whoever watches: published once, kept for each subscriber within bounds.

A subscriber that does not keep up is dropped rather than waited for; it may come back and gets a snapshot.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import orjson

from proxy.errors import ErrorCode, ProxyError

MAX_SUBSCRIBERS: Final = 64
MAX_EVENTS: Final = 1024
MAX_BYTES: Final = 4 * 1024 * 1024
"""Bounds of one subscriber's buffer; the first event (a snapshot) may be larger."""


def encode(kind: str, data: Mapping[str, Any], number: int) -> bytes:
    """Return one SSE event with its number as id."""
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, kind.encode(), orjson.dumps(data))


class Subscription:
    """One watcher's buffer. `why` is set when nothing more will come."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self._held = 0
        self._fresh = asyncio.Event()
        self.why = ""

    def put(self, event: bytes) -> bool:
        """Keep an event; False when the watcher is too far behind, and is dropped."""
        if self.why:
            return False
        if self._events and (len(self._events) >= MAX_EVENTS or self._held + len(event) > MAX_BYTES):
            self._events.clear()
            self._held = 0
            self.end("too slow: events were lost; connect again for a new snapshot")
            return False
        self._events.append(event)
        self._held += len(event)
        self._fresh.set()
        return True

    def end(self, why: str) -> None:
        """Say that nothing more will come."""
        self.why = self.why or why
        self._fresh.set()

    async def take(self, timeout_s: float) -> bytes:
        """Return what is there, after at most `timeout_s` of waiting for something (then empty)."""
        if not self._events and not self.why:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._fresh.wait()
            except TimeoutError:
                return b""
        data = b"".join(self._events)
        self._events.clear()
        self._held = 0
        self._fresh.clear()
        return data


class EventHub:
    """Passes events on to all subscriptions. One per proxy; on the event loop's thread."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._number = 0
        self._closed = ""

    @property
    def watched(self) -> bool:
        """Whether anybody listens: without, nothing needs to be made."""
        return bool(self._subscriptions)

    def publish(self, kind: str, data: Mapping[str, Any]) -> None:
        """Give an event to everybody who listens."""
        if not self._subscriptions:
            return
        event = self.number(kind, data)
        slow = [subscription for subscription in self._subscriptions if not subscription.put(event)]
        self._subscriptions.difference_update(slow)

    def number(self, kind: str, data: Mapping[str, Any]) -> bytes:
        """Return an event with the next number, for one subscription alone."""
        self._number += 1
        return encode(kind, data, self._number)

    def subscribe(self) -> Subscription:
        """Begin to listen; `ProxyError` when there are too many, or the proxy is going down."""
        if self._closed:
            raise ProxyError(ErrorCode.SHUTTING_DOWN, self._closed, retry_after_s=5.0)
        if len(self._subscriptions) >= MAX_SUBSCRIBERS:
            text = f"there are already {MAX_SUBSCRIBERS} event streams open"
            raise ProxyError(ErrorCode.QUEUE_FULL, text, retry_after_s=5.0)
        subscription = Subscription()
        self._subscriptions.add(subscription)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """Stop listening."""
        self._subscriptions.discard(subscription)

    def close(self, why: str = "the proxy is shutting down") -> None:
        """End every subscription. Idempotent."""
        self._closed = self._closed or why
        for subscription in self._subscriptions:
            subscription.end(self._closed)
        self._subscriptions.clear()
