"""The handlers that reach an engine: inference paths, `/props`, `/slots`, `/upstream/…`."""

from typing import Final

from aiohttp import hdrs, web

from proxy.admission import Work
from proxy.errors import ErrorCode, ProxyError
from proxy.http import body
from proxy.http.auth import may_use
from proxy.http.budgets import Sweeper
from proxy.http.call import CALL, Call, Caller
from proxy.http.endpoints import INFERENCE, Endpoint
from proxy.http.facts import Body, Facts
from proxy.http.forward import Flight, Plan, Room
from proxy.http.limits import TokenLimits, lower
from proxy.http.naming import no_such_model
from proxy.http.passage import operator_may, split
from proxy.http.ports import HttpContext
from proxy.http.requests import Board
from proxy.http.uploads import Upload, Uploads
from proxy.settings import Budgets
from proxy.types import ModelState

READ_LIMITS: Final = Budgets(first_token_timeout_s=None, inter_token_timeout_s=None, total_timeout_s=30.0)
"""Reads of an engine's state answer in milliseconds; whoever waits longer should be told."""
ORDER_LIMITS: Final = READ_LIMITS.model_copy(update={"total_timeout_s": 300.0})
"""An operator's order to an engine may take a disk its time: a slot of a long prompt is gigabytes."""
_NAMES_SHOWN: Final = 10


class Inference:
    """Handlers bound to one application's context."""

    def __init__(self, ctx: HttpContext, sweeper: Sweeper, board: Board) -> None:
        self._ctx = ctx
        self._room = Room(sweeper, board)
        self._uploads = Uploads(ctx.settings.admission.max_queued_bytes, self._waiting_bytes, ctx.clock)
        self._server = ctx.settings.server

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """Serve a path of the inference table."""
        return await self._infer(request, INFERENCE[request.path], request.raw_path, None)

    async def read(self, request: web.Request) -> web.StreamResponse:
        """Serve `GET /props` and `GET /slots`: of a ready model only, never loading one."""
        call = request[CALL]
        call.endpoint = request.path
        return await self._engine(request, call, request.query.get("model"), request.raw_path, b"")

    async def passage(self, request: web.Request) -> web.StreamResponse:
        """Serve `/upstream/{model}/{path}`. What is no inference was checked to come from an operator."""
        passed = split(request.raw_path)
        if passed is not None:
            endpoint = INFERENCE.get(passed.path)
            if endpoint is not None and request.method == "POST":
                return await self._infer(request, endpoint, passed.target, passed.model)
            if operator_may(request.method, passed.path):
                call = request[CALL]
                call.endpoint = "/upstream"
                with self._uploads.begin() as upload:
                    data = await body.read(request, self._server, upload)
                    return await self._engine(request, call, passed.model, passed.target, data)
        raise ProxyError(
            ErrorCode.NOT_FOUND,
            f"{request.method} {request.path[:200]} leads to nothing an engine offers here",
        )

    async def _infer(
        self, request: web.Request, endpoint: Endpoint, target: str, model: str | None
    ) -> web.StreamResponse:
        with self._uploads.begin() as upload:
            return await self._received(request, endpoint, target, model, upload)

    async def _received(
        self, request: web.Request, endpoint: Endpoint, target: str, model: str | None, upload: Upload
    ) -> web.StreamResponse:
        clock, call = self._ctx.clock, request[CALL]
        call.endpoint = endpoint.name
        facts = await body.read_facts(request, endpoint, self._server, upload)
        call.body_done = clock()
        caller = self._choose(call, model or facts.model or request.query.get("model"))
        facts = await self._limit(request, endpoint, facts, caller)
        call.stream, call.tasks, call.body_bytes = facts.stream, facts.work.tasks, facts.body.size
        self._ctx.metrics.overhead.labels("parse").observe(clock() - call.body_done)
        plan = Plan(caller, endpoint, facts, target, upload=upload)
        return await Flight(self._ctx, self._room, request, call, plan).run()

    async def _engine(
        self, request: web.Request, call: Call, model: str | None, target: str, data: bytes
    ) -> web.StreamResponse:
        call.body_done = self._ctx.clock()
        caller = self._choose(call, model)
        if request.method == hdrs.METH_HEAD:
            # costs no capacity: answered from what is known
            if self._ctx.models.state(call.model) is not ModelState.READY:
                raise ProxyError(ErrorCode.NO_BACKEND, f"the model {call.model!r} is not loaded")
            return web.Response(content_type="application/json")
        facts = Facts(model, stream=False, work=Work(0), body=Body(data))
        limits = READ_LIMITS if request.method == hdrs.METH_GET else ORDER_LIMITS
        plan = Plan(caller, Endpoint(call.endpoint), facts, target, limits, may_load=False)
        return await Flight(self._ctx, self._room, request, call, plan).run()

    async def _limit(self, request: web.Request, endpoint: Endpoint, facts: Facts, caller: Caller) -> Facts:
        """Apply the model's and the key's limits on answers; a request within them keeps its bytes."""
        model = self._ctx.catalog.model(request[CALL].model)
        limits = TokenLimits(
            caller.max_tokens_default or model.max_tokens_default,
            lower(caller.max_tokens_cap, model.max_tokens_cap),
        )
        tokens = limits.settle(facts.max_tokens, endpoint.shape)
        if tokens is None or tokens == facts.max_tokens:
            return facts
        return await body.limit_facts(facts, endpoint, tokens, request.headers.get("Content-Type"))

    def _waiting_bytes(self) -> int:
        admission = self._ctx.admission
        return sum(admission.view(model).queued_bytes for model in self._ctx.catalog.ids())

    def _choose(self, call: Call, name: str | None) -> Caller:
        """Put the model's id into the record and return the caller that may use it."""
        catalog, caller = self._ctx.catalog, call.caller
        if caller is None:
            raise RuntimeError("a handler ran before its caller was checked")
        model = catalog.resolve(name) if name else catalog.only()
        if model is None and not name:
            mine = [one for one in catalog.ids() if may_use(caller, one, catalog.model(one))]
            known = ", ".join(mine[:_NAMES_SHOWN]) or "none is there for you"
            raise ProxyError(
                ErrorCode.INVALID_REQUEST, f"'model' is missing (models: {known})", param="model"
            )
        if model is None:
            raise no_such_model(name or "")
        if not may_use(caller, model, catalog.model(model)):
            raise ProxyError(
                ErrorCode.PERMISSION_DENIED,
                f"this key may not use the model {name or model!r}",
                param="model",
            )
        call.model = model
        return caller
