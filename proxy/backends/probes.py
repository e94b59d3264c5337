"""Typed probes of an engine: `/health`, `/props`, `/slots`. Each has a hard timeout."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import orjson

from proxy.backends.client import Answer, EngineClient, ProbeError
from proxy.backends.slots import ParseError, SlotsReport, parse
from proxy.types import EngineInfo, PhasePolicy

TIMEOUT_S: Final = 2.0


class Health(StrEnum):
    """What `/health` says."""

    OK = "ok"
    LOADING = "loading"
    DOWN = "down"


async def health(client: EngineClient, timeout_s: float = TIMEOUT_S) -> Health:
    """Ask whether the engine serves; a refused connection or silence is `DOWN`, never an error."""
    try:
        answer = await client.get("/health", timeout_s)
    except ProbeError:
        return Health.DOWN
    if answer.status == 200:
        return Health.OK
    return Health.LOADING if answer.status == 503 else Health.DOWN


async def props(client: EngineClient, timeout_s: float = TIMEOUT_S) -> EngineInfo:
    """Ask the engine what it is. Raises `ProbeError` with what was missing."""
    return parse_props(_json(await client.get("/props", timeout_s), "/props"))


async def slots(client: EngineClient, since: int | None, timeout_s: float = TIMEOUT_S) -> SlotsReport:
    """Read the slots; `since` asks a phase-aware engine for its light view and the events after it.

    Raises `ProbeError` (also for an answer that cannot be parsed: then it was `answered`).
    """
    target = "/slots" if since is None else f"/slots?phase_since={since}"
    answer = await client.get(target, timeout_s)
    if answer.status != 200:
        raise ProbeError(f"/slots answered {answer.status}: {_excerpt(answer.body)}", answered=True)
    try:
        return parse(answer.body)
    except ParseError as error:
        raise ProbeError(str(error), answered=True) from None


async def serves(client: EngineClient) -> bool:
    """Ask for what a load asks for: health and properties. Who shows no slots may serve all the same."""
    if await health(client) is not Health.OK:
        return False
    try:
        await props(client)
    except ProbeError:
        return False
    return True


def parse_props(data: Mapping[str, Any]) -> EngineInfo:
    """Read `/props` of b11434, stock or patched. Raises `ProbeError` naming the field."""
    generation = data.get("default_generation_settings")
    context = generation.get("n_ctx") if isinstance(generation, dict) else None
    total = data.get("total_slots")
    for field, value in (("total_slots", total), ("default_generation_settings.n_ctx", context)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ProbeError(f"/props: {field}: expected a number, found {str(value)[:40]}")
    phase, build, modalities = data.get("phase"), data.get("build"), data.get("modalities")
    policy = PhasePolicy.UNKNOWN
    if isinstance(phase, dict) and phase.get("policy") in {p.value for p in PhasePolicy}:
        policy = PhasePolicy(phase["policy"])
    series = build.get("series", "") if isinstance(build, dict) else ""
    admit_ms = phase.get("admit_ms") if isinstance(phase, dict) else None
    return EngineInfo(
        slots=max(1, total or 0),
        context_tokens=context or 0,
        policy=policy,
        build=str(data.get("build_info", "")),
        series=str(series),
        model_path=str(data.get("model_path", "")),
        modalities={str(k): bool(v) for k, v in modalities.items()} if isinstance(modalities, dict) else None,
        admit_ms=admit_ms if isinstance(admit_ms, int) and admit_ms > 0 else 0,
    )


def _json(answer: Answer, path: str) -> Mapping[str, Any]:
    if answer.status != 200:
        hint = " (the engine does not take the proxy's key)" if answer.status == 401 else ""
        raise ProbeError(f"{path} answered {answer.status}{hint}: {_excerpt(answer.body)}")
    try:
        data = orjson.loads(answer.body)
    except orjson.JSONDecodeError as error:
        raise ProbeError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ProbeError(f"{path}: expected an object, found {type(data).__name__}")
    return data


def _excerpt(body: bytes) -> str:
    return body[:200].decode("utf-8", "replace").strip()
