"""Parser of `GET /slots`, in both forms. Pure.

Stock form (llama-server b11434): an array of slots. A never-used slot has only `id`, `n_ctx`,
`speculative`, `is_processing`; an idle one keeps the previous task's fields, so every field but those
four is only read while `is_processing`. `next_token` is an array of one object; `n_prompt_tokens` is
what the slot holds now, prompt and generated.

Phase form: each slot has a `phase` object as well; in it `cohort` is the engine's and `member_cohort` the
slot's own. With `?phase_since=SEQ` a phase-aware engine answers an object: `{"policy", "t_us": its clock now,
"seq": newest, "lost": overrun, "slots": [{"id", "is_processing", "id_task", "n_prompt_tokens", "n_decoded",
"phase", …}, …], "events": [{"seq", "t_us", "event", "slot", "cohort", "request", "tokens"}, …]}`, where -1 stands
for no slot and no task. A stock engine ignores the parameter and answers its array.

Numbers an engine may send as null, absent or beyond 64 bits are refused with the path of the field.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from proxy.types import EnginePhase, MemberState, PhaseEvent, SlotView

MAX_SLOTS: Final = 4096
_MAX_INT: Final = 2**63 - 1
_MEMBERS: Final = {member.value: member for member in MemberState}
_PHASES: Final = ("idle", "prefill", "generate")


class ParseError(Exception):
    """The engine's answer is not what `/slots` is known to be; the message names the field."""


@dataclass(frozen=True, slots=True)
class SlotsReport:
    """What one `/slots` answer says.

    `native` is true when the phase fields are there; `seq` is the newest event's, None where none was said;
    `engine_us` is the engine's monotonic clock at the answer, in microseconds.
    """

    slots: tuple[SlotView, ...]
    native: bool = False
    phase: EnginePhase = EnginePhase.UNKNOWN
    sealed: bool = False
    cohort: int | None = None
    decode_running_ms: float = 0.0
    seq: int | None = None
    lost: int = 0
    events: tuple[PhaseEvent, ...] = ()
    engine_us: int | None = None

    @property
    def busy(self) -> int:
        """Number of slots at work."""
        return sum(1 for slot in self.slots if slot.busy)


def parse(body: bytes) -> SlotsReport:
    """Parse an answer of `/slots` or `/slots?phase_since=`. Raises `ParseError`, nothing else."""
    try:
        data = orjson.loads(body)
    except (orjson.JSONDecodeError, RecursionError) as error:
        raise ParseError(f"/slots is not JSON: {error}") from None
    if isinstance(data, dict):
        return _light(data)
    return _report(_list(data, "/slots"), (), None, 0)


def _light(data: Mapping[str, Any]) -> SlotsReport:
    if "slots" not in data:
        raise ParseError(f"/slots: an object without slots (keys: {', '.join(list(map(str, data))[:8])})")
    events = tuple(
        _event(item, f"events[{i}]") for i, item in enumerate(_list(data.get("events", []), "events"))
    )
    newest = max((event.seq for event in events), default=None)
    seq = _optional(data, "seq", "")
    if seq is None or (newest is not None and newest > seq):
        seq = newest
    report = _report(_list(data["slots"], "slots"), events, seq, _int(data, "lost", "", default=0))
    return replace(report, engine_us=_optional(data, "t_us", ""))


def _report(raw: list[Any], events: tuple[PhaseEvent, ...], seq: int | None, lost: int) -> SlotsReport:
    if len(raw) > MAX_SLOTS:
        raise ParseError(f"/slots: {len(raw)} slots are more than {MAX_SLOTS}")
    phases: list[Mapping[str, Any]] = []
    slots = []
    for index, item in enumerate(raw):
        where = f"slots[{index}]"
        slot = _dict(item, where)
        phase = slot.get("phase")
        if phase is not None:
            phases.append(_dict(phase, f"{where}.phase"))
        slots.append(_slot(slot, None if phase is None else phases[-1], where))
    if len({slot.id for slot in slots}) != len(slots):
        raise ParseError("/slots: two slots have the same id")
    if not phases or len(phases) != len(slots):
        if phases:
            raise ParseError(f"/slots: {len(phases)} of {len(slots)} slots have a phase")
        return SlotsReport(slots=tuple(slots), seq=seq, lost=lost, events=events)
    first, where = phases[0], "slots[0].phase"
    sealed = _bool(first, "sealed", where)
    return SlotsReport(
        slots=tuple(slots),
        native=True,
        phase=_engine_phase(first, sealed, slots, where),
        sealed=sealed,
        cohort=_int(first, "cohort", where, default=0) or None,
        decode_running_ms=_float(first, "decode_running_ms", where),
        seq=seq,
        lost=lost,
        events=events,
    )


