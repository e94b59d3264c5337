"""The mirror: cadence, pokes, silence, metrics; the ledger of phases; both with the clock in hand."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends import mirror as mirror_module
from proxy.backends.client import ProbeError
from proxy.backends.mirror import Mirror
from proxy.backends.phases import PhaseLedger, Sealed
from proxy.backends.slots import SlotsReport
from proxy.clock import monotonic
from proxy.metrics import Metrics
from proxy.types import BackendKey, EnginePhase, MemberState, PhaseEvent, SlotView, Snapshot
from tests.backends.conftest import eventually

KEY = BackendKey("m", "process", 3)
IDLE = SlotsReport((SlotView(0, False), SlotView(1, False)))
BUSY = SlotsReport((SlotView(0, True), SlotView(1, False)))


class Engine:
    """Answers polls from a script and notes when each came."""

    def __init__(self, answer):
        self.answer = answer
        self.asked: list[tuple[float, int | None]] = []

    async def fetch(self, since):
        self.asked.append((monotonic(), since))
        answer = self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def gaps(self):
        times = [at for at, _ in self.asked]
        return [b - a for a, b in zip(times, times[1:], strict=False)]


@pytest.fixture
async def made():
    mirrors = []

    def make(engine, **more):
        seen: list[Snapshot] = []
        metrics = Metrics()
        one = Mirror(KEY, engine.fetch, clock=monotonic, metrics=metrics, on_snapshot=seen.append, **more)
        mirrors.append(one)
        one.start()
        return one, seen, metrics

    yield make
    for one in mirrors:
        await one.stop()
        await one.stop()


async def test_a_busy_stock_engine_is_left_the_second_in_which_it_notices_lost_clients(made):
    engine = Engine(BUSY)
    _, seen, _ = made(engine)
    await eventually(lambda: len(engine.asked) >= 3)
    assert all(gap > 1.0 for gap in engine.gaps())
    assert seen[-1].key == KEY and seen[-1].asked_at <= seen[-1].taken_at


async def test_a_request_on_its_way_is_watched_before_it_is_on_a_slot(made):
    """An idle answer right after a grant is no reason to look away."""
    engine = Engine(SlotsReport((SlotView(0, False),), native=True, phase=EnginePhase.IDLE, seq=1))
    made(engine, working=lambda: 1)
    await eventually(lambda: len(engine.asked) >= 6)
    assert min(engine.gaps()) < 0.5


async def test_an_idle_engine_is_polled_slowly(made):
    engine = Engine(IDLE)
    made(engine)
    await eventually(lambda: len(engine.asked) >= 3)
    assert all(gap > 1.0 for gap in engine.gaps())


async def test_a_native_engine_is_polled_faster(made):
    engine = Engine(
        SlotsReport(
            (SlotView(0, True, member=MemberState.GENERATE),), native=True, phase=EnginePhase.GENERATE, seq=1
        )
    )
    one, _, _ = made(engine)
    await eventually(lambda: len(engine.asked) >= 11)
    # a machine that stands still for a moment makes some of them longer
    assert sorted(engine.gaps())[2] < 0.15 and one._interval() == mirror_module.NATIVE_BUSY_S


async def test_a_poke_polls_at_once_and_a_burst_costs_few(made, monkeypatch):
    """Without a poke none of these polls would come; the soonest shows how soon, whatever held up the others."""
    monkeypatch.setattr(mirror_module, "IDLE_S", 600.0)
    engine, waits = Engine(IDLE), []
    one, seen, _ = made(engine)
    await eventually(lambda: seen)
    for count in range(2, 7):
        await asyncio.sleep(0.02)
        poked = monotonic()
        one.poke()
        await eventually(lambda count=count: len(seen) == count, every_s=0.001)
        waits.append(seen[-1].asked_at - poked)
    assert min(waits) < 0.05 and all(wait >= 0 for wait in waits)
    count, began = len(engine.asked), monotonic()
    for _ in range(1000):
        one.poke()
        await asyncio.sleep(0)
    took = monotonic() - began
    await asyncio.sleep(0.1)
    assert len(engine.asked) - count <= took / (mirror_module.MIN_GAP_S + mirror_module.SETTLE_S) + 3


async def test_a_poke_during_a_poll_asks_again(made):
    """What was asked before the poke does not count: another poll follows."""
    gate = asyncio.Event()
    engine = Engine(IDLE)
    plain = engine.fetch

    async def slow(since):
        report = await plain(since)
        await gate.wait()
        return report

    engine.fetch = slow
    one, seen, _ = made(engine)
    await eventually(lambda: engine.asked)
    poked = monotonic()
    one.poke()
    gate.set()
    await eventually(lambda: len(seen) >= 2)
    assert seen[-1].asked_at >= poked


async def test_events_are_asked_for_once(made):
    """`phase_since` follows the engine's seq; a restarted remote engine that counts anew is read from the start."""
    engine = Engine(SlotsReport((SlotView(0, True),), native=True, seq=7))
    one, seen, _ = made(engine)
    await eventually(lambda: len(engine.asked) >= 2)
    assert [since for _, since in engine.asked[:2]] == [0, 7]
    engine.answer = SlotsReport((SlotView(0, True),), native=True, seq=2)
    await eventually(lambda: seen[-1].seq == 2)
    asked = [since for _, since in engine.asked]
    restart = asked.index(0, 1)
    assert asked[1:restart] == [7] * (restart - 1) and set(asked[restart + 1 :]) <= {2}


