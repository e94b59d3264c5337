"""What operators set going and hold: jobs and keep-awake leases."""

from aiohttp import web

from proxy.errors import ErrorCode, ProxyError
from proxy.http.naming import model_of
from proxy.http.orders import LeaseOrder, audit_of, read, seconds_of
from proxy.http.ports import Control, HttpContext
from proxy.http.render import json_response


class Desk:
    """Handlers of `/api/jobs` and `/api/leases`. Bound to one application's context."""

    def __init__(self, ctx: HttpContext, control: Control) -> None:
        self._ctx, self._control = ctx, control

    async def jobs(self, request: web.Request) -> web.Response:
        """Serve `GET /api/jobs[?model=]`, the newest first."""
        name = request.query.get("model")
        model = model_of(name, self._ctx.catalog) if name else None
        return json_response({"jobs": list(self._control.jobs(model))})

    async def job(self, request: web.Request) -> web.Response:
        """Serve `GET /api/jobs/{id}[?wait=s]`: at once, or when it has ended."""
        name = request.match_info["id"]
        job = await self._control.wait(name, seconds_of(request, "wait"))
        if job is None:
            text = f"there is no job {name[:200]!r} (any more): GET /api/jobs lists them"
            raise ProxyError(ErrorCode.NOT_FOUND, text, param="id")
        return json_response(job)

    async def leases(self, _request: web.Request) -> web.Response:
        """Serve `GET /api/leases`, the first to expire first."""
        return json_response({"leases": list(self._control.leases())})

    async def lease(self, request: web.Request) -> web.Response:
        """Serve `POST /api/leases`: 201 and the lease."""
        server = self._ctx.settings.server
        order = await read(request, LeaseOrder, server)
        lease, warning = await self._control.lease(order.ttl_s, order.reason, audit_of(request, server))
        return json_response({"ok": True, **lease, "warning": warning or None}, 201)

    async def release(self, request: web.Request) -> web.Response:
        """Serve `DELETE /api/leases/{id}`."""
        name = request.match_info["id"]
        released = await self._control.release(name)
        if released is None:
            text = f"there is no lease {name[:200]!r} (any more): GET /api/leases lists them"
            raise ProxyError(ErrorCode.NOT_FOUND, text, param="id")
        lease, warning = released
        return json_response({"ok": True, **lease, "status": "released", "warning": warning or None})