def _engine_phase(phase: Mapping[str, Any], sealed: bool, slots: list[SlotView], where: str) -> EnginePhase:
    engine = _str(phase, "engine", where)
    if engine not in _PHASES:
        raise ParseError(f"{where}.engine: {engine[:40]!r} is not one of {', '.join(_PHASES)}")
    if engine == "idle":
        return EnginePhase.IDLE
    if engine == "generate":
        return EnginePhase.GENERATE
    if any(slot.member is MemberState.PAUSED for slot in slots):
        return EnginePhase.YIELD_PREFILL
    return EnginePhase.PREFILL_SEALED if sealed else EnginePhase.PREFILL_OPEN


def _slot(slot: Mapping[str, Any], phase: Mapping[str, Any] | None, where: str) -> SlotView:
    slot_id = _int(slot, "id", where)
    member = MemberState.NONE if phase is None else _member(phase, f"{where}.phase")
    if phase is None or "is_processing" in slot:
        busy = _bool(slot, "is_processing", where)
    else:
        busy = member is not MemberState.NONE
    if not busy:
        return SlotView(id=slot_id, busy=False)
    decoded = _optional(slot, "n_decoded", where)
    if slot.get("next_token") is not None:
        tokens = _list(slot["next_token"], f"{where}.next_token")
        if tokens:
            decoded = _optional(
                _dict(tokens[0], f"{where}.next_token[0]"), "n_decoded", f"{where}.next_token[0]"
            )
    at = f"{where}.phase"
    phase = phase or {}
    return SlotView(
        id=slot_id,
        busy=True,
        task=None if (task := _optional(slot, "id_task", where, low=-1)) == -1 else task,
        tag=_str(phase, "request", at, default=""),
        member=member,
        cohort=_optional(phase, "member_cohort" if "member_cohort" in phase else "cohort", at) or None,
        prompt_tokens=_optional(phase, "n_prompt_total", at),
        processed_tokens=_optional(slot, "n_prompt_tokens_processed", where),
        cached_tokens=_optional(slot, "n_prompt_tokens_cache", where),
        held_tokens=_optional(slot, "n_prompt_tokens", where),
        decoded_tokens=decoded,
        queue_ms=_float(phase, "t_queue_ms", at),
        wait_ms=_float(phase, "t_wait_ms", at),
        paused_ms=_float(phase, "t_paused_ms", at),
    )


def _member(phase: Mapping[str, Any], where: str) -> MemberState:
    value = _str(phase, "member", where)
    if value not in _MEMBERS:
        raise ParseError(f"{where}.member: {value[:40]!r} is not one of {', '.join(_MEMBERS)}")
    return _MEMBERS[value]


def _event(item: Any, where: str) -> PhaseEvent:
    event = _dict(item, where)
    return PhaseEvent(
        seq=_int(event, "seq", where),
        t_us=_int(event, "t_us", where),
        event=_str(event, "event", where),
        slot=None if (slot := _optional(event, "slot", where, low=-1)) == -1 else slot,
        cohort=_int(event, "cohort", where, default=0),
        request=_str(event, "request", where, default=""),
        tokens=_int(event, "tokens", where, default=0),
    )


def _at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ParseError(f"{where}: expected an array, found {type(value).__name__}")
    return value


def _dict(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ParseError(f"{where}: expected an object, found {type(value).__name__}")
    return value


def _optional(data: Mapping[str, Any], key: str, where: str, *, low: int = 0) -> int | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MAX_INT:
        raise ParseError(f"{_at(where, key)}: expected an integer of at least {low}, found {str(value)[:40]}")
    return value


def _int(data: Mapping[str, Any], key: str, where: str, *, default: int | None = None) -> int:
    value = _optional(data, key, where)
    if value is None:
        value = default
    if value is None:
        raise ParseError(f"{_at(where, key)}: is missing")
    return value


def _float(data: Mapping[str, Any], key: str, where: str) -> float:
    value = data.get(key, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_INT:
        raise ParseError(f"{_at(where, key)}: expected a number of at least 0, found {str(value)[:40]}")
    return float(value)


def _bool(data: Mapping[str, Any], key: str, where: str) -> bool:
    value = data.get(key)
    if not isinstance(value, bool):
        raise ParseError(f"{_at(where, key)}: expected true or false, found {str(value)[:40]}")
    return value


def _str(data: Mapping[str, Any], key: str, where: str, *, default: str | None = None) -> str:
    value = data.get(key, default)
    if not isinstance(value, str):
        raise ParseError(f"{_at(where, key)}: expected a text, found {type(value).__name__}")
    return value
