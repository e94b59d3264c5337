"""The asyncio shell: grants reach who waits, leaving is safe at any moment, timers fire, nothing leaks."""

import asyncio
import random

import pytest
from admission_kit import backend, spec

from proxy.admission import Admission, views
from proxy.admission.controller import limits_of
from proxy.admission.events import Finished, Granted
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.settings import Admission as AdmissionSettings
from proxy.settings import ApiKey, Budgets, Model, Server, Settings
from proxy.types import (
    AdminState,
    EngineInfo,
    EnginePhase,
    MemberState,
    Outcome,
    PhasePolicy,
    Reason,
    SlotView,
    Snapshot,
    TicketState,
)

KEY = backend()
DEADLINE_S = 10.0


class Fleet:
    """Records what admission asks for; `on_load` plays a fleet that answers from inside the call."""

    def __init__(self):
        self.loads = []
        self.pokes = []
        self.on_load = None

    def request_load(self, model):
        self.loads.append(model)
        if self.on_load is not None:
            self.on_load()

    def poke(self, key):
        self.pokes.append(key)


@pytest.fixture
def fleet():
    return Fleet()


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def make(fleet, metrics):
    made = []

    def build(slots=0, policy=PhasePolicy.UNKNOWN, listener=None, load_timeout_s=900.0, **admission):
        budgets = Budgets(load_timeout_s=load_timeout_s)
        settings = Settings(
            models={"m": Model(path="/models/m.gguf", budgets=budgets)},
            admission=AdmissionSettings(**admission),
        )
        one = Admission(settings, metrics, fleet, listener=listener)
        made.append(one)
        if slots:
            one.backend_ready(KEY, EngineInfo(slots, 4096, policy))
        return one

    yield build
    for one in made:
        one.close()
        assert one.broken_rules() == []


def empty(admission):
    view = admission.view("m")
    return (view.queued, view.running, view.cancelling, view.charged, len(admission.tickets())) == (
        0,
        0,
        0,
        0,
        0,
    )


def idle(admission, slots=4):
    now = admission.now()
    return Snapshot(KEY, now, now, tuple(SlotView(i, False) for i in range(slots)), native=True)


def sample(metrics, name, **labels):
    metrics.render()
    return metrics.registry.get_sample_value("llama_proxy_" + name, labels)


async def spin(times=5):
    for _ in range(times):
        await asyncio.sleep(0)


async def test_grant_at_once(make, fleet):
    admission = make(slots=1)
    ticket = admission.submit(spec("a"))
    grant = await ticket.granted()
    assert (grant.key, grant.tag) == (KEY, "a.1")
    assert await ticket.granted() == grant
    assert fleet.pokes == [KEY]
    ticket.release(Outcome.COMPLETED)
    assert empty(admission)


async def test_wait_with_a_timeout_then_the_grant(make):
    """The timeout is the keep-alive's: the ticket keeps its place."""
    admission = make(slots=1)
    first, second = admission.submit(spec("a")), admission.submit(spec("b"))
    assert await second.granted(timeout=0.001) is None
    assert (second.state, second.reason, second.position) == (TicketState.QUEUED, Reason.NO_FREE_SLOT, 1)
    assert second.queued_s > 0
    waiter = asyncio.create_task(second.granted())
    await spin()
    first.release(Outcome.COMPLETED)
    assert (await asyncio.wait_for(waiter, DEADLINE_S)).tag == "b.1"
    second.release(Outcome.COMPLETED)
    assert empty(admission)


async def served(ticket, code=""):
    """A requester: it waits, and releases its ticket whatever happens."""
    try:
        return await ticket.granted()
    except asyncio.CancelledError:
        ticket.release(Outcome.EXPIRED, code)
        raise


