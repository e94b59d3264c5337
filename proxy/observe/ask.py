"""The questions the observer asks a server, and what its refusals mean.

`/slots` with `phase_since` is cheap and answered during a long decode call; a stock engine ignores the parameter. `/metrics` is
only read for two counters (reading it starts the averages of its `…_seconds` gauges anew, which a second reader of those would notice).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from proxy.backends.client import Answer, EngineClient, ProbeError
from proxy.backends.probes import parse_props
from proxy.backends.slots import ParseError, SlotsReport, parse
from proxy.clock import Clock
from proxy.observe.records import Counters, ServerState
from proxy.observe.target import Target
from proxy.types import EngineInfo

_PROMPT: Final = "llamacpp:prompt_tokens_total"
_GENERATED: Final = "llamacpp:tokens_predicted_total"
_STATES: Final = {
    401: ServerState.DENIED,
    403: ServerState.DENIED,
    502: ServerState.GONE,
    503: ServerState.NOT_LOADED,
    504: ServerState.SILENT,
}


class UnansweredError(Exception):
    """There is nothing to sample now; `state` and the message say why."""

    def __init__(self, state: ServerState, why: str) -> None:
        super().__init__(why)
        self.state = state
        self.why = why


class Asker:
    """Asks one server. Every question ends within `timeout_s`."""

    def __init__(self, target: Target, client: EngineClient, clock: Clock, timeout_s: float) -> None:
        self._target = target
        self._client = client
        self._clock = clock
        self._timeout_s = timeout_s

    async def props(self) -> EngineInfo | None:
        """Return what the server says of itself, None when that cannot be read. Raises `UnansweredError`."""
        answer = await self._get(self._target.path("/props"))
        if answer.status == 404:
            return None
        data = _object(_ok(answer))
        if data is None:
            return None
        if data.get("is_sleeping") is True:
            raise UnansweredError(ServerState.SLEEPING, "it sleeps; reading its slots would wake it")
        try:
            return parse_props(data)
        except ProbeError:
            return None

    async def slots(self, since: int) -> tuple[float, float, SlotsReport]:
        """Return when the slots were asked for and read, and what they say. Raises `UnansweredError`."""
        asked = self._clock()
        answer = await self._get(self._target.path("/slots", phase_since=since))
        answered = self._clock()
        try:
            return asked, answered, parse(_ok(answer))
        except ParseError as error:
            raise UnansweredError(ServerState.UNUSABLE, str(error)) from None

    async def counters(self) -> Counters | None:
        """Return the token counters, None when the server does not offer them. Raises `UnansweredError`."""
        asked = self._clock()
        answer = await self._get("/metrics")
        answered = self._clock()
        if answer.status != 200:
            return None
        found = read_counters(answer.body)
        return None if found is None else Counters(asked, answered, *found)

    async def _get(self, target: str) -> Answer:
        try:
            return await self._client.get(target, self._timeout_s)
        except ProbeError as error:
            state = ServerState.SILENT if error.timed_out else ServerState.GONE
            why = "nobody listens there" if error.refused else str(error)
            raise UnansweredError(state, why) from None


def read_counters(body: bytes) -> tuple[int, int] | None:
    """Return prompt and generated tokens of an engine's metrics, None when they are not there. Pure."""
    found: dict[str, int] = {}
    for line in body.decode("utf-8", "replace").splitlines():
        name, _, value = line.partition(" ")
        if name in (_PROMPT, _GENERATED):
            try:
                found[name] = int(float(value))
            except (ValueError, OverflowError):
                return None
    return (found[_PROMPT], found[_GENERATED]) if len(found) == 2 else None


def _ok(answer: Answer) -> bytes:
    if answer.status == 200:
        return answer.body
    state = _STATES.get(answer.status, ServerState.UNUSABLE)
    hint = "; give --api-key" if state is ServerState.DENIED else ""
    raise UnansweredError(state, f"{answer.status}: {_message(answer.body)}{hint}")


def _message(body: bytes) -> str:
    data = _object(body)
    error = data.get("error") if data is not None else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])[:200]
    return body[:120].decode("utf-8", "replace").strip()


def _object(body: bytes) -> Mapping[str, Any] | None:
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
