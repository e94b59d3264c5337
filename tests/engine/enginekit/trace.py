"""The engine's debug trace: one line per decoded view.

A line reads ``view t_us=… kind=text engine=generate sealed=0 cohort=3 prompt=0
generated=2 slots=0:1,2:1``. ``t_us`` is on the clock of the transitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class View:
    """One view that went through a decode call.

    ``t_us`` is the end of the decode; ``slots`` maps a slot to its tokens in this view.
    """

    t_us: int
    kind: str
    engine: str
    sealed: bool
    cohort: int
    prompt: int
    generated: int
    slots: dict[int, int]

    @property
    def mixed(self) -> bool:
        """Whether prompt and generated tokens share the view."""
        return self.prompt > 0 and self.generated > 0


def read_trace(path: Path) -> list[View]:
    """Return the views of a trace file; an unfinished last line is left out."""
    if not path.exists():
        return []
    text = path.read_text()
    return [_parse(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]


def _parse(line: str) -> View:
    word, *pairs = line.split()
    assert word == "view", line
    fields = dict(pair.split("=", 1) for pair in pairs)
    shares = (share.split(":") for share in fields["slots"].split(",") if share)
    view = View(
        t_us=int(fields["t_us"]),
        kind=fields["kind"],
        engine=fields["engine"],
        sealed=fields["sealed"] == "1",
        cohort=int(fields["cohort"]),
        prompt=int(fields["prompt"]),
        generated=int(fields["generated"]),
        slots={int(slot): int(count) for slot, count in shares},
    )
    assert sum(view.slots.values()) == view.prompt + view.generated, line
    return view