async def test_cancelled_wait_leaves_the_queue(make):
    """With the outcome that its requester gives it."""
    endings = []
    admission = make(
        slots=1, listener=lambda e: endings.append(e.ending) if isinstance(e, Finished) else None
    )
    running, leaving, last = (admission.submit(spec(name)) for name in "abc")
    waiter = asyncio.create_task(served(leaving, "total_timeout"))
    await spin()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert [view.id for view in admission.tickets()] == ["a", "c"]
    assert [(one.id, one.outcome, one.code) for one in endings] == [("b", Outcome.EXPIRED, "total_timeout")]
    running.release(Outcome.COMPLETED)
    assert last.state is TicketState.GRANTED
    last.release(Outcome.COMPLETED)
    assert empty(admission)


async def test_grant_that_meets_a_cancel_goes_to_the_next(make):
    """A grant counts only if its requester received it."""
    admission = make(slots=1)
    running, leaving, last = (admission.submit(spec(name)) for name in "abc")
    waiter = asyncio.create_task(served(leaving))
    await spin()
    running.release(Outcome.COMPLETED)
    assert leaving.state is TicketState.GRANTED
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert leaving.state is TicketState.DONE
    assert last.state is TicketState.GRANTED
    last.release(Outcome.COMPLETED)
    assert empty(admission)


@pytest.mark.parametrize("after", range(9))
async def test_cancel_at_every_step_of_a_request(make, after):
    """A handler cancelled after any number of loop turns leaves nothing behind."""
    admission = make(slots=1)
    blocker = admission.submit(spec("blocker"))

    async def handler():
        ticket = admission.submit(spec("a"))
        upstream_open = False
        outcome = Outcome.CANCELLED
        try:
            await ticket.granted()
            upstream_open = True
            await asyncio.sleep(0)
            ticket.first_byte()
            await asyncio.sleep(0)
            upstream_open = False
            outcome = Outcome.COMPLETED
        finally:
            ticket.release(outcome, upstream_open=upstream_open)

    task = asyncio.create_task(handler())
    for turn in range(after):
        if turn == 2:
            blocker.release(Outcome.COMPLETED)
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    blocker.release(Outcome.COMPLETED)
    assert {view.state for view in admission.tickets()} <= {TicketState.CANCELLING}
    await asyncio.sleep(0)
    admission.snapshot(idle(admission))
    assert empty(admission)


@pytest.mark.parametrize("seed", range(6))
async def test_many_clients_on_few_slots(make, seed):
    """64 clients, some of whom leave at any moment: never over the slots, in order, nothing left."""
    order = []
    admission = make(slots=4, listener=lambda e: order.append(e.ticket) if isinstance(e, Granted) else None)
    chance = random.Random(seed)
    running = 0
    peak = 0

    async def client(name):
        nonlocal running, peak
        ticket = admission.submit(spec(name))
        outcome = Outcome.CANCELLED
        try:
            await ticket.granted()
            running += 1
            peak = max(peak, running)
            try:
                await spin(chance.randrange(6))
                outcome = Outcome.COMPLETED
            finally:
                running -= 1
        finally:
            ticket.release(outcome, upstream_open=outcome is Outcome.CANCELLED and chance.random() < 0.5)
            assert admission.broken_rules() == []

    names = [f"c{index:02}" for index in range(64)]
    tasks = [asyncio.create_task(client(name)) for name in names]
    leavers = chance.sample(tasks, 12)
    async with asyncio.timeout(DEADLINE_S):
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if leavers and chance.random() < 0.2:
                leavers.pop().cancel()
            admission.snapshot(idle(admission))
            assert admission.view("m").charged <= 4
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    assert peak == 4
    assert order == sorted(order)
    admission.snapshot(idle(admission))
    assert empty(admission)


async def test_release_wakes_whoever_still_waits(make):
    admission = make()
    ticket = admission.submit(spec("a"))
    waiter = asyncio.create_task(ticket.granted())
    await spin()
    ticket.release(Outcome.CANCELLED)
    with pytest.raises(RuntimeError, match="was released"):
        await asyncio.wait_for(waiter, DEADLINE_S)


