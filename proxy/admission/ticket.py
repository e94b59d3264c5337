"""A requester's handle on its ticket."""

import asyncio
from typing import Protocol, overload

from proxy.admission.entry import Entry
from proxy.admission.records import Grant, TicketSpec
from proxy.errors import ProxyError
from proxy.types import Outcome, Reason, TicketState


class Desk(Protocol):
    """What a ticket asks of admission."""

    def released(self, ticket: "Ticket", outcome: Outcome, code: str, *, upstream_open: bool) -> None: ...
    def committed(self, ticket: "Ticket") -> None: ...
    def requeued(self, ticket: "Ticket") -> None: ...
    def reported(
        self, ticket: "Ticket", prompt: int | None, cached: int | None, generated: int | None
    ) -> None: ...
    def first_byte(self, ticket: "Ticket") -> None: ...
    def position(self, entry: Entry) -> int: ...
    def now(self) -> float: ...


class Ticket:
    """One request's ticket; made by `Admission.submit`.

    The requester awaits `granted`, watches `ended`, and calls `release` exactly when it is done, in
    `finally`, with the outcome that only it knows: also when its wait is cancelled.
    """

    def __init__(self, desk: Desk, entry: Entry) -> None:
        loop = asyncio.get_running_loop()
        self._desk = desk
        self.entry = entry
        """The core's record; only admission may look at it."""
        self._answer: asyncio.Future[Grant | ProxyError] = loop.create_future()
        self._released = False
        self.recalled: asyncio.Future[None] = loop.create_future()
        """Resolves when the core wants the present grant back; another future for each grant.

        Whoever sees it before anything came back from the engine closes the exchange, calls `requeue`
        and awaits `granted` again; whoever has the response head already has called `commit` and goes on.
        """
        self.ended: asyncio.Future[ProxyError] = loop.create_future()
        """Resolves when the ticket is ended from elsewhere: unload, operator, dead backend, shutdown."""

    @property
    def id(self) -> str:
        """The ticket's id, also the stem of the engine's tag."""
        return self.entry.spec.id

    @property
    def spec(self) -> TicketSpec:
        """What was submitted."""
        return self.entry.spec

    @property
    def state(self) -> TicketState:
        """Where it is."""
        return self.entry.state

    @property
    def reason(self) -> Reason | None:
        """Why it waits, None when it does not."""
        return self.entry.reason

    @property
    def position(self) -> int:
        """1-based place in its model's queue, 0 when it does not wait there."""
        return self._desk.position(self.entry)

    @property
    def queued_s(self) -> float:
        """Seconds spent in the proxy's queue so far."""
        return self.entry.queued_s(self._desk.now())

    @property
    def lived_s(self) -> dict[TicketState, float]:
        """Seconds spent in each state so far, in the order they were entered; engine states as mirrored."""
        lived = dict(self.entry.lived)
        now = lived.get(self.state, 0.0) + self._desk.now() - self.entry.since
        return {**lived, self.state: now}

    @property
    def cohort(self) -> int | None:
        """The engine cohort it was last seen in."""
        return self.entry.cohort

    @overload
    async def granted(self, timeout: None = None) -> Grant: ...
    @overload
    async def granted(self, timeout: float) -> Grant | None: ...
    async def granted(self, timeout: float | None = None) -> Grant | None:
        """Wait for capacity; return the grant, or None when `timeout` seconds passed without one.

        Raises the `ProxyError` the ticket was ended with. A cancelled wait leaves the ticket where it is,
        perhaps with a grant that came at the same moment: the requester's `release` gives all of it back.
        """
        if not self._answer.done():
            await asyncio.wait({self._answer}, timeout=timeout)
        if self.ended.done():
            raise self.ended.result().copy()
        if self._released:
            raise RuntimeError(f"ticket {self.id} was released while it was waited for")
        if not self._answer.done():
            return None
        answer = self._answer.result()
        if isinstance(answer, ProxyError):
            raise answer.copy()
        return answer

    def first_byte(self) -> None:
        """Say that the first content byte went to the client."""
        if not self._released:
            self._desk.first_byte(self)

    def tokens(self, count: int) -> None:
        """Count generated tokens seen on the way to the client; the next decision charges them to the key."""
        self.entry.tokens += count

    def commit(self) -> None:
        """Say that the engine's response head arrived: a recall is out of the question from now on."""
        if not self._released:
            self._desk.committed(self)

    def requeue(self) -> None:
        """Give a recalled grant back: the exchange is closed and nothing of it reached the client.

        The ticket stands in its old place again; the old grant stays charged until the engine shows that
        it let go. Without a recall (it was void, or the ticket ended meanwhile) nothing happens.
        """
        if self._released or self.ended.done() or not self.entry.recalling:
            return
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        self.recalled = loop.create_future()
        self._desk.requeued(self)

    def report(
        self, prompt_tokens: int | None, cached_tokens: int | None, generated_tokens: int | None
    ) -> None:
        """Say what the engine counted, None where it did not; call it once, before `release`."""
        if not self._released:
            self._desk.reported(self, prompt_tokens, cached_tokens, generated_tokens)

    def release(self, outcome: Outcome, code: str = "", *, upstream_open: bool = False) -> None:
        """Give everything back; only the first call counts.

        `upstream_open`: the engine may still be at work for it. The ticket then stays charged as
        `cancelling` until the engine shows that it let go.
        """
        if self._released:
            return
        self._released = True
        self._answer.cancel()
        self._desk.released(self, outcome, code, upstream_open=upstream_open)

    def resolve(self, grant: Grant) -> None:
        """Deliver the grant (called by admission)."""
        if not self._answer.done():
            self._answer.set_result(grant)

    def recall(self) -> None:
        """Ask for the grant back (called by admission)."""
        if not self.recalled.done():
            self.recalled.set_result(None)

    def end(self, error: ProxyError) -> None:
        """Deliver the end (called by admission)."""
        if not self._answer.done():
            self._answer.set_result(error)
        if not self.ended.done():
            self.ended.set_result(error)
