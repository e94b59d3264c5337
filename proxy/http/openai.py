"""What a client can read without an engine: the list of models, in OpenAI's shape."""

import time
from typing import Any

from aiohttp import web

from proxy.http.auth import may_use
from proxy.http.call import CALL
from proxy.http.naming import no_such_model
from proxy.http.ports import HttpContext
from proxy.http.render import json_response


class ModelList:
    """`/v1/models` and `/v1/models/{id}`, limited to what the caller's key may use."""

    def __init__(self, ctx: HttpContext) -> None:
        self._ctx = ctx
        self._created = int(time.time())

    async def list(self, request: web.Request) -> web.Response:
        """Return all models."""
        call = request[CALL]
        call.endpoint = "/v1/models"
        ids = [model for model in self._ctx.catalog.ids() if self._visible(request, model)]
        return json_response({"object": "list", "data": [self._entry(model) for model in ids]})

    async def one(self, request: web.Request) -> web.Response:
        """Return one model by id or alias."""
        call = request[CALL]
        call.endpoint = "/v1/models/{id}"
        name = request.match_info["id"]
        model = self._ctx.catalog.resolve(name)
        if model is None or not self._visible(request, model):
            raise no_such_model(name)
        return json_response(self._entry(model))

    def _visible(self, request: web.Request, model: str) -> bool:
        caller = request[CALL].caller
        return caller is not None and may_use(caller, model, self._ctx.catalog.model(model))

    def _entry(self, model: str) -> dict[str, Any]:
        settings = self._ctx.catalog.model(model)
        state = self._ctx.models.state(model)
        return {
            "id": model,
            "object": "model",
            "created": self._created,
            "owned_by": "llama-proxy",
            "aliases": list(settings.aliases),
            "description": settings.description,
            "meta": {"state": state.value, **self._ctx.models.meta(model)},
        }
