"""What an observation is made of, and its wire form: one JSON object per line. Pure.

All times are seconds of the observer's monotonic clock (`_s`), but for engine stamps (`t_us`, `engine_us`), which are the
engine's. The first record is a `Header`; its `started_s` and `started_unix_s` are the same instant, so that any time can be
turned into a date. Fields at their defaults are left out. Events come before the sample that brought them.
"""

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeVar, get_args, get_origin

from proxy.backends.slots import SlotsReport
from proxy.types import PhaseEvent

FORMAT: Final = "llama-proxy-watch"
VERSION: Final = 1
R = TypeVar("R")


class RecordError(ValueError):
    """A record is not what it should be; the message names the field."""


class ServerState(StrEnum):
    """How a watched server answers."""

    UP = "up"
    GONE = "gone"  # nobody listens, or the connection broke
    SILENT = "silent"  # connected, no answer in time
    NOT_LOADED = "not_loaded"  # no model yet, or none any more
    SLEEPING = "sleeping"  # asking for slots would wake it
    DENIED = "denied"
    UNUSABLE = "unusable"  # answers something else


@dataclass(frozen=True, slots=True)
class Header:
    """What was watched, by what, since when."""

    started_s: float
    started_unix_s: float
    interval_s: float
    servers: tuple[str, ...]
    logs: tuple[str, ...] = ()
    llama_proxy: str = ""
    python: str = ""
    format: str = FORMAT
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Mark:
    """A server changed its state. `run` counts the starts of it that were seen, from 1; 0 before the first.

    `native`: it tells phases and transitions; `counters`: its token counters are read; `note` says what is missing.
    """

    server: int
    run: int
    at_s: float
    state: ServerState
    why: str = ""
    native: bool = False
    counters: bool = False
    policy: str = ""
    build: str = ""
    series: str = ""
    model: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Counters:
    """The engine's token counters and when they were read: prompt tokens computed, tokens of ended answers."""

    asked_s: float
    answered_s: float
    prompt: int
    generated: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of `/slots`: what it says was true at some instant between `asked_s` and `answered_s`.

    `counters` were read before the slots; `settled` after them (only in the first sample of a run).
    """

    server: int
    run: int
    asked_s: float
    answered_s: float
    report: SlotsReport
    counters: Counters | None = None
    settled: Counters | None = None

    @property
    def at_s(self) -> float:
        """The middle of the request."""
        return (self.asked_s + self.answered_s) / 2


@dataclass(frozen=True, slots=True)
class Event:
    """A transition with its time on the observer's clock, which is right to within `error_s`."""

    server: int
    run: int
    at_s: float
    error_s: float
    event: PhaseEvent


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of an engine's log; it was written before `read_s`."""

    log: int
    read_s: float
    line: str


@dataclass(frozen=True, slots=True)
class LogNote:
    """Something about a log file itself: missing, replaced, too fast to follow."""

    log: int
    at_s: float
    note: str


@dataclass(frozen=True, slots=True)
class End:
    """The observation ended in order."""

    at_s: float
    why: str


Record = Header | Mark | Sample | Event | LogLine | LogNote | End

KINDS: Final[dict[str, type[Record]]] = {
    "header": Header,
    "server": Mark,
    "sample": Sample,
    "event": Event,
    "log": LogLine,
    "log_note": LogNote,
    "end": End,
}
_NAMES: Final = {kind: name for name, kind in KINDS.items()}


def encode(record: Record) -> dict[str, Any]:
    """Return the JSON object of a record; the events of a sample are records of their own."""
    if isinstance(record, Sample):
        record = replace(record, report=replace(record.report, events=()))
    return {"kind": _NAMES[type(record)], **_plain(record)}


def decode(data: object) -> Record:
    """Build a record from its JSON object. Raises `RecordError`."""
    if not isinstance(data, Mapping):
        raise RecordError(f"expected a JSON object, found {type(data).__name__}")
    kind = KINDS.get(str(data.get("kind")))
    if kind is None:
        raise RecordError(f"kind: {str(data.get('kind'))[:40]!r} is not one of {', '.join(KINDS)}")
    found: Record = _build(kind, data, "")
    return found


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {
            field.name: _plain(found)
            for field in fields(value)
            if (found := getattr(value, field.name)) != field.default
            # a format and a version that are not written are no help to a reader
            or field.name in ("format", "version")
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, StrEnum) else value


def _build(kind: type[R], data: Any, where: str) -> R:
    if not isinstance(data, Mapping):
        raise RecordError(f"{where}: expected an object, found {type(data).__name__}")
    given: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type] # only dataclasses come here
        at = f"{where}.{field.name}" if where else field.name
        if field.name in data:
            given[field.name] = _value(field.type, data[field.name], at)
        elif field.default is MISSING:
            raise RecordError(f"{at}: is missing")
    return kind(**given)


def _value(kind: Any, raw: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return None if raw is None else _value(options[0], raw, where)
    if get_origin(kind) is tuple:
        if not isinstance(raw, list):
            raise RecordError(f"{where}: expected an array, found {type(raw).__name__}")
        return tuple(_value(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(raw))
    if is_dataclass(kind):
        return _build(kind, raw, where)  # type: ignore[arg-type] # a class, as annotations are
    if issubclass(kind, StrEnum):
        try:
            return kind(raw)
        except ValueError:
            names = ", ".join(member.value for member in kind)
            raise RecordError(f"{where}: {str(raw)[:40]!r} is not one of {names}") from None
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if not isinstance(raw, kind) or (kind is not bool and isinstance(raw, bool)):
        raise RecordError(f"{where}: expected {kind.__name__}, found {str(raw)[:40]!r}")
    return raw
