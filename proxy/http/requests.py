"""Live requests, for operators: list them, cancel one."""

from collections.abc import Mapping
from typing import Any, Protocol

from aiohttp import web

from proxy import logs
from proxy.admission import TicketView
from proxy.errors import ErrorCode, ProxyError
from proxy.http.call import CALL, Call
from proxy.http.naming import model_of
from proxy.http.ports import HttpContext
from proxy.http.render import json_response
from proxy.types import TicketState


class Live(Protocol):
    """What a request in flight adds to its ticket."""

    @property
    def call(self) -> Call: ...
    def left_s(self) -> Mapping[str, float]: ...


class Board:
    """The requests in flight by their ticket's id."""

    def __init__(self) -> None:
        self._live: dict[str, Live] = {}

    def add(self, ticket: str, live: Live) -> None:
        """Put a request on the board."""
        self._live[ticket] = live

    def remove(self, ticket: str, live: Live) -> None:
        """Take it off again; another's that has the same id by now stays."""
        if self._live.get(ticket) is live:
            del self._live[ticket]

    def get(self, ticket: str) -> Live | None:
        """Return the request with this ticket, None when it is gone."""
        return self._live.get(ticket)


class Requests:
    """Handlers of `/api/requests`, and how a request is shown. Bound to one application's context."""

    def __init__(self, ctx: HttpContext, board: Board) -> None:
        self._ctx, self._board = ctx, board
        self._log = logs.get("http")

    def shown(self, view: TicketView) -> dict[str, Any]:
        """Return one live request as JSON values: seconds end in `_s`."""
        live = self._board.get(view.id)
        call = live.call if live is not None else None
        left = {**view.left_s, **(live.left_s() if live is not None else {})}
        phase = self._ctx.models.phase(view.model) if view.backend is not None else None
        return {
            "id": view.id,
            "request_id": call.id.shown if call is not None else view.id,
            "model": view.model,
            "key": view.key,
            "class": view.priority,
            "endpoint": view.endpoint,
            "stream": view.stream,
            "state": view.state.value,
            "reason": view.reason.value if view.reason is not None else None,
            "position": view.position,
            "backend": view.backend.backend if view.backend is not None else None,
            "phase": phase.value if phase is not None else None,
            "cohort": view.cohort,
            "tasks": view.tasks,
            "cost": view.cost,
            "body_bytes": view.body_bytes,
            "tokens": view.tokens,
            "age_s": round(view.age_s, 3),
            "queued_s": round(view.queued_s, 3),
            "waits_s": {reason.value: round(seconds, 3) for reason, seconds in view.held_s.items()},
            "recalls": view.recalls,
            "budgets_left_s": {name: round(seconds, 3) for name, seconds in left.items()},
        }

    def all(self, model: str | None = None) -> list[dict[str, Any]]:
        """Return all live requests (of one model), running before waiting, each in order."""
        views = self._ctx.admission.tickets()
        return [self.shown(view) for view in views if model is None or view.model == model]

    async def list(self, request: web.Request) -> web.Response:
        """Serve `GET /api/requests[?model=]`."""
        name = request.query.get("model")
        return json_response({"requests": self.all(model_of(name, self._ctx.catalog) if name else None)})

    async def cancel(self, request: web.Request) -> web.Response:
        """Serve `DELETE /api/requests/{id}`. Ending what is being ended already changes nothing."""
        name = request.match_info["id"]
        view = next((view for view in self._ctx.admission.tickets() if view.id == name), None)
        if view is None:
            raise ProxyError(ErrorCode.NOT_FOUND, f"there is no live request {name[:200]!r}", param="id")
        operator = request[CALL].caller
        by = operator.key if operator is not None else ""
        if view.state is not TicketState.CANCELLING:
            text = f"this request was cancelled by the operator {by}"
            self._ctx.admission.cancel(name, ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, text))
            self._log.info("cancelled", id=name, model=view.model, operator=by, was=view.state.value)
        answer = {"ok": True, "id": name, "model": view.model, "was": view.state.value}
        return json_response({**answer, "status": "cancelled"})