async def test_ends_from_elsewhere_reach_waiting_and_running(make):
    admission = make(slots=1)
    running, waiting = admission.submit(spec("a")), admission.submit(spec("b"))
    await running.granted()
    waiter = asyncio.create_task(waiting.granted())
    await spin()
    assert admission.end_model("m", ProxyError(ErrorCode.MODEL_UNLOADED, "forced")) == (1, 1)
    assert (await asyncio.wait_for(running.ended, DEADLINE_S)).code is ErrorCode.MODEL_UNLOADED
    with pytest.raises(ProxyError, match="forced") as caught:
        await asyncio.wait_for(waiter, DEADLINE_S)
    assert caught.value is not waiting.ended.result()  # each raise has its own traceback
    running.release(Outcome.CANCELLED, upstream_open=True)
    waiting.release(Outcome.CANCELLED)
    assert empty(admission)


async def test_an_end_beats_a_grant_not_yet_received(make):
    admission = make(slots=1)
    first, second = admission.submit(spec("a")), admission.submit(spec("b"))
    waiter = asyncio.create_task(second.granted())
    await spin()
    first.release(Outcome.COMPLETED)
    admission.backend_down(KEY, ProxyError(ErrorCode.UPSTREAM_ERROR, "died"))
    with pytest.raises(ProxyError, match="died"):
        await asyncio.wait_for(waiter, DEADLINE_S)
    assert empty(admission)


async def test_who_watches_cannot_stop_who_waits(make):
    """A listener that fails costs its own news: what the same step grants reaches whom it is for."""

    def fails(effect):
        if isinstance(effect, Finished):
            raise LookupError(effect.ending.id)

    admission = make(slots=1, listener=fails)
    first, second = admission.submit(spec("a")), admission.submit(spec("b"))
    first.release(Outcome.COMPLETED)
    assert (await asyncio.wait_for(second.granted(), DEADLINE_S)).tag == "b.1"
    second.release(Outcome.COMPLETED)
    assert empty(admission)


async def test_operator_cancels_one(make):
    admission = make(slots=1)
    ticket = admission.submit(spec("a"))
    error = ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "enough")
    assert admission.cancel("a", error) is True
    assert ticket.ended.result() is error
    assert ticket.state is TicketState.CANCELLING
    assert admission.cancel("a", error) is False
    assert admission.cancel("ghost", error) is False
    ticket.release(Outcome.CANCELLED)
    assert empty(admission)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"slots": 1, "queue_timeout_s": 0.05}, ErrorCode.QUEUE_TIMEOUT),
        ({"load_timeout_s": 0.05}, ErrorCode.LOAD_TIMEOUT),
    ],
)
async def test_deadlines_fire_by_themselves(make, options, code):
    admission = make(**options)
    admission.submit(spec("run"))
    ticket = admission.submit(spec("a"))
    with pytest.raises(ProxyError) as caught:
        await asyncio.wait_for(ticket.granted(), DEADLINE_S)
    assert caught.value.code is code


async def test_gate_deadline_fires_by_itself(make):
    admission = make(slots=1, gate_hold_max_s=0.05)
    admission.set_gate("m", AdminState.BLOCKED, "repair")
    ticket = admission.submit(spec("a"))
    assert ticket.reason is Reason.GATE_BLOCKED
    with pytest.raises(ProxyError) as caught:
        await asyncio.wait_for(ticket.granted(), DEADLINE_S)
    assert caught.value.code is ErrorCode.GATE_HOLD_TIMEOUT


async def test_a_dark_mirror_wakes_waiters_by_itself(make):
    """Capacity that frees by time alone needs no event."""
    admission = make(slots=1, stale_after_s=0.05)
    now = admission.now()
    admission.snapshot(Snapshot(KEY, now, now, (SlotView(0, True, tag="stranger"),), native=True))
    ticket = admission.submit(spec("a"))
    assert ticket.state is TicketState.QUEUED
    await asyncio.wait_for(ticket.granted(), DEADLINE_S)


