"""Rebuild what an engine did from its transitions alone; illegal transitions fail."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from tests.engine.enginekit.phase import PhaseEvent

# from which member states an event may come
_LEGAL = {
    "ready": {"prefill"},
    "pause": {"generate"},
    "resume": {"paused"},
    "release": {"queued", "prefill", "ready", "generate", "paused"},
}


class Replay:
    """State of the engine and of each slot after the events given so far, and time per state.

    ``seconds`` holds engine time for ``prefill`` and ``generate``, and slot time for
    ``queued``, ``ready`` and ``paused``.
    """

    def __init__(self, slots: int) -> None:
        self.engine = "idle"
        self.sealed = False
        self.members = ["none"] * slots
        self.cohorts = [0] * slots
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.entered: Counter[str] = Counter()
        self.yields = 0
        self._engine_since = 0
        self._since = [0] * slots
        self._newest = 0

    def run(self, events: Iterable[PhaseEvent]) -> Replay:
        """Apply the events in order and return self."""
        for event in events:
            self._apply(event)
        return self

    def _apply(self, event: PhaseEvent) -> None:
        if event.event in _LEGAL:
            assert self.members[event.slot] in _LEGAL[event.event], (event, self.members)
        match event.event:
            case "admit":
                self._admit(event)
            case "seal":
                assert self.engine == "prefill", event
                assert not self.sealed, event
                assert event.tokens == sum(m in ("prefill", "ready") for m in self.members)
                self.sealed = True
            case "ready":
                assert event.cohort == self.cohorts[event.slot] == self._newest, event
                self._member(event.slot, "ready", event.t_us)
            case "open":
                self._open(event)
            case "pause":
                self._member(event.slot, "paused", event.t_us)
            case "resume":
                self._member(event.slot, "generate", event.t_us)
            case "release":
                self._member(event.slot, "none", event.t_us)
            case "idle":
                assert not {"prefill", "ready", "generate", "paused"} & set(self.members), event
                self._enter("idle", event.t_us)
            case _:
                raise AssertionError(event)

    def _admit(self, event: PhaseEvent) -> None:
        if event.cohort == 0:
            assert self.members[event.slot] in ("none", "prefill"), event
            self._member(event.slot, "queued", event.t_us)
            return
        assert self.members[event.slot] in ("none", "queued"), event
        assert event.cohort in (self._newest, self._newest + 1), event
        if event.cohort > self._newest:
            assert self.engine in ("idle", "generate"), event
            self.yields += self.engine == "generate"
            self._newest = event.cohort
            self._enter("prefill", event.t_us)
        assert self.engine == "prefill", event
        assert not self.sealed, f"{event} enters a sealed cohort"
        self.cohorts[event.slot] = event.cohort
        self._member(event.slot, "prefill", event.t_us)

    def _open(self, event: PhaseEvent) -> None:
        assert "prefill" not in self.members, f"{event} opens over an unfinished prompt"
        assert event.tokens == sum(m in ("ready", "paused") for m in self.members), event
        self._enter("generate", event.t_us)
        for slot, member in enumerate(self.members):
            if member == "ready":
                self._member(slot, "generate", event.t_us)

    def _enter(self, engine: str, t_us: int) -> None:
        self.seconds[self.engine] += (t_us - self._engine_since) / 1e6
        self.engine, self._engine_since, self.sealed = engine, t_us, False
        self.entered[engine] += 1

    def _member(self, slot: int, member: str, t_us: int) -> None:
        before = self.members[slot]
        if before in ("queued", "ready", "paused"):
            self.seconds[before] += (t_us - self._since[slot]) / 1e6
        self.members[slot], self._since[slot] = member, t_us
