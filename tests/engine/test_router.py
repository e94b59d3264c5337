"""Router mode: the policy is each child's own, given by the router's flags."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.engine.enginekit.http import request
from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.phase import Story, parse_events
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import Server, greedy


def test_a_routers_child_holds_the_barrier(engine_binary: Path, tmp_path: Path) -> None:
    """Flags and tags reach the child; its phase is read through the router."""
    folder = tmp_path / "models" / "small"
    folder.mkdir(parents=True)
    shutil.copy(zoo("llama"), folder / "small.gguf")
    args = ("--models-dir", str(folder.parent), "-np", "4", "-c", "8192")
    policy = ("--phase-policy", "yield", "--phase-yield-ms", "77")
    with Server(engine_binary, None, (*args, *policy), tmp_path / "router") as router:
        body = {**greedy([words(200), words(9, 1)], 5), "model": "small"}
        answer = request(router.port, "POST", "/completion", body, {"x-request-id": "routed"})
        assert answer.status == 200, answer.body
        props = router.get("/props?model=small").ok()
        assert props["phase"] == {"policy": "yield", "yield_ms": 77, "admit_ms": 0}
        events, lost = parse_events(router.get("/slots?model=small&phase_since=0").ok())
        assert lost == 0
        story = Story(events)
        ready = story.all("ready", "routed")
        assert len(ready) == 2
        assert len({event.cohort for event in ready}) == 1
        assert max(event.seq for event in ready) < story.seq("open")