async def test_silence_is_counted_and_the_snapshot_ages(made, monkeypatch):
    troubles = []
    engine = Engine(BUSY)
    one, seen, _ = made(
        engine, on_failed_polls=lambda count, error, asked: troubles.append((count, error.timed_out))
    )
    await eventually(lambda: seen)
    engine.answer = ProbeError("no answer", timed_out=True)
    await eventually(lambda: one.silent_polls >= 3)
    assert troubles[:3] == [(1, True), (2, True), (3, True)]
    assert one.age() > 0.3 and one.latest is seen[-1]
    engine.answer = ProbeError("refused")
    await eventually(lambda: one.silent_polls == 0)
    assert one.failed_polls > 3
    engine.answer, answers = BUSY, monotonic()
    await eventually(lambda: one.failed_polls == 0)
    assert one.age() <= monotonic() - answers, "it is that of the newest snapshot"


async def test_an_engine_that_answers_without_slots_is_asked_no_faster_than_an_idle_one(made):
    troubles = []
    engine = Engine(ProbeError("/slots answered 501", answered=True))
    one, _, _ = made(engine, on_failed_polls=lambda count, error, asked: troubles.append(error.answered))
    await eventually(lambda: len(engine.asked) >= 3)
    assert all(gap >= mirror_module.IDLE_S for gap in engine.gaps()) and all(troubles)
    engine.answer = ProbeError("refused")
    one.poke()
    await eventually(lambda: len(troubles) >= 6)
    assert min(engine.gaps()) < mirror_module.IDLE_S, "who may be gone is asked again soon"


async def test_a_failing_listener_does_not_end_the_mirror():
    engine, calls = Engine(BUSY), []

    def listen(snapshot):
        calls.append(snapshot)
        raise RuntimeError("listener")

    one = Mirror(KEY, engine.fetch, clock=monotonic, metrics=Metrics(), on_snapshot=listen)
    one.start()
    await eventually(lambda: len(calls) >= 2)
    await one.stop()


