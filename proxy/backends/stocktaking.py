"""What earlier proxies left running, at the start of a new one: taken over, ended, or left alone."""

import asyncio
from collections.abc import Mapping

from proxy.backends.runner import ModelRunner
from proxy.backends.runrecord import Fate
from proxy.backends.runs import RunStore
from proxy.catalog import Catalog


async def take_stock(runs: RunStore, runners: Mapping[str, ModelRunner], catalog: Catalog) -> None:
    """Bring what earlier proxies recorded in line with what runs; leaves strangers alone."""

    def recipe(model: str) -> str | None:
        return runners[model].fingerprint if model in runners else None

    def wanted(model: str) -> bool:
        return model in runners and catalog.model(model).on_proxy_exit == "keep"

    taken: set[str] = set()
    reaping = []
    for record, verdict in await runs.survey(recipe, wanted):
        if verdict.fate is Fate.ADOPT and record.model not in taken:
            taken.add(record.model)
            runners[record.model].adopt(record)
        else:
            reaping.append(runs.reap(record, verdict.reap))
    await asyncio.gather(*reaping)
