"""The barrier's order: prompts first, then tokens; who joins, who waits, who is let in.

Order is never measured with a clock: it is read from one connection's events, from
the engine's numbered transitions, and from its trace of decoded views.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.conftest import EngineFactory
from tests.engine.enginekit.check import barrier_holds
from tests.engine.enginekit.models import extra_model
from tests.engine.enginekit.phase import Story
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import Server
from tests.engine.enginekit.waiting import eventually

POLICIES = ("drain", "yield")
UNEQUAL = {"ascending": (20, 150, 400), "descending": (400, 150, 20), "middle": (150, 20, 400)}
SLOW = "llama-mid"
LONGER = (900, 3600, 12_000)
"""Words of a prompt that should still be read when its reading was looked at: the next where it was not."""


def _array(server: Server, counts: tuple[int, ...]) -> bool:
    prompts = [words(count, seed) for seed, count in enumerate(counts)]
    stream = server.stream(prompts, 6).ok()
    assert len([e for e in stream.events if e.data.get("stop")]) == len(counts)
    return barrier_holds(stream)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("counts", UNEQUAL.values(), ids=UNEQUAL.keys())
def test_contract_every_prompt_ends_before_any_token(
    engine: EngineFactory, policy: str, counts: tuple[int, ...]
) -> None:
    """One stream of unequal prompts: the last final progress precedes the first token."""
    assert _array(engine(policy=policy, args=("-b", "64")), counts)


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_a_trained_model_holds_the_barrier(engine: EngineFactory, policy: str) -> None:
    """The same on a real (tiny) model."""
    model = extra_model("stories260K.gguf")
    if model is None:
        pytest.skip("no stories260K.gguf: put it into the folder LLAMA_PROXY_TEST_MODELS names")
    assert _array(engine(model, policy, ("-b", "64")), (20, 100, 180))


def test_contract_can_fail(stock: EngineFactory) -> None:
    """The unpatched engine breaks the same property, so the test above proves something."""
    server = stock(args=("-b", "64"))
    assert not any(_array(server, counts) for counts in UNEQUAL.values())


def test_contract_mixed_does_not_hold_the_barrier(engine: EngineFactory) -> None:
    """Nor does the patched engine under `mixed`."""
    server = engine(policy="mixed", args=("-b", "64"))
    assert not any(_array(server, counts) for counts in UNEQUAL.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_final_progress_is_sent_once(engine: EngineFactory, policy: str) -> None:
    """A finished member that waits for others repeats nothing to its client."""
    server = engine(policy=policy, args=("-b", "64"))
    stream = server.stream([words(20), words(400, 1)], 6).ok()
    for index in (0, 1):
        finals = [e for e in stream.events if e.index == index and e.prompt_done]
        assert len(finals) == 1, finals


def _happened(server: Server, event: str, tag: str, since: int = 0) -> None:
    """Wait for it by the record, which keeps what a look at the slots would have missed."""
    eventually(lambda: Story(server.events(since)).all(event, tag), f"{event} of {tag}")


def _look(server: Server) -> tuple[list[str], dict[str, Any], dict[str, float]]:
    """Return slots, engine and metrics, one asked after the other."""
    return server.members(), server.phase(), server.metrics()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [(0, 3), (3, 0)], ids=["long-first", "short-first"])
def test_contract_a_short_prompt_that_joins_waits(
    engine: EngineFactory, policy: str, slots: tuple[int, int]
) -> None:
    """Joined while the long prompt is processed: ready, sealed, silent, then both start."""
    server = engine(SLOW, policy, ("-b", "128"), context=131072)
    seen = False
    for count in LONGER:
        start = server.events()[-1].seq if server.events() else 0
        views = len(server.trace())
        long = server.stream(words(count), 8, tag="long", id_slot=slots[0])
        long.wait_progress()
        short = server.stream(words(15, 1), 8, tag="short", id_slot=slots[1])
        _happened(server, "ready", "short", start)
        members, phase, metrics = _look(server)
        tokens = [e for e in (*long.events, *short.events) if e.is_token]
        # what was looked at belongs together only if the long prompt was still read afterwards
        seen = not Story(server.events(start)).all("ready", "long")
        long.ok()
        short.ok()
        if seen:
            break
    assert seen, "the long prompt was read too fast each time"
    assert (members[slots[1]], members[slots[0]]) == ("ready", "prefill")
    assert phase["sealed"] is True
    assert not tokens
    assert (metrics["phase_state"], metrics["phase_members_ready"]) == (2, 1)

    story = Story(server.events(start))
    assert story.cohort("long") == story.cohort("short")
    assert (story.slot("long"), story.slot("short")) == slots
    assert story.seq("ready", "short") < story.seq("seal") < story.seq("ready", "long")
    assert story.seq("ready", "long") < story.seq("open")
    kinds = ["prompt" if view.prompt else "generated" for view in server.trace()[views:]]
    assert kinds == sorted(kinds, reverse=True), "a prompt view after a generated one"


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_a_late_arrival_waits_for_the_drain(engine: EngineFactory, policy: str) -> None:
    """On a free slot, during decode: no prompt token until the cohort is gone, then it runs."""
    server = engine(SLOW, policy, ("--phase-yield-ms", "600000"))
    first = server.stream(words(10), 1000, tag="first")
    first.wait_token()
    late = server.stream(words(30, 1), 5, tag="late")
    _happened(server, "admit", "late")
    queued = server.metrics()["phase_members_queued"]
    if not Story(server.events()).all("release", "first"):
        assert queued == 1
    late.ok()
    first.ok()

    story = Story(server.events())
    assert story.cohort("late") > story.cohort("first")
    assert story.seq("release", "first") < story.all("admit", "late")[-1].seq
    assert [e.cohort == 0 for e in story.all("admit", "late")] == [True, False]
    assert_no_token_before_the_drain(server, "first", "late")


def assert_no_token_before_the_drain(server: Server, first: str, late: str) -> None:
    """No view holds a prompt token of ``late`` before the last token of ``first``."""
    story = Story(server.events())
    views = server.trace()
    slot = story.slot(late)
    last = max(i for i, v in enumerate(views) if v.generated and story.slot(first) in v.slots)
    admitted_us = story.first("admit", late).t_us
    starts = [i for i, v in enumerate(views) if v.prompt and slot in v.slots]
    starts = [i for i in starts if views[i].t_us > admitted_us]
    assert starts, "the late prompt was never processed"
    assert starts[0] > last


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_staggered_arrivals_cannot_hold_a_cohort_open(engine: EngineFactory, policy: str) -> None:
    """After the first member is ready nobody joins, however many arrive one after the other."""
    server = engine(SLOW, policy, ("-b", "128", "--phase-yield-ms", "600000"), context=131072)
    for count in LONGER:
        start = server.events()[-1].seq if server.events() else 0
        long = server.stream(words(count), 20, tag="long")
        long.wait_progress()
        quick = server.stream(words(5, 1), 4, tag="quick")
        _happened(server, "ready", "quick", start)
        late = [server.stream(words(5, seed), 4, tag=f"late{seed}") for seed in (2, 3, 4, 5)]
        reading = not Story(server.events(start)).all("ready", "long")
        for exchange in (long, quick, *late):
            exchange.ok()
        if reading:
            break
    story = Story(server.events(start))
    assert reading, "the long prompt was read too fast each time"
    assert story.cohort("quick") == story.cohort("long")
    for seed in (2, 3, 4, 5):
        assert story.cohort(f"late{seed}") > story.cohort("long")
        assert story.seq("ready", f"late{seed}") > story.seq("release", "long")
    for seal in story.all("seal"):
        joined = [e for e in story.events if e.event == "admit" and e.cohort == seal.cohort]
        assert max(e.seq for e in joined) < seal.seq


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_shares_are_fair(engine: EngineFactory, policy: str) -> None:
    """Each batch of a prefill is full, and no member with work left is passed over."""
    server = engine(policy=policy, args=("-b", "96"))
    server.stream([words(300, seed) for seed in range(3)], 2).ok()
    views = [view for view in server.trace() if view.prompt]
    assert all(view.prompt == 96 for view in views[:-2]), views
    assert all(len(view.slots) == 3 for view in views[:-3]), views
    assert all(max(v.slots.values()) - min(v.slots.values()) <= 1 for v in views[:-3]), views


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_slots_and_metrics_tell_each_state(engine: EngineFactory, policy: str) -> None:
    """Open prefill, sealed prefill, generate, idle: every view of the engine agrees."""
    server = engine(SLOW, policy, ("-b", "128", "--phase-yield-ms", "600000"), context=131072)
    assert server.phase()["engine"] == "idle"
    assert server.metrics()["phase_state"] == 0
    reading = False
    for count in LONGER:
        start = server.events()[-1].seq if server.events() else 0
        long = server.stream(words(count), 12_000, tag="long")
        long.wait_progress()
        phase = next(s["phase"] for s in server.slots() if s["phase"]["request"] == "long")
        metrics = server.metrics()
        short = server.stream(words(5, 1), 12_000, tag="short")
        _happened(server, "ready", "short", start)
        sealed = _look(server)
        # what was looked at belongs together only if the long prompt was still read afterwards
        reading = not Story(server.events(start)).all("ready", "long")
        if reading:
            break
        server.cut_all()
        server.wait_idle()
    assert reading, "the long prompt was read too fast each time"
    assert (phase["engine"], phase["member"], phase["sealed"]) == ("prefill", "prefill", False)
    assert phase["n_prompt_total"] > 900
    assert metrics["phase_state"] == 1
    assert {"ready", "prefill"} <= set(sealed[0])
    assert sealed[2]["phase_state"] == 2
    short.wait_token()
    eventually(lambda: server.members().count("generate") == 2, "both generate")
    metrics = server.metrics()
    assert (metrics["phase_state"], metrics["phase_members_generate"]) == (3, 2)
    assert server.phase()["engine"] == "generate"
    assert server.phase()["sealed"] is False
    server.cut_all()
    server.wait_idle()
    assert server.phase()["engine"] == "idle"


def test_contract_a_long_decode_call_is_visible(engine: EngineFactory) -> None:
    """`decode_running_ms` grows while a decode call runs, and is 0 when none does."""
    server = engine(SLOW, args=("-b", "8192", "-ub", "8192"), context=65536)
    assert server.phase()["decode_running_ms"] == 0

    def grows(count: int) -> bool:
        running = server.stream(words(count), 3)
        first, found = 0.0, False
        while not found and not running.done:
            now = server.phase()["decode_running_ms"]
            found = 0 < first < now - 20
            first = first or now
        running.ok()
        return found

    # the longer one is for a machine that is too fast for the first
    assert any(map(grows, (1100, 4500)))
    server.wait_idle()
    assert server.phase()["decode_running_ms"] == 0


def test_contract_props_name_the_build(engine: EngineFactory) -> None:
    """`/props` says from which pin, series and flags the engine was built."""
    build = engine().get("/props").ok()["build"]
    assert build, "no build identity"
    assert all(isinstance(value, str) and value for value in build.values()), build
    assert {"pin", "series", "flags"} <= set(build), build
