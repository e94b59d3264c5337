"""The application: every path of the HTTP surface and what stands around them."""

from typing import Final

from aiohttp import hdrs, web

from proxy.errors import SOURCE, ErrorCode, ProxyError
from proxy.headers import request_id
from proxy.http import body
from proxy.http.accounts import Accounts
from proxy.http.auth import Gatekeeper, area_of
from proxy.http.budgets import Sweeper
from proxy.http.desk import Desk
from proxy.http.endpoints import INFERENCE, dialect_of
from proxy.http.enginelog import EngineLog
from proxy.http.events import Events
from proxy.http.health import Health
from proxy.http.inference import Inference
from proxy.http.middleware import Entry
from proxy.http.openai import ModelList
from proxy.http.operate import Operate
from proxy.http.passage import PREFIX
from proxy.http.ports import Control, HttpContext
from proxy.http.render import error_response
from proxy.http.requests import Board, Requests
from proxy.http.router import Router

KEEPER: Final = web.AppKey("keeper", Gatekeeper)
"""The application's checks of callers, for handlers added by others."""


def make_http(ctx: HttpContext) -> web.Application:
    """Return the application; to be run by `proxy.http.server.ProxyRunner`."""
    accounts = Accounts(ctx.metrics)
    # of models that a reload adds, too
    ctx.metrics.on_render(lambda: accounts.declare(ctx.catalog.ids()))
    entry = Entry(ctx, accounts)
    sweeper = Sweeper(ctx.clock)
    limit = ctx.settings.server.max_body_bytes
    app = web.Application(middlewares=[entry.middleware()], client_max_size=limit)
    app[KEEPER] = entry.keeper
    app.on_response_prepare.append(entry.decorate)

    board = Board()
    inference, models, health = Inference(ctx, sweeper, board), ModelList(ctx), Health(ctx)
    requests = Requests(ctx, board)
    events = Events(ctx, requests)
    expect = _Expect(limit, entry.keeper).answer
    route = app.router.add_route
    get = app.router.add_get
    for path in INFERENCE:
        route(hdrs.METH_POST, path, inference.infer, expect_handler=expect)
    for path in ("/props", "/slots"):
        get(path, inference.read)
    for method in (hdrs.METH_GET, hdrs.METH_POST):
        route(method, PREFIX + "{rest:.*}", inference.passage, expect_handler=expect)
    get("/v1/models", models.list)
    get("/v1/models/{id:.+}", models.one)
    for path in ("/health", "/v1/health"):
        get(path, health.health)
    get("/healthz", health.healthz)
    get("/readyz", health.readyz)
    get("/metrics", health.metrics)
    get("/api/models", health.models)
    get("/api/models/{id}", health.model)
    get("/api/requests", requests.list)
    route(hdrs.METH_DELETE, "/api/requests/{id}", requests.cancel)
    get("/api/events", events.stream, allow_head=False)
    get("/favicon.ico", health.favicon)
    if ctx.control is not None:
        _operate(app, ctx, ctx.control)

    async def stop(_app: web.Application) -> None:
        # before connections are closed: watchers are told why their stream ends
        await events.close()

    async def close(_app: web.Application) -> None:
        sweeper.close()
        accounts.flush()

    app.on_shutdown.append(stop)
    app.on_cleanup.append(close)
    return app


def _operate(app: web.Application, ctx: HttpContext, control: Control) -> None:
    """Add the operators' paths."""
    operate, desk, router = Operate(ctx, control), Desk(ctx, control), Router(ctx, control)
    get, post = app.router.add_get, app.router.add_post
    post("/api/models/{id}/load", operate.load)
    post("/api/models/{id}/unload", operate.unload)
    post("/api/models/{id}/reconcile", operate.reconcile)
    post("/api/models/{id}/gate", operate.gate)
    post("/api/gate", operate.gate)
    post("/api/reload", operate.reload)
    get("/api/models/{id}/logs", EngineLog(ctx, control).log, allow_head=False)
    get("/api/jobs", desk.jobs)
    get("/api/jobs/{id}", desk.job)
    get("/api/leases", desk.leases)
    post("/api/leases", desk.lease)
    app.router.add_delete("/api/leases/{id}", desk.release)
    get("/models", router.list)
    post("/models/load", router.load)
    post("/models/unload", router.unload)


class _Expect:
    """The answer to `Expect`: no `100 Continue` for a body that would be refused anyway."""

    def __init__(self, limit: int, keeper: Gatekeeper) -> None:
        self._limit = limit
        self._keeper = keeper

    async def answer(self, request: web.Request) -> web.StreamResponse | None:
        refused = self._refusal(request)
        if refused is not None:
            given = request_id(request.headers.get("x-request-id"))
            response = error_response(refused, dialect_of(request.path, request.raw_path), given.shown)
            response.headers["x-request-id"] = given.shown
            response.headers["Server"] = SOURCE
            response.force_close()
            return response
        if request.version >= (1, 1):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # as aiohttp does: nothing of the response itself has been sent
            request.writer.output_size = 0
        return None

    def _refusal(self, request: web.Request) -> ProxyError | None:
        if request.headers.get(hdrs.EXPECT, "").strip().lower() != "100-continue":
            return ProxyError(ErrorCode.INVALID_REQUEST, "only Expect: 100-continue is understood")
        try:
            self._keeper.check(request, area_of(request.path, request.raw_path))
            body.check_length(request, self._limit)
        except ProxyError as error:
            return error
        return None
