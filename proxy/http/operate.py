"""Operators' orders for models: load, unload, force-unload, reconcile, gates."""

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from proxy.admission import outcome_of
from proxy.errors import ErrorCode, ProxyError, error_body
from proxy.http.call import CALL
from proxy.http.naming import model_of
from proxy.http.orders import (
    GateOrder,
    LoadOrder,
    ReloadOrder,
    UnloadOrder,
    audit_of,
    read,
    seconds_of,
)
from proxy.http.ports import Control, HttpContext
from proxy.http.render import json_response
from proxy.types import ModelState

SHORT_S: Final = 2.0
"""How long the unload of what is not loaded may take to be answered as done."""


class Operate:
    """Handlers below `/api/models/{id}`, and `/api/gate` and `/api/reload`. Bound to one application's context."""

    def __init__(self, ctx: HttpContext, control: Control) -> None:
        self._ctx, self._control = ctx, control
        self._server = ctx.settings.server

    async def load(self, request: web.Request) -> web.Response:
        """Serve `POST …/load[?wait=s]`: 202 and the job; 200 once it is ready, its error when it failed."""
        model, wait_s = self._model(request), seconds_of(request, "wait")
        await read(request, LoadOrder, self._server)
        job = self._control.load(model, audit_of(request, self._server))
        job = await self._control.wait(job["id"], wait_s) or job
        if not job["ended"]:
            return json_response({"ok": True, "status": "loading", "model": model, "job": job}, 202)
        if job["state"] == "done":
            return json_response({"ok": True, "status": "ready", "model": model, "job": job})
        return self._failed(request, job)

    async def unload(self, request: web.Request) -> web.Response:
        """Serve `POST …/unload[?wait=s]`: drained as a job (202), or forced, which is over when it is answered."""
        model, wait_s = self._model(request), seconds_of(request, "wait")
        order = await read(request, UnloadOrder, self._server)
        if order.force and order.deadline_s is not None:
            text = "deadline_s: a forced unload has none: leave out deadline_s, or force"
            raise ProxyError(ErrorCode.INVALID_REQUEST, text, param="deadline_s")
        if order.dry_run:
            would = dict(self._control.would_cut(model))
            return json_response({"ok": True, "dry_run": True, "force": order.force, **would})
        audit, block = audit_of(request, self._server), order.then == "block"
        if order.force:
            answer = await self._control.force(
                model, block=block, reason=order.reason, mode=order.mode or "hold", audit=audit
            )
            return json_response(answer, 200 if answer["ok"] else 500)
        gone = self._ctx.models.state(model) in {ModelState.UNLOADED, ModelState.FAILED}
        job = self._control.unload(
            model, deadline_s=order.deadline_s, block=block, reason=order.reason, mode=order.mode, audit=audit
        )
        job = await self._control.wait(job["id"], max(wait_s, SHORT_S if gone else 0.0)) or job
        if not job["ended"]:
            return json_response(
                {"ok": True, "status": "unloading", "force": False, "model": model, "job": job}, 202
            )
        if job["state"] == "done":
            return json_response(
                {"ok": True, "status": "unloaded", "force": False, "model": model, "job": job}
            )
        return self._failed(request, job)

    async def reconcile(self, request: web.Request) -> web.Response:
        """Serve `POST …/reconcile`."""
        model = self._model(request)
        await read(request, LoadOrder, self._server)
        return json_response(await self._control.reconcile(model))

    async def gate(self, request: web.Request) -> web.Response:
        """Serve `POST …/gate` of one model, and `POST /api/gate` of all."""
        one = self._model(request) if "id" in request.match_info else None
        order = await read(request, GateOrder, self._server)
        if order.state == "open" and order.reason:
            text = "reason: an open gate has none; leave it out"
            raise ProxyError(ErrorCode.INVALID_REQUEST, text, param="reason")
        names = self._ctx.catalog.ids() if one is None else (one,)
        warning = ""
        before = {name: self._control.gate(name) for name in names}
        if not order.dry_run:
            warning = await self._control.set_gate(
                one,
                block=order.state == "blocked",
                reason=order.reason,
                mode=order.mode,
                audit=audit_of(request, self._server),
            )
        shown = [
            {
                "model": name,
                "was": before[name],
                "gate": self._control.gate(name)
                if not order.dry_run
                else {"state": order.state, "reason": order.reason, "mode": order.mode},
                "queued": view.queued,
                "running": view.running,
            }
            for name in names
            for view in (self._ctx.admission.view(name),)
        ]
        return json_response(
            {"ok": True, "dry_run": order.dry_run, "models": shown, "warning": warning or None}
        )

    async def reload(self, request: web.Request) -> web.Response:
        """Serve `POST /api/reload`."""
        order = await read(request, ReloadOrder, self._server)
        return json_response(
            await self._control.reload(audit_of(request, self._server), dry_run=order.dry_run)
        )

    def _model(self, request: web.Request) -> str:
        return model_of(request.match_info["id"], self._ctx.catalog)

    def _failed(self, request: web.Request, job: Mapping[str, Any]) -> web.Response:
        """Return the error of a job that came to nothing, with the job."""
        code = ErrorCode(job["code"]) if job["code"] else ErrorCode.MODEL_UNLOADED
        text = job["error"] or f"the {job['kind']} was {job['state']}"
        error = ProxyError(code, text)
        call = request[CALL]
        call.outcome, call.code = outcome_of(code), code.value
        body: Mapping[str, Any] = error_body(error, call.dialect, call.id.shown)
        return json_response({**body, "job": job}, error.status)
