"""Properties that hold in every test, and questions about what an engine did."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tests.engine.enginekit.http import Exchange
from tests.engine.enginekit.server import Server
from tests.engine.enginekit.trace import View
from tests.engine.enginekit.waiting import eventually

GAUGES = tuple(f"phase_members_{state}" for state in ("queued", "prefill", "ready", "generate", "paused"))
MIXED, EARLY = "decode_mixed_batches_total", "phase_early_tokens_total"


def assert_exclusive(server: Server) -> None:
    """No decoded view of the trace mixes, and both counters of violations are 0."""
    mixed = [view for view in server.trace() if view.mixed]
    assert not mixed, f"{len(mixed)} mixed views, the first: {mixed[0]}"
    metrics = server.metrics()
    assert metrics[MIXED] == 0
    assert metrics[EARLY] == 0


def assert_rested(server: Server, policy: str) -> None:
    """After a test: process alive, every slot free, machine idle, nothing mixed or early."""
    server.assert_alive()
    server.cut_all()
    server.wait_idle()
    eventually(
        lambda: set(server.members()) == {"none"} and server.phase()["engine"] == "idle",
        "the machine is idle and has no members",
    )
    metrics = server.metrics()
    left = {name: metrics[name] for name in (*GAUGES, "phase_state") if metrics[name]}
    assert not left, f"gauges after the end: {left}"
    if policy != "mixed":
        assert_exclusive(server)


def assert_equal_tokens(found: Sequence[int], wanted: Sequence[int], what: str = "") -> None:
    """Fail with the first difference of two token lists."""
    if list(found) == list(wanted):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
        min(len(found), len(wanted)),
    )
    msg = f"{what} differ at token {at} of {len(found)}/{len(wanted)}"
    raise AssertionError(f"{msg}: {list(found[at : at + 5])} != {list(wanted[at : at + 5])}")


def barrier_holds(stream: Exchange) -> bool:
    """Whether, in one stream of several prompts, every prompt ends before any token."""
    prompts = [e.order for e in stream.events if e.prompt_done]
    tokens = [e.order for e in stream.events if e.is_token]
    assert prompts, stream.describe()
    assert tokens, stream.describe()
    last_first_done = max(
        min(e.order for e in stream.events if e.prompt_done and e.index == index)
        for index in {e.index for e in stream.events}
    )
    return last_first_done < min(tokens)


def generation_runs(views: Sequence[View]) -> list[frozenset[int]]:
    """Return the slots of each view that generated, without the views of prompts."""
    return [frozenset(view.slots) for view in views if view.generated]


def run_lengths(groups: Sequence[frozenset[int]]) -> list[tuple[frozenset[int], int]]:
    """Return consecutive equal groups with how often each came in a row."""
    if not groups:
        return []
    runs: list[tuple[frozenset[int], int]] = [(groups[0], 1)]
    for before, group in pairwise(groups):
        if group == before:
            runs[-1] = (group, runs[-1][1] + 1)
        else:
            runs.append((group, 1))
    return runs
