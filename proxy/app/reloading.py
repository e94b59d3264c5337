"""Reads the configuration again and applies what can be applied while the proxy runs."""

import asyncio
from collections.abc import Callable, Container, Mapping
from typing import Any

from proxy import logs
from proxy.admission import Admission
from proxy.app.compare import Difference, applied, compare
from proxy.backends import Fleet, check_models
from proxy.catalog import Catalog
from proxy.errors import ErrorCode, ProxyError
from proxy.settings import ConfigError, Model, Settings
from proxy.types import Audit

Reread = Callable[[], Settings]
"""Reads the configuration the proxy was started with, as it is now (blocks). Raises `ConfigError`."""
_log = logs.get("app")


class Reloader:
    """Owner of the settings that hold now. One reload at a time."""

    def __init__(
        self,
        settings: Settings,
        reread: Reread | None,
        *,
        fleet: Fleet,
        catalog: Catalog,
        admission: Admission,
    ) -> None:
        """Without `reread` there is nothing to read again."""
        self._settings = settings
        self._reread = reread
        self._fleet = fleet
        self._catalog = catalog
        self._admission = admission
        self._reading = False

    async def reload(self, audit: Audit, *, dry_run: bool) -> Mapping[str, Any]:
        """Return what changes, as JSON values, applied unless `dry_run`; `jobs` drain what has to.

        Raises `ProxyError`: the file's own mistake, naming the field, and nothing has changed.
        """
        if self._reread is None:
            text = "this proxy was started without a configuration file: there is nothing to read again"
            raise ProxyError(ErrorCode.INVALID_REQUEST, text)
        if self._reading or (self._fleet.refits.busy and not dry_run):
            text = (
                "an earlier reload is not over: GET /api/jobs shows what still drains; try again after that"
            )
            raise ProxyError(ErrorCode.INVALID_REQUEST, text)
        self._reading = True
        try:
            new = await asyncio.to_thread(self._reread)
            self._check(new)
        except ConfigError as error:
            raise ProxyError(ErrorCode.INVALID_REQUEST, str(error)) from None
        finally:
            self._reading = False
        found = compare(self._settings, new)
        jobs = [] if dry_run else self._apply(found, new, audit)
        return {
            "ok": True,
            "dry_run": dry_run,
            "added": list(found.added),
            "removed": list(found.removed),
            "changed": [
                {"model": one.model, "fields": list(one.fields), "restart": one.restart}
                for one in found.changed
            ],
            "admission": list(found.admission),
            "restart_needed": list(found.at_start),
            "jobs": jobs,
        }

    def _check(self, new: Settings) -> None:
        """Refuse models that cannot be run as the proxy is. Raises `ConfigError`."""
        check_models(new.models, self._settings.engine)
        for name, model in new.models.items():
            if model.host is not None and model.host not in self._settings.hosts:
                raise ConfigError(f"models.{name}.host: {model.host!r} is new: restart the proxy for it")

    def _apply(self, found: Difference, new: Settings, audit: Audit) -> list[str]:
        before = self._settings
        self._settings = now = applied(before, new)
        taken = {alias for model in now.models.values() for alias in model.aliases}.union(now.models)
        leaving = {name: _without(before.models[name], taken) for name in found.removed}
        # what leaves is known by its name until its last request has ended
        self._catalog.replace({**now.models, **leaving}, leaving)
        self._admission.configure(now.model_copy(update={"models": {**now.models, **leaving}}))
        jobs = []
        for name in found.added:
            self._fleet.refits.add(name, now.models[name])
        for one in found.changed:
            job = self._fleet.refits.change(
                one.model, now.models[one.model], restart=one.restart, audit=audit
            )
            jobs += [job.id] if job is not None else []
        for name in found.removed:
            jobs.append(self._fleet.refits.retire(name, self._gone, audit).id)
        _log.info(
            "configuration reloaded",
            added=found.added,
            removed=found.removed,
            changed=[one.model for one in found.changed],
            restart_needed=found.at_start,
            key=audit.key,
            address=audit.address,
        )
        return jobs

    def _gone(self, model: str) -> None:
        self._catalog.drop(model)
        self._admission.drop_model(model)
        self._admission.configure(self._settings)


def _without(model: Model, taken: Container[str]) -> Model:
    """Return a model that leaves, without the aliases that others have now."""
    return model.model_copy(update={"aliases": tuple(name for name in model.aliases if name not in taken)})
