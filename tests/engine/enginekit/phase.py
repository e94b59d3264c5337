"""The transitions an engine reports at ``/slots?phase_since=SEQ``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

EVENTS = ("admit", "seal", "ready", "open", "pause", "resume", "release", "idle")
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class PhaseEvent:
    """One transition; ``t_us`` is monotonic, ``slot`` is -1 for the engine's own events."""

    seq: int
    t_us: int
    event: str
    slot: int
    cohort: int
    request: str
    tokens: int


def parse_events(view: Any) -> tuple[list[PhaseEvent], int]:
    """Return the events and the count lost to overrun of one ``phase_since`` answer."""
    events = [
        PhaseEvent(
            seq=int(item["seq"]),
            t_us=int(item["t_us"]),
            event=str(item["event"]),
            slot=int(item.get("slot", NO_SLOT)),
            cohort=int(item["cohort"]),
            request=str(item.get("request", "")),
            tokens=int(item.get("tokens", 0)),
        )
        for item in view["events"]
    ]
    return events, int(view["lost"])


class Story:
    """Questions about a list of transitions, asked by request tag."""

    def __init__(self, events: Iterable[PhaseEvent]) -> None:
        self.events = list(events)

    def all(self, event: str, tag: str | None = None) -> list[PhaseEvent]:
        """Return the events of one kind, of one request when ``tag`` is given."""
        return [e for e in self.events if e.event == event and (tag is None or e.request == tag)]

    def first(self, event: str, tag: str | None = None) -> PhaseEvent:
        """Return the first such event; fail when there is none."""
        found = self.all(event, tag)
        assert found, f"no {event} of {tag!r} in {self.describe()}"
        return found[0]

    def seq(self, event: str, tag: str | None = None) -> int:
        """Return the sequence number of the first such event."""
        return self.first(event, tag).seq

    def cohort(self, tag: str) -> int:
        """Return the cohort whose barrier the request waited at."""
        return self.first("ready", tag).cohort

    def slot(self, tag: str) -> int:
        """Return the slot the request was admitted to."""
        return self.first("admit", tag).slot

    def describe(self) -> str:
        """Return one line per event for a failure message."""
        lines = (
            f"{e.seq} {e.event} slot={e.slot} cohort={e.cohort} {e.request} tokens={e.tokens}"
            for e in self.events
        )
        return "\n" + "\n".join(lines)
