"""Threads that read an engine's views without pause, and check that each answer is whole and possible."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from tests.engine.enginekit.http import Json
from tests.engine.enginekit.phase import parse_events
from tests.engine.enginekit.server import Server

STOP_TIMEOUT_S = 60.0
VIEWS = ("slots", "light", "metrics", "props")
# which member states an engine state allows, under an exclusive policy
ALLOWED = {
    "idle": {"none", "queued"},
    "prefill": {"none", "queued", "prefill", "ready", "paused"},
    "generate": {"none", "queued", "generate"},
}


class Readers:
    """One thread per view: `/slots`, `/slots?phase_since=`, `/metrics`, `/props`; `views` may name fewer.

    Use it as a context manager around a load. `reads` counts the answers of each view, `seen` the engine states that
    `/slots` told. `problems` holds everything that was wrong, in words.
    """

    def __init__(self, server: Server, *, exclusive: bool, views: Sequence[str] = VIEWS) -> None:
        self.server = server
        self.exclusive = exclusive
        self.reads: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._since = 0
        reads: dict[str, Callable[[], None]] = {
            "slots": self._read_slots,
            "light": self._read_light,
            "metrics": self._read_metrics,
            "props": self._read_props,
        }
        self._threads = [
            threading.Thread(target=self._loop, args=(name, reads[name]), name=f"reads {name}", daemon=True)
            for name in views
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def _loop(self, name: str, read: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                read()
            except Exception as error:
                self.problems.append(f"{name}, read {self.reads[name] + 1}: {type(error).__name__}: {error}")
                return
            self.reads[name] += 1

    def _read_slots(self) -> None:
        slots: list[Json] = self.server.get("/slots").ok()
        self._check(slots)
        self.seen[slots[0]["phase"]["engine"]] += 1

    def _read_light(self) -> None:
        view = self.server.get(f"/slots?phase_since={self._since}").ok()
        events, lost = parse_events(view)
        self._check(view["slots"])
        first = self._since + lost + 1
        assert [event.seq for event in events] == list(range(first, first + len(events)))
        assert view["seq"] == first + len(events) - 1
        self._since = int(view["seq"])

    def _check(self, slots: list[Json]) -> None:
        """The engine's fields are the same in all slots, and no member is where its engine state forbids it."""
        shared = {(s["phase"]["engine"], s["phase"]["sealed"], s["phase"]["cohort"]) for s in slots}
        assert len(shared) == 1, shared
        if self.exclusive:
            engine = slots[0]["phase"]["engine"]
            members = {slot["phase"]["member"] for slot in slots}
            assert members <= ALLOWED[engine], f"{members} while the engine is in {engine}"

    def _read_metrics(self) -> None:
        found = self.server.metrics()
        assert found["phase_state"] in (0, 1, 2, 3)

    def _read_props(self) -> None:
        props: Any = self.server.get("/props").ok()
        assert props["phase"]["policy"]