async def test_timer_that_fires_early_is_armed_again(make):
    admission = make(slots=1, queue_timeout_s=0.2)
    admission.submit(spec("run"))
    ticket = admission.submit(spec("a"))
    admission._timer.cancel()
    admission._fire()
    assert admission._timer is not None
    with pytest.raises(ProxyError):
        await asyncio.wait_for(ticket.granted(), DEADLINE_S)


def test_deadlines_fire_on_uvloop(metrics, fleet):
    """The loop's clock is not ours: its epoch and its granularity differ."""
    uvloop = pytest.importorskip("uvloop")

    async def main():
        settings = Settings(models={"m": Model(path="/m")}, admission=AdmissionSettings(queue_timeout_s=0.05))
        admission = Admission(settings, metrics, fleet)
        admission.backend_ready(KEY, EngineInfo(1, 4096))
        admission.submit(spec("run"))
        ticket = admission.submit(spec("a"))
        with pytest.raises(ProxyError):
            await asyncio.wait_for(ticket.granted(), DEADLINE_S)
        admission.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_load_that_fails_inside_the_call(make, fleet):
    admission = make()
    fleet.on_load = lambda: admission.load_failed("m", ProxyError(ErrorCode.MODEL_LOAD_FAILED, "no file"))
    ticket = admission.submit(spec("a"))
    with pytest.raises(ProxyError, match="no file"):
        await ticket.granted()
    assert fleet.loads == ["m"]
    assert empty(admission)


async def test_load_that_is_ready_inside_the_call(make, fleet):
    admission = make()
    fleet.on_load = lambda: admission.backend_ready(KEY, EngineInfo(1, 4096))
    ticket = admission.submit(spec("a"))
    assert (await ticket.granted()).key == KEY


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ProxyError(ErrorCode.WAKE_FAILED, "host asleep"), ErrorCode.WAKE_FAILED),
        (OSError("host asleep"), ErrorCode.MODEL_LOAD_FAILED),
    ],
)
async def test_load_request_that_raises_fails_its_waiters(make, fleet, error, code):
    admission = make()

    def refuse():
        raise error

    fleet.on_load = refuse
    ticket = admission.submit(spec("a"))
    with pytest.raises(ProxyError, match="host asleep") as caught:
        await ticket.granted()
    assert caught.value.code is code


async def test_refusals_raise_from_submit(make, metrics):
    admission = make(slots=1, max_queue=1)
    admission.submit(spec("a"))
    admission.submit(spec("b"))
    with pytest.raises(ProxyError) as caught:
        admission.submit(spec("c"))
    assert caught.value.code is ErrorCode.QUEUE_FULL
    assert 1 <= caught.value.retry_after_s <= 60
    admission.shutdown(ProxyError(ErrorCode.SHUTTING_DOWN, "bye"), cut=True)
    with pytest.raises(ProxyError) as caught:
        admission.submit(spec("d"))
    assert caught.value.code is ErrorCode.SHUTTING_DOWN


async def test_a_repeated_id_gets_its_own_ticket(make):
    admission = make(slots=4)
    first, second = admission.submit(spec("a")), admission.submit(spec("a"))
    assert first.id == "a"
    assert second.id != "a"
    assert (await first.granted()).tag != (await second.granted()).tag


async def test_a_late_release_spares_the_next_owner_of_its_id(make):
    """A retry may carry the id of a ticket that was ended but not yet released."""
    admission = make(slots=1)
    old = admission.submit(spec("a"))
    admission.end_model("m", ProxyError(ErrorCode.MODEL_UNLOADED, "forced"))
    admission.backend_ready(backend(2), EngineInfo(1, 4096))
    new = admission.submit(spec("a"))
    old.first_byte()
    old.release(Outcome.CANCELLED)
    assert new.state is TicketState.GRANTED
    new.release(Outcome.COMPLETED)
    assert empty(admission)


