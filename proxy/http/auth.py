"""Who may ask for what: API keys, admin keys, and the Host and Origin rules of a keyless port.

Without keys the port is open to this machine, and then a browser on it is the danger: a web page may
post here (Origin rule) or point its own name at us (DNS rebinding: Host rule).
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from proxy.errors import ErrorCode, ProxyError
from proxy.http.call import Caller
from proxy.http.endpoints import INFERENCE
from proxy.http.passage import PREFIX, split
from proxy.metrics import LABELLED_KEYS, OTHER
from proxy.settings import AdminKey, ApiKey, Model, Settings

_Key = TypeVar("_Key", ApiKey, AdminKey)


class Area(StrEnum):
    """What a path belongs to; decides which key it needs."""

    PUBLIC = "public"
    INFERENCE = "inference"
    OPERATOR = "operator"
    METRICS = "metrics"


_PUBLIC: Final = frozenset({"/healthz", "/readyz", "/favicon.ico", "/health", "/v1/health"})
_TELLS_NOTHING: Final = frozenset({"/healthz", "/favicon.ico"})
_OPERATOR: Final = ("/api/", "/models/", "/ui/")
_PAGES: Final = frozenset({"http", "https", "null"})
"""How the `Origin` of a web page begins."""


def area_of(path: str, raw_path: str) -> Area:
    """Return the area of a path (decoded, and as received). What is unknown is guarded like inference."""
    if path.startswith(PREFIX):
        passed = split(raw_path)
        return Area.INFERENCE if passed is not None and passed.path in INFERENCE else Area.OPERATOR
    if path in _PUBLIC:
        return Area.PUBLIC
    if path == "/metrics":
        return Area.METRICS
    if path.startswith(_OPERATOR):
        return Area.OPERATOR
    return Area.INFERENCE


class Gatekeeper:
    """Checks callers against the configured keys. One per application."""

    def __init__(self, settings: Settings) -> None:
        server = settings.server
        self._server = server
        self._ranks = settings.admission.classes
        self._api = [(_digest(key.key.get_secret_value()), key) for key in server.api_keys]
        self._admin = [(_digest(key.key.get_secret_value()), key) for key in server.admin_keys]
        self._metrics = _digest(server.metrics_key.get_secret_value()) if server.metrics_key else None
        self._labels = {key.name for key in server.api_keys[:LABELLED_KEYS]}
        self._default_class = "normal" if "normal" in self._ranks else _middle(self._ranks)
        self._hosts = {host.lower() for host in server.allowed_hosts} | {_bare(server.host)}

    def check(self, request: web.Request, area: Area) -> Caller:
        """Return the caller, or raise `ProxyError` (401, 403)."""
        match area:
            case Area.PUBLIC:
                if request.path not in _TELLS_NOTHING:
                    self._check_rebound(request)
                return self._anonymous(request)
            case Area.METRICS:
                if self._metrics is not None and not hmac.compare_digest(
                    _digest(_presented(request) or ""), self._metrics
                ):
                    raise _unauthorised("a metrics key is needed (server.metrics_key)")
                if self._metrics is None:
                    self._check_rebound(request)
                return self._anonymous(request)
            case Area.OPERATOR:
                self._check_origin(request)
                return self.require_admin(request)
            case Area.INFERENCE:
                if not self._api:
                    self._check_host(request)
                    self._check_page(request)
                    return self._anonymous(request)
                return self._lowered(request, self._caller(self._match_api(request)))

    def require_admin(self, request: web.Request) -> Caller:
        """Return the operator, or raise `ProxyError`. Without admin keys the Host rule guards."""
        if not self._admin:
            self._check_host(request)
            return self._anonymous(request)
        given = _presented(request)
        if given is None:
            raise _unauthorised("an admin key is needed: Authorization: Bearer <key>")
        found = _find(self._admin, given)
        if found is None:
            if _find(self._api, given) is not None:
                raise ProxyError(
                    ErrorCode.PERMISSION_DENIED, "this key is an API key; an admin key is needed here"
                )
            raise _unauthorised("this is not one of server.admin_keys")
        return Caller(found.name, OTHER, self._default_class, self._ranks.get(self._default_class, 0))

    def _match_api(self, request: web.Request) -> ApiKey:
        given = _presented(request)
        if given is None:
            raise _unauthorised("an API key is needed: Authorization: Bearer <key> or x-api-key: <key>")
        found = _find(self._api, given)
        if found is None:
            raise _unauthorised("this API key is not known")
        return found

    def _caller(self, key: ApiKey) -> Caller:
        return Caller(
            key=key.name,
            label=key.name if key.name in self._labels else OTHER,
            priority=key.priority,
            rank=self._ranks[key.priority],
            max_queue=key.max_queue,
            models=key.models,
            weight=key.weight,
            max_tokens_default=key.max_tokens_default,
            max_tokens_cap=key.max_tokens_cap,
        )

    def _anonymous(self, request: web.Request) -> Caller:
        caller = Caller(
            request.remote or "local", OTHER, self._default_class, self._ranks.get(self._default_class, 0)
        )
        return self._lowered(request, caller)

    def _lowered(self, request: web.Request, caller: Caller) -> Caller:
        """Apply `x-priority`: a header may lower a caller's class, never raise it."""
        wanted = request.headers.get("x-priority")
        if wanted is None or wanted == caller.priority:
            return caller
        rank = self._ranks.get(wanted)
        if rank is None:
            raise ProxyError(
                ErrorCode.INVALID_REQUEST,
                f"x-priority must be one of {', '.join(sorted(self._ranks))}, not {wanted!r}",
                param="x-priority",
            )
        if rank >= caller.rank:
            return caller
        return replace(caller, priority=wanted, rank=rank)

    def _check_host(self, request: web.Request) -> None:
        host = request.headers.get("Host")
        if host is None:
            return
        name = _bare(host)
        if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            pass
        else:
            # an address cannot be rebound; on a loopback port only loopback ones make sense
            if address.is_loopback or not self._server.loopback:
                return
        raise ProxyError(
            ErrorCode.PERMISSION_DENIED,
            f"the Host {name!r} is not served without keys: add it to server.allowed_hosts",
        )

    def _check_rebound(self, request: web.Request) -> None:
        """Keep what tells of models from web pages that call a loopback port by a name of theirs."""
        if not self._api and self._server.loopback:
            self._check_host(request)

    def _check_page(self, request: web.Request) -> None:
        """Refuse work for a web page that nobody invited: some posts a browser sends without asking first.

        What it reads, its browser keeps from it.
        """
        if request.headers.get("Sec-Fetch-Site") == "same-origin":
            # its browser says so, whatever a server in front made of the Host
            return
        reads = request.method in {"GET", "HEAD"}
        if reads or self._server.insecure_no_keys or "*" in self._server.cors_origins:
            return
        scheme = request.headers.get("Origin", "http").partition(":")[0].lower()
        # an application's own scheme is no page's
        if scheme in _PAGES and self._foreign(request):
            raise self._uninvited(request, "use this proxy without keys")

    def _check_origin(self, request: web.Request) -> None:
        if self._foreign(request):
            raise self._uninvited(request, "operate this proxy")
        kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if request.method in {"POST", "PUT", "PATCH"} and kind != "application/json":
            raise ProxyError(
                ErrorCode.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Type {kind or '(none)'!r} is not accepted here: send application/json",
            )

    def _foreign(self, request: web.Request) -> bool:
        origin = request.headers.get("Origin")
        if origin is None:
            return request.headers.get("Sec-Fetch-Site") == "cross-site"
        own = request.headers.get("Host", "").lower()
        return _authority(origin) != own and origin not in self._server.cors_origins

    def _uninvited(self, request: web.Request, what: str) -> ProxyError:
        origin = request.headers.get("Origin", "cross-site")
        return ProxyError(
            ErrorCode.PERMISSION_DENIED,
            f"requests from the web origin {origin[:200]!r} may not {what} (server.cors_origins)",
        )


def _authority(origin: str) -> str | None:
    """Return the host and port of a web origin, None for one that is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def may_use(caller: Caller, model_id: str, model: Model) -> bool:
    """Whether a caller's globs allow a model, by its id or one of its aliases."""
    names = (model_id, *model.aliases)
    return any(fnmatchcase(name, pattern) for pattern in caller.models for name in names)


def _presented(request: web.Request) -> str | None:
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer" and value.strip():
        return value.strip()
    return request.headers.get("x-api-key") or None


def _find(keys: list[tuple[bytes, _Key]], given: str) -> _Key | None:
    """Compare with every key, whichever matches, in constant time."""
    digest = _digest(given)
    found = None
    for known, key in keys:
        if hmac.compare_digest(known, digest):
            found = key
    return found


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _bare(host: str) -> str:
    """Return a Host value's name without port and brackets, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def _middle(ranks: Mapping[str, int]) -> str:
    return min(ranks, key=lambda name: abs(ranks[name]), default="normal")


def _unauthorised(message: str) -> ProxyError:
    return ProxyError(
        ErrorCode.INVALID_API_KEY, message, headers={"WWW-Authenticate": 'Bearer realm="llama-proxy"'}
    )
