"""`GET /api/events`: what happens, as server-sent events; a full snapshot first.

Requests are compared with what was last told, a few times a second and only while somebody listens: a state
that lasts shorter may not be told, the last one always is. `request` brings a request as `/api/requests`
shows it, `outcome` how it ended, `gone` that it holds nothing any more.
"""

import asyncio
import time
from typing import Any, Final

from aiohttp import web

from proxy import logs
from proxy.admission import ModelAdmissionView, TicketView
from proxy.admission.events import Effect, Finished
from proxy.http.hub import EventHub, Subscription
from proxy.http.ports import HttpContext
from proxy.http.requests import Requests
from proxy.sse import comment

COMPARE_S: Final = 0.2
TOKENS_S: Final = 1.0
"""A request of which only its count of tokens changes is told this often."""
IDLE_COMMENT_S: Final = 15.0
WRITE_S: Final = 30.0
"""How long one write to a watcher may take; who reads nothing for this long is cut."""
RECONNECT_MS: Final = 2000


def note_effect(hub: EventHub, effect: Effect) -> None:
    """Publish what an effect of admission tells watchers: how requests end."""
    if isinstance(effect, Finished) and hub.watched:
        ending = effect.ending
        data = {
            "id": ending.id,
            "model": ending.spec.model,
            "key": ending.spec.key,
            "class": ending.spec.priority_name,
            "endpoint": ending.spec.endpoint,
            "outcome": ending.outcome.value,
            "code": ending.code,
            "age_s": round(ending.age_s, 3),
            "queued_s": round(ending.queued_s, 3),
            "waits_s": {reason.value: round(seconds, 3) for reason, seconds in ending.held_s.items()},
        }
        hub.publish("outcome", data)


class Events:
    """The handler, and the comparison behind it. One per application."""

    def __init__(self, ctx: HttpContext, requests: Requests) -> None:
        self._ctx, self._hub, self._requests = ctx, ctx.hub, requests
        self._log = logs.get("http")
        self._told: dict[str, tuple[Any, ...]] = {}
        self._tokens: dict[str, tuple[int, float]] = {}
        self._gates: dict[str, tuple[Any, ...]] = {}
        self._comparing: asyncio.Task[None] | None = None

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Serve one watcher until it leaves, falls behind, or the proxy stops."""
        # before it listens: its snapshot is newer than what is told now
        self._begin()
        subscription = self._hub.subscribe()
        try:
            subscription.put(self._hub.number("snapshot", self._snapshot()))
            response = web.StreamResponse()
            response.headers["Content-Type"] = "text/event-stream"
            response.headers["Cache-Control"] = "no-cache"
            response.headers["X-Accel-Buffering"] = "no"
            await response.prepare(request)
            await self._feed(request, response, subscription)
        finally:
            self._hub.leave(subscription)
        return response

    async def close(self) -> None:
        """End all streams and the comparison. Idempotent."""
        self._hub.close()
        if self._comparing is not None:
            self._comparing.cancel()
            await asyncio.wait({self._comparing})

    async def _feed(
        self, request: web.Request, response: web.StreamResponse, subscription: Subscription
    ) -> None:
        try:
            async with asyncio.timeout(WRITE_S):
                await response.write(b"retry: %d\n\n" % RECONNECT_MS)
            while True:
                data = await subscription.take(IDLE_COMMENT_S)
                # why it ends may become known during a write; then it is the next round's last word
                over = subscription.why
                if over:
                    data += self._hub.number("end", {"reason": over})
                async with asyncio.timeout(WRITE_S):
                    await response.write(data or comment("nothing new"))
                    if over:
                        await response.write_eof()
                        return
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            # the watcher left
            pass

    def _snapshot(self) -> dict[str, Any]:
        models = [dict(self._ctx.models.describe(model)) for model in self._ctx.catalog.ids()]
        seen = {"at": time.time(), "requests": self._requests.all(), "models": models}
        control = self._ctx.control
        if control is not None:
            seen |= {"jobs": list(control.jobs()), "leases": list(control.leases())}
        return seen

    # --- comparing ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Bring what was told up to this instant, so that a snapshot made now is continued without a gap."""
        if self._comparing is not None and not self._comparing.done():
            self._tell()
            return
        now = self._ctx.clock()
        views = self._ctx.admission.tickets()
        self._told = {view.id: _marks(view) for view in views}
        self._tokens = {view.id: (view.tokens, now) for view in views}
        self._gates = {model: _gate(self._ctx.admission.view(model)) for model in self._ctx.catalog.ids()}
        self._comparing = asyncio.create_task(self._compare(), name="events")

    async def _compare(self) -> None:
        """Tell what changed, until nobody listens."""
        while self._hub.watched:
            await asyncio.sleep(COMPARE_S)
            self._tell()

    def _tell(self) -> None:
        try:
            # causes before effects
            self._tell_gates()
            self._tell_requests()
        except Exception:
            # watchers miss a comparison; requests must not notice
            self._log.exception("events could not be compared")

    def _tell_requests(self) -> None:
        now = self._ctx.clock()
        views = {view.id: view for view in self._ctx.admission.tickets()}
        for gone in self._told.keys() - views.keys():
            del self._told[gone]
            self._tokens.pop(gone, None)
            self._hub.publish("gone", {"id": gone})
        for name, view in views.items():
            marks = _marks(view)
            tokens, at = self._tokens.get(name, (0, now))
            if self._told.get(name) == marks and (tokens == view.tokens or now - at < TOKENS_S):
                continue
            self._told[name] = marks
            self._tokens[name] = (view.tokens, now)
            self._hub.publish("request", self._requests.shown(view))

    def _tell_gates(self) -> None:
        for model in self._ctx.catalog.ids():
            view = self._ctx.admission.view(model)
            gate = _gate(view)
            if self._gates.get(model) != gate:
                self._gates[model] = gate
                state, reason, mode = gate
                self._hub.publish("gate", {"model": model, "state": state, "reason": reason, "mode": mode})


def _marks(view: TicketView) -> tuple[Any, ...]:
    """Return what makes a request worth telling of again, in any change."""
    return (view.state, view.reason, view.position, view.cohort, view.backend)


def _gate(view: ModelAdmissionView) -> tuple[str, str, str]:
    return (view.gate.value, view.gate_reason, view.gate_mode)