def running(admission, *slots, phase=EnginePhase.GENERATE):
    """A snapshot of a cohort at work: (tag, member) per slot."""
    now = admission.now()
    shown = tuple(
        SlotView(i, True, tag=tag, member=member, cohort=1) for i, (tag, member) in enumerate(slots)
    )
    return Snapshot(KEY, now, now, shown, native=True, phase=phase, sealed=True, cohort=1)


async def recalled_standby(make):
    """One ticket generates, the standby is asked back for a ticket of a higher class."""
    admission = make(slots=1, policy=PhasePolicy.DRAIN)
    first, standby = admission.submit(spec("a")), admission.submit(spec("b"))
    await standby.granted()
    await asyncio.sleep(0.001)
    admission.snapshot(running(admission, ("a.1", MemberState.GENERATE)))
    urgent = admission.submit(spec("c", priority=10))
    await asyncio.wait_for(asyncio.shield(standby.recalled), DEADLINE_S)
    assert not first.recalled.done()
    return admission, first, standby, urgent


async def test_a_recalled_ticket_waits_again_and_is_granted_under_another_tag(make, metrics):
    admission, first, standby, urgent = await recalled_standby(make)
    old = standby.recalled
    standby.requeue()
    assert standby.recalled is not old
    assert not standby.recalled.done()
    waiter = asyncio.create_task(standby.granted())
    assert (standby.state, urgent.state) == (TicketState.QUEUED, TicketState.QUEUED)
    await asyncio.sleep(0.001)
    admission.snapshot(running(admission, ("a.1", MemberState.GENERATE)))
    assert (await asyncio.wait_for(urgent.granted(), DEADLINE_S)).tag == "c.1"
    first.release(Outcome.COMPLETED)
    assert (await asyncio.wait_for(waiter, DEADLINE_S)).tag == "b.1.r1"
    urgent.release(Outcome.COMPLETED)
    standby.release(Outcome.COMPLETED)
    assert sample(metrics, "recalls_total", model="m") == 1
    assert empty(admission)


async def test_commit_voids_a_recall(make, metrics):
    admission, first, standby, urgent = await recalled_standby(make)
    standby.commit()
    standby.requeue()
    assert (await standby.granted()).tag == "b.1"
    for ticket in (first, standby, urgent):
        ticket.release(Outcome.COMPLETED)
    assert sample(metrics, "recalls_total", model="m") == 0
    assert empty(admission)


async def test_a_recalled_ticket_may_just_leave(make):
    admission, first, standby, urgent = await recalled_standby(make)
    standby.release(Outcome.CANCELLED, upstream_open=True)
    standby.requeue()
    first.release(Outcome.COMPLETED)
    await asyncio.sleep(0.001)
    admission.snapshot(idle(admission, 1))
    urgent.release(Outcome.COMPLETED)
    assert empty(admission)


async def test_all_who_wait_may_ask_for_their_places_at_once(make, monkeypatch):
    """Each comment names a place: the line is gone through once for all of them, and again when it changed."""
    gone_through = []
    places = views.places
    monkeypatch.setattr(views, "places", lambda *about: gone_through.append(about) or places(*about))
    admission = make(slots=1)
    tickets = [admission.submit(spec(f"t{number}")) for number in range(20)]
    assert [ticket.position for ticket in tickets] == list(range(20))
    assert len(gone_through) == 1
    tickets[0].release(Outcome.COMPLETED)
    assert [ticket.position for ticket in tickets[1:]] == list(range(19))
    assert len(gone_through) == 2
    for ticket in tickets:
        ticket.release(Outcome.CANCELLED)
    assert empty(admission)


async def test_an_id_is_not_given_again_while_an_engine_holds_a_recalled_grant_of_it(make):
    """A client whose request was recalled leaves and comes back under its own id before the engine let go."""
    admission, first, standby, urgent = await recalled_standby(make)
    standby.requeue()
    standby.release(Outcome.CANCELLED)
    again = admission.submit(spec("b"))
    urgent.release(Outcome.CANCELLED)
    first.release(Outcome.COMPLETED)
    granted = await asyncio.wait_for(again.granted(), DEADLINE_S)
    assert granted.tag not in {"b.1", "a.1", "c.1"}
    again.release(Outcome.COMPLETED)
    await asyncio.sleep(0.001)
    admission.snapshot(idle(admission, 1))
    assert empty(admission)
    assert admission.submit(spec("b")).id == "b"
    admission.end_model("m", ProxyError(ErrorCode.MODEL_UNLOADED, "over"))


