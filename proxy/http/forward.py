"""One inference request from its parsed body to the end of its response.

Order of life: submit, wait for the grant, open the upstream exchange (again after a recall), pump, release.
Whatever ends it (client, engine, operator, budget), the upstream socket is closed at once and the ticket is
released exactly once, in that order.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from proxy.admission import Grant, Mirror, Ticket, TicketSpec, outcome_of
from proxy.errors import ErrorCode, ProxyError
from proxy.headers import to_engine
from proxy.http.accounts import BEFORE_HEAD, CLIENT_GONE, MID_BODY
from proxy.http.budgets import Meter, Seen, Stall, Sweeper, expired
from proxy.http.call import Call, Caller
from proxy.http.cut import Cut
from proxy.http.endpoints import Endpoint
from proxy.http.facts import Facts
from proxy.http.opening import head_or_recall
from proxy.http.ports import HttpContext
from proxy.http.pump import EventSink, Passage, PlainSink
from proxy.http.render import engine_error_event
from proxy.http.reply import Reply
from proxy.http.requests import Board
from proxy.http.uploads import Upload
from proxy.settings import Budgets
from proxy.sse import Ending
from proxy.types import Outcome, TicketState
from proxy.upstream import Exchange, Head, UpstreamDied, UpstreamRequest

ERROR_BODY_LIMIT: Final = 256 * 1024
CAUSE_WAIT_S: Final = 0.2
"""How long a dead socket waits for the news of why (the process's exit status, an operator's order)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be sent where, for whom.

    `target` is the origin-form path with its query, as received. `limits` are the model's own unless
    given. `may_load` is false for reads that must not start a model. `upload` accounts the body.
    """

    caller: Caller
    endpoint: Endpoint
    facts: Facts
    target: str
    limits: Budgets | None = None
    may_load: bool = True
    upload: Upload | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """What all flights of an application share."""

    sweeper: Sweeper
    board: Board


class Flight:
    """One request in flight. Used once."""

    def __init__(self, ctx: HttpContext, room: Room, request: web.Request, call: Call, plan: Plan) -> None:
        self._ctx, self._room, self._request, self._call = ctx, room, request, call
        self._plan, self._facts = plan, plan.facts
        self._reply = Reply(request, call)
        self._cut = Cut()
        self._limits = plan.limits or ctx.catalog.model(call.model).budgets
        self._meter = Meter(self._limits, ctx.clock())
        self._stall = Stall(ctx.settings.server.stall_timeout_s, ctx.clock())
        off = request.headers.get("x-keepalive", "").strip().lower() == "off"
        self._keepalive_s = None if off or not plan.facts.stream else ctx.settings.admission.keepalive_s
        self._ticket: Ticket | None = None
        self._exchange: Exchange | None = None
        self._sink: EventSink | PlainSink | None = None
        self._grant: Grant | None = None
        self._opening = False
        self._complete = False
        self._finishing = False
        self._refused = ""
        self._comment: asyncio.Task[None] | None = None

    async def run(self) -> web.StreamResponse:
        """Serve the request; raises `ProxyError` while nothing was sent."""
        call = self._call
        began = self._ctx.clock()
        ticket = self._ctx.admission.submit(self._spec())
        if self._plan.upload is not None:
            self._plan.upload.handed()
        call.submitted = self._ctx.clock()
        self._ctx.metrics.overhead.labels("admit").observe(call.submitted - began)
        self._ticket, call.ticket = ticket, ticket.id
        ticket.ended.add_done_callback(self._cut.on_ended)
        unwatch = self._room.sweeper.add(self)
        self._room.board.add(ticket.id, self)
        outcome, code = Outcome.CANCELLED, CLIENT_GONE
        try:
            async with self._cut:
                await self._serve(ticket)
            outcome, code = Outcome.FAILED if self._refused else Outcome.COMPLETED, self._refused
        except ProxyError as error:
            outcome, code = outcome_of(error.code), error.code.value
            self._close()
            if not self._opening and not ticket.ended.done():
                # its own budget ran out before an engine heard of it: no place is kept while its client is told
                self._leave(ticket, outcome, code)
            if not self._reply.started:
                raise
            await self._tell(error)
        except ConnectionError:
            # the client's side: upstream failures arrive as UpstreamDied
            pass
        except asyncio.CancelledError:
            raise
        except BaseException:
            outcome, code = Outcome.FAILED, ErrorCode.INTERNAL_ERROR.value
            if self._reply.started:
                self._reply.abort()
            raise
        finally:
            unwatch()
            self._room.board.remove(ticket.id, self)
            ticket.ended.remove_done_callback(self._cut.on_ended)
            self._close()
            if self._comment is not None:
                self._comment.cancel()
            self._leave(ticket, outcome, code)
        return self._answer()

    @property
    def call(self) -> Call:
        """The request's own record."""
        return self._call

    def left_s(self) -> dict[str, float]:
        """Return what is left of the request's running limits, by setting."""
        return self._meter.left_s(self._ctx.clock(), self._call.body_done)

    def sweep(self, now: float) -> None:
        """Check the budgets, and keep a silent started stream alive (called by the sweeper)."""
        ticket, call, sink = self._ticket, self._call, self._sink
        if ticket is None:
            return
        if self._reply.started and self._stall.step(now, *self._reply.progress()):
            # as if it had left: there is nobody to tell
            self._reply.abort()
            return
        code = self._meter.step(
            Seen(
                now=now,
                began=call.body_done,
                opened=call.opened,
                first=call.first,
                last=call.last,
                stream=self._facts.stream,
                state=ticket.state,
                mirrored=self._mirrored(),
                blocked=self._finishing or (sink is not None and sink.blocked),
            )
        )
        if code is not None:
            self._cut.fire(expired(code, self._limits, configured=self._limits is not self._plan.limits))
            return
        if self._keepalive_s is None or self._finishing or not isinstance(sink, EventSink) or sink.blocked:
            return
        if self._comment is not None and not self._comment.done():
            return
        if now - self._reply.last_write >= self._keepalive_s and sink.on_boundary:
            self._reply.last_write = now
            self._comment = asyncio.ensure_future(self._comment_now(_waiting(ticket)))

    # --- phases -------------------------------------------------------------------------------------

    def _spec(self) -> TicketSpec:
        call, facts, caller = self._call, self._facts, self._plan.caller
        return TicketSpec(
            id=call.id.tag,
            model=call.model,
            key=caller.key,
            priority=caller.rank,
            priority_name=caller.priority,
            tasks=facts.work.tasks,
            stream=facts.stream,
            body_bytes=facts.body.size,
            endpoint=call.endpoint,
            max_queue=caller.max_queue,
            n=facts.work.n,
            may_load=self._plan.may_load,
            weight=caller.weight,
            prompt_bytes=facts.prompt.size,
            prefix=facts.prompt.prefix,
            # a client's own id, and nobody else's: it carries seniority
            retry_id=f"{caller.key}/{call.id.shown}" if call.id.given else "",
        )

    async def _serve(self, ticket: Ticket) -> None:
        call = self._call
        try:
            exchange = None
            while exchange is None:
                exchange = await self._opened(ticket)
            self._exchange = exchange
            ticket.commit()
            self._drop_body()
            call.head = self._ctx.clock()
            self._ctx.metrics.overhead.labels("connect").observe(exchange.head.connect_s)
            call.cohort = call.cohort if ticket.cohort is None else ticket.cohort
            await self._pump(exchange, ticket)
        except UpstreamDied as died:
            raise await self._cause(died, ticket) from died

    async def _opened(self, ticket: Ticket) -> Exchange | None:
        """Send the request once it is granted; None when the grant was taken back before the engine answered.

        The body is sent again then, to the place of the next grant.
        """
        call = self._call
        self._grant = grant = await self._granted(ticket)
        call.granted = self._ctx.clock()
        call.backend, call.generation, call.cohort = grant.key.backend, grant.key.generation, grant.cohort
        request = UpstreamRequest(
            method=self._request.method,
            target=self._plan.target,
            headers=to_engine(tuple(self._request.headers.items()), tag=grant.tag, gather_ms=grant.gather_ms),
            body=self._facts.body.data,
        )
        self._opening = True
        call.opened = self._ctx.clock()
        exchange = await head_or_recall(
            self._ctx.upstream(grant.key),
            request,
            ticket.recalled,
            self._keepalive_s,
            lambda: self._reply.keepalive(_waiting(ticket)),
        )
        if exchange is None and not ticket.ended.done():
            # one that was ended at the same moment is let go of as any that ran
            self._opening = False
            self._grant = None
            call.granted = call.opened = 0.0
            call.recalls += 1
            ticket.requeue()
        return exchange

    async def _granted(self, ticket: Ticket) -> Grant:
        if self._keepalive_s is None:
            return await ticket.granted()
        while True:
            grant = await ticket.granted(self._keepalive_s)
            if grant is not None:
                return grant
            await self._reply.keepalive(_waiting(ticket))

    async def _pump(self, exchange: Exchange, ticket: Ticket) -> None:
        head, reply, call, ctx = exchange.head, self._reply, self._call, self._ctx
        shape = self._plan.endpoint.shape
        if shape is not None and head.status == 200 and _is_events(head):
            await reply.begin_sse(head)
            events = EventSink(Passage(reply, call, ticket, self._facts), shape, ctx.metrics, ctx.clock)
            reply.last_write = ctx.clock()
            self._sink = events
            try:
                await exchange.attach(events)
            except UpstreamDied:
                # who has the last event has the answer, whatever became of the connection
                if not events.over:
                    raise
            self._complete = True
            match await events.finish():
                case Ending.WHOLE:
                    pass
                case Ending.ERROR:
                    self._refused = "engine_error"
                case Ending.CUT:
                    raise UpstreamDied("it ended the stream without finishing it", before_head=False)
        elif reply.started:
            # the stream began as a keep-alive; what the engine says instead becomes its last event
            body = await exchange.read(ERROR_BODY_LIMIT)
            self._complete = True
            self._refused = f"engine_{head.status}"
            await reply.last_event(engine_error_event(head.status, body, call.dialect, call.id.shown))
            return
        else:
            if head.status >= 400:
                self._refused = f"engine_{head.status}"
            await reply.begin_plain(head)
            plain = PlainSink(Passage(reply, call, ticket, self._facts), ctx.clock)
            self._sink = plain
            await exchange.attach(plain)
            self._complete = True
            plain.finish()
        # from here on it waits for the client alone, and a comment would stand behind the end
        self._finishing = True
        await reply.finish()

    def _drop_body(self) -> None:
        self._facts.body.drop()
        if self._plan.upload is not None:
            self._plan.upload.let_go()

    # --- ends ---------------------------------------------------------------------------------------

    def _leave(self, ticket: Ticket, outcome: Outcome, code: str) -> None:
        """Write down how it ended and release its ticket; only the first call counts."""
        call = self._call
        if call.outcome is not None:
            return
        call.outcome, call.code = outcome, code
        call.reason = str(ticket.reason or "")
        call.lived_s = ticket.lived_s
        call.cohort = call.cohort if ticket.cohort is None else ticket.cohort
        if call.usage is not None:
            ticket.report(call.usage.prompt, call.usage.cached, call.usage.generated)
        ticket.release(outcome, code, upstream_open=self._opening and not self._complete)

    def _close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()

    async def _tell(self, error: ProxyError) -> None:
        events = self._sink if isinstance(self._sink, EventSink) else None
        with contextlib.suppress(ConnectionError):
            if events is not None and events.over:
                # the client has its answer, which nothing may follow
                await self._reply.last_event(b"")
            else:
                await self._reply.fail(error, on_boundary=events is None or events.on_boundary)

    async def _cause(self, died: UpstreamDied, ticket: Ticket) -> ProxyError:
        """Return why the exchange failed: what admission knows, else the bare fact."""
        kind = BEFORE_HEAD if died.before_head else MID_BODY
        self._ctx.metrics.upstream_errors.labels(self._call.model, kind).inc()
        await asyncio.wait({ticket.ended}, timeout=CAUSE_WAIT_S)
        if ticket.ended.done() and not ticket.ended.cancelled():
            return ticket.ended.result().copy()
        when = "before it answered" if died.before_head else "in the middle of its answer"
        return ProxyError(
            ErrorCode.UPSTREAM_ERROR,
            f"the engine of {self._call.model!r} was lost {when}: {died}",
        )

    def _answer(self) -> web.StreamResponse:
        if self._reply.response is not None:
            return self._reply.response
        # the client left before anything was sent; nobody will see this
        return web.Response(status=499)

    def _mirrored(self) -> bool:
        if self._limits.first_token_timeout_s is None or self._grant is None:
            return False
        view = self._ctx.admission.view(self._call.model)
        return any(b.key == self._grant.key and b.mirror is Mirror.NATIVE for b in view.backends)

    async def _comment_now(self, text: str) -> None:
        # when the client is gone, its own task learns that by itself
        with contextlib.suppress(ConnectionError):
            await self._reply.keepalive(text)


def _is_events(head: Head) -> bool:
    return head.get("content-type").partition(";")[0].strip().lower() == "text/event-stream"


def _waiting(ticket: Ticket) -> str:
    """Return what a waiting client is told: where it is, its place in the queue, and why it waits."""
    place = f" position={ticket.position}" if ticket.state is TicketState.QUEUED else ""
    reason = f" reason={ticket.reason}" if ticket.reason is not None else ""
    return f"{ticket.state}{place}{reason}"
