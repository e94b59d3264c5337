"""Liveness, readiness, metrics, and what an operator reads of models."""

import asyncio
from typing import Final

from aiohttp import web

from proxy.errors import ErrorCode, ProxyError
from proxy.http.naming import model_of
from proxy.http.ports import HttpContext
from proxy.http.render import json_response
from proxy.types import ModelState

_RETRY_S: Final = 2.0
_EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"


class Health:
    """Handlers bound to one application's context. None of them costs capacity or loads a model."""

    def __init__(self, ctx: HttpContext) -> None:
        self._ctx = ctx

    async def healthz(self, _request: web.Request) -> web.Response:
        """Say that the process serves requests."""
        return json_response({"status": "ok"})

    async def readyz(self, _request: web.Request) -> web.Response:
        """Say whether requests can be taken, and why not."""
        ready, facts = self._ctx.models.readiness()
        return json_response({"status": "ready" if ready else "not ready", **facts}, 200 if ready else 503)

    async def health(self, request: web.Request) -> web.Response:
        """Answer as llama-server does: `ok`, or 503 for a named model that is not ready."""
        name = request.query.get("model")
        if not name:
            return json_response({"status": "ok"})
        model = model_of(name, self._ctx.catalog)
        state = self._ctx.models.state(model)
        if state is ModelState.READY:
            return json_response({"status": "ok", "model": model})
        code = (
            ErrorCode.MODEL_LOADING
            if state in {ModelState.STARTING, ModelState.LOADING}
            else ErrorCode.NO_BACKEND
        )
        raise ProxyError(code, f"the model {model!r} is {state.value}", retry_after_s=_RETRY_S)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Render all metrics, off the event loop."""
        self._ctx.metrics.refresh()
        text = await asyncio.to_thread(self._ctx.metrics.text)
        return web.Response(body=text, headers={"Content-Type": _EXPOSITION})

    async def models(self, _request: web.Request) -> web.Response:
        """List everything an operator sees of all models."""
        models = [dict(self._ctx.models.describe(model)) for model in self._ctx.catalog.ids()]
        problem = self._ctx.control.state_problem if self._ctx.control is not None else ""
        return json_response({"models": models, "warnings": [problem] if problem else []})

    async def model(self, request: web.Request) -> web.Response:
        """Show one model, by id or alias."""
        model = model_of(request.match_info["id"], self._ctx.catalog)
        return json_response(self._ctx.models.describe(model))

    async def favicon(self, _request: web.Request) -> web.Response:
        """Spare browsers a 404."""
        return web.Response(status=204)