async def test_an_ended_ticket_cannot_be_requeued(make):
    admission, first, standby, urgent = await recalled_standby(make)
    admission.cancel("b", ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "enough"))
    standby.requeue()
    with pytest.raises(ProxyError, match="enough"):
        await standby.granted()
    for ticket in (first, standby, urgent):
        ticket.release(Outcome.CANCELLED)
    assert empty(admission)


async def test_reports_settle_the_keys_counter(make):
    admission = make(slots=4)
    ticket = admission.submit(spec("a", key="k", weight=2.0, prompt_bytes=400))
    assert admission.shares()["k"] == pytest.approx(50.0)  # 100 tokens at 4 bytes, by weight 2
    ticket.tokens(10)
    ticket.report(80, 30, 12)
    ticket.report(1, 1, 1)  # only the first counts
    assert admission.shares()["k"] == pytest.approx((50 + 2 * 12) / 2)
    ticket.release(Outcome.COMPLETED)
    ticket.report(9, 9, 9)
    assert empty(admission)


async def test_drained_waits_for_requesters_not_for_waiters(make):
    admission = make(slots=1)
    running, waiting = admission.submit(spec("a")), admission.submit(spec("b"))
    admission.set_gate("m", AdminState.DRAINING)
    assert (admission.busy("m"), admission.busy(), admission.busy("other")) == (1, 1, 0)
    assert await admission.drained("m", timeout=0.001) is False
    assert await admission.drained("other", timeout=0.001) is True
    waiter = asyncio.create_task(admission.drained("m", timeout=DEADLINE_S))
    await spin()
    admission.end_model("m", ProxyError(ErrorCode.MODEL_UNLOADED, "forced"))
    await spin()
    running.release(Outcome.CANCELLED)
    await spin()
    assert not waiter.done()  # the other requester still tells its client
    waiting.release(Outcome.CANCELLED)
    assert await asyncio.wait_for(waiter, DEADLINE_S) is True
    assert admission.busy() == 0


async def test_a_cancelled_drain_leaves_nothing(make):
    admission = make(slots=1)
    admission.submit(spec("a"))
    waiter = asyncio.create_task(admission.drained(timeout=DEADLINE_S))
    await spin()
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert admission._drainers == []


async def test_metrics_tell_the_truth(make, metrics):
    admission = make(slots=1)
    running = admission.submit(spec("run", priority_name="interactive"))
    waiting = admission.submit(spec("a", body_bytes=70))
    wide = admission.submit(spec("w", tasks=9, body_bytes=30))
    assert sample(metrics, "requests_inflight", model="m", state="granted") == 1
    assert sample(metrics, "requests_inflight", model="m", state="queued") == 2
    assert sample(metrics, "queue_size", model="m", priority="normal") == 2
    assert sample(metrics, "queue_size", model="m", priority="interactive") == 0
    assert sample(metrics, "queue_bytes", model="m", priority="normal") == 100
    assert sample(metrics, "queue_oldest_seconds", model="m", priority="normal") > 0
    so_far = sample(metrics, "hold_seconds_total", model="m", reason="no_free_slot")
    assert so_far > 0
    assert sample(metrics, "wide_requests_total", model="m") == 0
    running.release(Outcome.CANCELLED, upstream_open=True)
    assert sample(metrics, "requests_inflight", model="m", state="cancelling") == 1
    await asyncio.sleep(0.001)
    admission.snapshot(idle(admission, 1))
    assert sample(metrics, "hold_seconds_total", model="m", reason="no_free_slot") > so_far
    waiting.release(Outcome.COMPLETED)
    assert sample(metrics, "wide_requests_total", model="m") == 1
    wide.release(Outcome.COMPLETED)
    found = sample(metrics, "queue_wait_seconds_count", model="m", priority="normal", outcome="completed")
    assert found == 2
    found = sample(metrics, "queue_wait_seconds_sum", model="m", priority="normal", outcome="completed")
    assert found > 0
    assert sample(metrics, "requests_inflight", model="m", state="queued") == 0
    assert sample(metrics, "queue_size", model="m", priority="normal") == 0


