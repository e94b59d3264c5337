"""llama.cpp's router paths, for its own clients: `/models`, `/models/load`, `/models/unload`.

Shapes as in the pinned server's README. Loading what is loaded and unloading what is not is a success here.
"""

from typing import Any

from aiohttp import web

from proxy.http.auth import may_use
from proxy.http.call import CALL
from proxy.http.naming import model_of
from proxy.http.orders import RouterOrder, audit_of, read
from proxy.http.ports import Control, HttpContext
from proxy.http.render import json_response
from proxy.types import ModelState


class Router:
    """The handlers. Bound to one application's context."""

    def __init__(self, ctx: HttpContext, control: Control) -> None:
        self._ctx, self._control = ctx, control

    async def list(self, request: web.Request) -> web.Response:
        """Serve `GET /models`: those that the caller may use, each with its status."""
        caller = request[CALL].caller
        request[CALL].endpoint = "/models"
        catalog = self._ctx.catalog
        return json_response(
            {
                "object": "list",
                "data": [
                    {"id": model, "object": "model", "status": self._status(model)}
                    for model in catalog.ids()
                    if caller is not None and may_use(caller, model, catalog.model(model))
                ],
            }
        )

    async def load(self, request: web.Request) -> web.Response:
        """Serve `POST /models/load`; the load goes on after the answer."""
        server = self._ctx.settings.server
        order = await read(request, RouterOrder, server)
        self._control.load(model_of(order.model, self._ctx.catalog), audit_of(request, server))
        return json_response({"success": True})

    async def unload(self, request: web.Request) -> web.Response:
        """Serve `POST /models/unload`: drains as the model is configured, after the answer."""
        server = self._ctx.settings.server
        order = await read(request, RouterOrder, server)
        self._control.unload(
            model_of(order.model, self._ctx.catalog),
            deadline_s=None,
            block=False,
            reason="",
            mode=None,
            audit=audit_of(request, server),
        )
        return json_response({"success": True})

    def _status(self, model: str) -> dict[str, Any]:
        match self._ctx.models.state(model):
            case ModelState.READY | ModelState.STOPPING:
                return {"value": "loaded"}
            case ModelState.STARTING | ModelState.LOADING:
                return {"value": "loading"}
            case ModelState.FAILED:
                return {"value": "unloaded", "failed": True}
            case ModelState.UNLOADED:
                return {"value": "unloaded"}