async def test_gauges_tell_the_state_and_go_with_the_backend(made):
    slots = (
        SlotView(0, True, member=MemberState.GENERATE),
        SlotView(1, True, member=MemberState.QUEUED),
        SlotView(2, False),
    )
    engine = Engine(SlotsReport(slots, native=True, phase=EnginePhase.GENERATE, seq=1))
    one, seen, metrics = made(engine)
    await eventually(lambda: seen)
    text = metrics.render().decode()
    label = 'backend="process",model="m"'
    assert f'engine_phase{{{label},phase="generate"}} 1.0' in text
    assert f'engine_phase{{{label},phase="idle"}} 0.0' in text
    for state, count in (("generate", 1), ("queued", 1), ("idle", 1), ("busy", 0)):
        assert f'engine_slots{{{label},state="{state}"}} {count}.0' in text
    assert f"mirror_age_seconds{{{label}}}" in text
    await one.stop()
    text = metrics.render().decode()
    assert not [
        x
        for x in text.splitlines()
        if x.startswith(
            ("llama_proxy_engine_phase{", "llama_proxy_mirror_age_seconds{", "llama_proxy_engine_slots{")
        )
    ]


def test_constants_keep_the_promises():
    assert mirror_module.NATIVE_BUSY_S <= 0.1 and mirror_module.IDLE_S >= 1


# -- the ledger ---------------------------------------------------------------------------------------------

_OFFSET = 1000.0
"""The engine's clock is this far behind ours."""


def us(at):
    return round((at - _OFFSET) * 1e6)


def event(at, name, *, slot=None, cohort=1, tokens=0, seq=0):
    return PhaseEvent(seq, us(at), name, slot, cohort, "", tokens)


def snap(at, phase, *events, slots=(), lost=0):
    return Snapshot(KEY, at, at, tuple(slots), True, phase, events=tuple(events), lost=lost)


def total(observations, phase):
    return sum(seen.phase_seconds.get(phase, 0.0) for seen in observations)


def test_a_cohort_shorter_than_a_poll_is_accounted_from_events():
    """Two requests: 30 ms of prefill between two polls show up with their exact durations and waits."""
    ledger = PhaseLedger(engine_is_ours=True)
    first = (
        event(2000.900, "admit", slot=0, tokens=10),
        event(2000.905, "admit", slot=1, tokens=20),
        event(2000.910, "ready", slot=0),
        event(2000.910, "seal", slot=0, tokens=2),
        event(2000.920, "admit", slot=2, cohort=0, tokens=5),
        event(2000.930, "ready", slot=1),
        event(2000.930, "open", tokens=2),
    )
    second = (
        event(2001.5, "release", slot=0),
        event(2001.9, "release", slot=1),
        event(2001.9, "idle"),
        event(2001.9, "admit", slot=2, cohort=2, tokens=5),
    )
    seen = [
        ledger.observe(snap(2000.0, EnginePhase.IDLE), us(2000.0)),
        ledger.observe(snap(2001.0, EnginePhase.GENERATE, *first), us(2001.0)),
        ledger.observe(snap(2002.0, EnginePhase.PREFILL_OPEN, *second), us(2002.0)),
    ]
    assert seen[1].seals == [Sealed(2, 30)]
    assert seen[1].barrier_waits == pytest.approx([0.020, 0.0])
    assert seen[1].native_queues == [0.0, 0.0] and seen[2].native_queues == pytest.approx([0.98])
    assert seen[1].durations == [
        (EnginePhase.PREFILL_OPEN, pytest.approx(0.010)),
        (EnginePhase.PREFILL_SEALED, pytest.approx(0.020)),
    ]
    assert seen[2].durations == [(EnginePhase.GENERATE, pytest.approx(0.97))]
    assert total(seen, EnginePhase.IDLE) == pytest.approx(0.9)
    assert total(seen, EnginePhase.PREFILL_OPEN) == pytest.approx(0.010 + 0.1)
    assert total(seen, EnginePhase.PREFILL_SEALED) == pytest.approx(0.020)
    assert total(seen, EnginePhase.GENERATE) == pytest.approx(0.97)