async def test_keys_have_a_series_each_and_strangers_one(metrics, fleet):
    keys = [ApiKey(name="alice", key="secret-a"), ApiKey(name="bob", key="secret-b")]
    settings = Settings(models={"m": Model(path="/m")}, server=Server(api_keys=keys))
    admission = Admission(settings, metrics, fleet)
    admission.backend_ready(KEY, EngineInfo(4, 4096))
    assert sample(metrics, "key_virtual_counter", key="bob") == 0
    tickets = [
        admission.submit(spec(key, key=key, prompt_bytes=400 * size))
        for size, key in enumerate(("alice", "10.0.0.1", "10.0.0.2"), start=1)
    ]
    assert sample(metrics, "key_virtual_counter", key="alice") == pytest.approx(100)
    assert sample(metrics, "key_virtual_counter", key="other") >= 300
    assert sample(metrics, "key_virtual_counter", key="10.0.0.1") is None
    for ticket in tickets:
        ticket.release(Outcome.COMPLETED)
    admission.close()


async def test_a_load_that_waits_for_others_says_so(make):
    admission = make()
    ticket = admission.submit(spec("a"))
    admission.swap_wait("m", waiting=True)
    assert ticket.reason is Reason.SWAP_WAIT
    admission.swap_wait("m", waiting=False)
    assert ticket.reason is Reason.MODEL_LOADING
    ticket.release(Outcome.CANCELLED)


async def test_mirrored_states_are_seen_by_the_requester(make, metrics):
    admission = make(slots=4, policy=PhasePolicy.DRAIN)
    ticket = admission.submit(spec("a"))
    await ticket.granted()
    now = admission.now()
    slot = SlotView(0, True, tag="a.1", member=MemberState.PAUSED, cohort=5)
    admission.snapshot(Snapshot(KEY, now, now, (slot,), native=True))
    assert (ticket.state, ticket.cohort) == (TicketState.PAUSED, 5)
    assert sample(metrics, "requests_inflight", model="m", state="paused") == 1
    assert admission.tickets()[0].cohort == 5


def test_limits_come_from_the_settings():
    settings = Settings(
        models={"m": Model(path="/m", max_queue=3, budgets=Budgets(load_timeout_s=0))},
        admission=AdmissionSettings(max_queue=0, queue_timeout_s=0, cohort_gather_ms=7),
    )
    limits = limits_of(settings)
    assert (limits.max_queue, limits.queue_timeout_s, limits.gather_ms) == (None, None, 7)
    assert (limits.of("m").max_queue, limits.of("m").load_timeout_s) == (3, None)
    assert limits.of("unknown").max_queue is None
    assert (limits.fair_share, limits.recall, limits.shape, limits.age_after_s) == (True, True, False, 60.0)
    policy = AdmissionSettings(
        fair_share=False,
        recall=False,
        age_after_s=0,
        age_every_grants=3,
        cohort_shape=True,
        cohort_shape_ratio=2,
        cohort_shape_max_wait_s=7,
        fair_decode_weight=5,
    )
    limits = limits_of(Settings(admission=policy))
    assert (limits.fair_share, limits.recall, limits.age_after_s, limits.age_every) == (False, False, None, 3)
    assert (limits.shape, limits.shape_ratio, limits.shape_max_wait_s) == (True, 2.0, 7.0)
    assert limits.fair_decode_weight == 5.0
