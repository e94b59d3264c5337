"""The queue of one model: tickets in the order of arrival, and each key's own line within each class. Pure."""

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from proxy.admission.entry import Entry


def _number(entry: Entry) -> int:
    return entry.number


@dataclass(slots=True)
class Queue:
    """Waiting tickets. `lines` holds the same ones by class and key; no line is empty."""

    entries: list[Entry] = field(default_factory=list)
    lines: dict[int, dict[str, list[Entry]]] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Put a ticket in at the place of its arrival."""
        keys = self.lines.setdefault(entry.spec.priority, {})
        insort(keys.setdefault(entry.spec.key, []), entry, key=_number)
        insort(self.entries, entry, key=_number)

    def remove(self, entry: Entry) -> None:
        """Take a ticket out."""
        self.entries.remove(entry)
        keys = self.lines[entry.spec.priority]
        line = keys[entry.spec.key]
        line.remove(entry)
        if not line:
            del keys[entry.spec.key]
            if not keys:
                del self.lines[entry.spec.priority]

    def next_of_age(self, age_s: float, now: float) -> float | None:
        """Return when the most senior ticket that is younger than `age_s` will be as old; None when there is none."""
        index = bisect_right(self.entries, now, key=lambda entry: entry.senior_at + age_s)
        return self.entries[index].senior_at + age_s if index < len(self.entries) else None

    def __iter__(self) -> Iterator[Entry]:
        """By arrival."""
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)
