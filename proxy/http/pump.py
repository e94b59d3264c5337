"""From the engine's bytes to the client's: sinks that pass, hold back to event ends, and count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from proxy.admission import Ticket
from proxy.clock import Clock
from proxy.http.call import Call
from proxy.http.facts import Facts
from proxy.http.reply import Reply
from proxy.metrics import Metrics
from proxy.sse import Ending, Shape, Splitter, UsageMeter, complete, content_chunks, ending

WINDOW: Final = 8 * 1024
"""Bytes kept from both ends of a plain JSON body, where llama-server puts `usage` and `timings`."""
_SAMPLE: Final = 32


@dataclass(frozen=True, slots=True)
class Passage:
    """One response's way: to whom, recorded where, charged to which ticket, answering what."""

    reply: Reply
    call: Call
    ticket: Ticket
    facts: Facts


class EventSink:
    """Passes an event stream in whole events and observes it on the bytes in hand."""

    def __init__(self, way: Passage, shape: Shape, metrics: Metrics, clock: Clock) -> None:
        self._reply, self._call, self._ticket, self._shape = way.reply, way.call, way.ticket, shape
        self._clock = clock
        self._facts = way.facts
        self._splitter = Splitter()
        self._meter = UsageMeter(way.facts.prompts)
        self._gap: Callable[[float], None] = metrics.chunk_gap.labels(way.call.model).observe
        self._own: Callable[[float], None] = metrics.overhead.labels("chunk").observe
        self._reads = 0
        self._last = b""
        self._marked = way.facts.marked
        self.blocked = False

    @property
    def on_boundary(self) -> bool:
        """Whether an event may be injected after what was sent."""
        return self._splitter.on_boundary

    @property
    def over(self) -> bool:
        """Whether an event was passed after which nothing can come.

        A native stream of several tasks has a last event of each of them.
        """
        sole = self._shape is not Shape.NATIVE or self._facts.work.tasks == 1
        return sole and not self._splitter.held and ending(self._last, self._shape) is not Ending.CUT

    async def write(self, data: bytes) -> None:
        """Take one read of the upstream."""
        began = self._clock()
        whole = self._splitter.feed(data)
        if whole:
            await self._send(whole, began)

    async def finish(self) -> Ending:
        """Pass a last event that an upstream left without its empty line; say how the stream ended."""
        rest = self._splitter.finish()
        # half an event is of no use to anybody, whatever its beginning says
        half = self._splitter.on_boundary and not complete(rest)
        if rest and not half and ending(rest, self._shape, marked=self._marked) is not Ending.CUT:
            await self._send(rest, self._clock())
        self._call.usage = self._meter.usage
        if half and not self._marked:
            return Ending.CUT
        return ending(self._last, self._shape, marked=self._marked)

    async def _send(self, whole: bytes, began: float) -> None:
        self._reply.last_write = began
        self._last = whole
        # the rest of an event that was too long to hold back says nothing of it
        self._marked = self._marked and self._splitter.on_boundary
        fresh = content_chunks(whole, self._shape)
        if fresh:
            self._count(fresh, began)
        self._meter.feed_events(whole)
        self.blocked = True
        await self._reply.write(whole)
        self.blocked = False
        self._reads += 1
        if self._reads % _SAMPLE == 0 and self._reply.pending_bytes() == 0:
            self._own(self._clock() - began)

    def _count(self, fresh: int, now: float) -> None:
        call = self._call
        if call.first:
            gap = now - call.last
            self._gap(gap)
            call.max_gap = max(call.max_gap, gap)
            if not call.second:
                call.second = now
        else:
            call.first = now
            self._ticket.first_byte()
            if fresh > 1:
                call.second = now
        call.last = now
        call.chunks += fresh
        self._ticket.tokens(fresh)


class PlainSink:
    """Passes a body unchanged and keeps its two ends to read the token counts from."""

    def __init__(self, way: Passage, clock: Clock) -> None:
        self._reply, self._call, self._ticket = way.reply, way.call, way.ticket
        self._clock = clock
        self._meter = UsageMeter(way.facts.prompts)
        self._head = b""
        self._tail = b""
        self.blocked = False

    async def write(self, data: bytes) -> None:
        """Take one read of the upstream."""
        if not self._call.first:
            self._call.first = self._clock()
            self._ticket.first_byte()
        self._call.last = self._clock()
        if len(self._head) < WINDOW:
            self._head += data[: WINDOW - len(self._head)]
        self._tail = data[-WINDOW:] if len(data) >= WINDOW else (self._tail + data)[-WINDOW:]
        self.blocked = True
        await self._reply.write(data)
        self.blocked = False

    def finish(self) -> None:
        """Read the counts out of a complete body."""
        self._meter.feed_body(self._head, self._tail)
        self._call.usage = self._meter.usage