def test_yield_and_resume():
    """A pause makes a prefill a yielded one until the barrier opens; the paused request's time is summed."""
    ledger = PhaseLedger(engine_is_ours=True)
    ledger.observe(snap(2000.0, EnginePhase.GENERATE), us(2000.0))
    events = (
        event(2004.0, "admit", slot=1, cohort=0, tokens=8),
        event(2005.0, "pause", slot=0),
        event(2005.0, "admit", slot=1, cohort=2, tokens=8),
        event(2006.0, "ready", slot=1, cohort=2),
        event(2006.0, "seal", slot=1, cohort=2, tokens=1),
        event(2007.0, "open", cohort=2),
        event(2007.0, "resume", slot=0),
        event(2008.0, "release", slot=0),
    )
    seen = ledger.observe(snap(2010.0, EnginePhase.GENERATE, *events), us(2010.0))
    assert seen.phase_seconds == pytest.approx({EnginePhase.GENERATE: 8.0, EnginePhase.YIELD_PREFILL: 2.0})
    assert seen.paused == pytest.approx([2.0]) and seen.native_queues == pytest.approx([1.0])
    assert seen.barrier_waits == pytest.approx([1.0]) and seen.seals == [Sealed(1, 8)]


def test_a_stock_engine_is_unknown_all_the_time():
    ledger = PhaseLedger(engine_is_ours=True)
    seen = [ledger.observe(snap(float(at), EnginePhase.UNKNOWN)) for at in range(5)]
    assert total(seen, EnginePhase.UNKNOWN) == pytest.approx(4.0)
    assert not any(one.durations for one in seen)


def test_a_remote_engines_past_is_not_ours():
    ledger = PhaseLedger(engine_is_ours=False)
    assert ledger.observe(snap(2010.0, EnginePhase.IDLE, event(2009.0, "seal", tokens=3))).seals == []
    seen = ledger.observe(snap(2011.0, EnginePhase.IDLE, event(2010.5, "seal", tokens=3)))
    assert seen.seals == [Sealed(3, 0)]


def test_one_who_left_before_the_barrier_did_not_wait_at_it():
    ledger = PhaseLedger(engine_is_ours=True)
    ledger.observe(snap(2000.0, EnginePhase.IDLE))
    events = [
        event(2001.0, "admit", slot=0, tokens=8),
        event(2001.0, "admit", slot=1, tokens=9),
        event(2002.0, "ready", slot=0),
        event(2003.0, "release", slot=0),
        event(2004.0, "open"),
    ]
    assert ledger.observe(snap(2005.0, EnginePhase.GENERATE, *events)).barrier_waits == []


def test_lost_events_are_healed_by_the_snapshot():
    ledger = PhaseLedger(engine_is_ours=True)
    ledger.observe(snap(0.0, EnginePhase.IDLE))
    ledger.observe(snap(1.0, EnginePhase.GENERATE, lost=50))
    seen = ledger.observe(snap(3.0, EnginePhase.GENERATE))
    assert seen.phase_seconds == pytest.approx({EnginePhase.GENERATE: 2.0})


_EVENTS = ("admit", "seal", "ready", "open", "pause", "resume", "release", "idle", "something-new")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(_EVENTS), st.none() | st.integers(0, 3), st.integers(0, 3), st.floats(-1, 5)
        ),
        max_size=40,
    ),
    st.lists(st.sampled_from(EnginePhase), min_size=1, max_size=6),
)
def test_any_events_account_all_the_time_once(raw, phases):
    """Whatever an engine says, in whatever order: the phases' seconds add up to the time that passed."""
    ledger, spent = PhaseLedger(engine_is_ours=True), 0.0
    share = -(-len(raw) // len(phases))
    for number, phase in enumerate(phases):
        part = raw[number * share : (number + 1) * share]
        events = [
            event(2000.0 + number + at, name, slot=slot, cohort=cohort) for name, slot, cohort, at in part
        ]
        seen = ledger.observe(snap(2000.0 + number, phase, *events), us(2000.0 + number))
        spent += sum(seen.phase_seconds.values())
        assert all(seconds >= 0 for seconds in seen.phase_seconds.values())
        assert all(seconds >= 0 for _, seconds in seen.durations)
    assert spent >= len(phases) - 1 - 1e-6
