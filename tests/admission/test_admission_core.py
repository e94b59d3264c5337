"""Scenarios of the pure core: what happens, and what must come of it. No clocks, no waiting."""

import pytest
from admission_kit import Scene, backend, spec

from proxy.admission.entry import TRANSITIONS, IllegalTransitionError
from proxy.admission.events import Arrived, Committed, Configured, Granted, Load, Poke, Recall, Requeued, Tick
from proxy.admission.records import Limits, LiveTickets, Mirror, ModelLimits, make_tag
from proxy.admission.views import live
from proxy.errors import ErrorCode
from proxy.types import AdminState, EnginePhase, MemberState, Outcome, PhasePolicy, Reason, TicketState

DRAIN = PhasePolicy.DRAIN


def test_first_request_loads_and_is_granted_when_ready():
    s = Scene().arrive("a")
    assert s.loads == 1
    assert s.reason("a") is Reason.MODEL_LOADING
    s.wait(3).ready()
    assert s.granted == ["a"]
    assert s.grant("a").tag == "a.1"
    assert s.held("a") == {Reason.MODEL_LOADING: 3.0}
    s.release("a")
    assert s.outcomes == {"a": Outcome.COMPLETED}
    assert s.state.tickets == {}
    assert s.book.charged == 0


def test_grants_follow_arrival_and_stop_at_the_slots():
    s = Scene()
    for name in "abcdef":
        s.arrive(name)
    s.ready(slots=4)
    assert s.granted == list("abcd")
    assert s.waiting == ["e", "f"]
    assert s.reason("e") is Reason.NO_FREE_SLOT
    s.release("c")
    assert s.granted == list("abcde")
    s.arrive("g").release("a", "b")
    assert s.granted == list("abcdefg")


def test_greater_priority_goes_first_then_arrival():
    s = Scene()
    for name, priority in (("low", -10), ("n1", 0), ("hi", 10), ("n2", 0)):
        s.arrive(name, priority=priority)
    s.ready(slots=1)
    for name in ("hi", "n1", "n2"):
        s.release(name)
    assert s.granted == ["hi", "n1", "n2", "low"]


@pytest.mark.parametrize(("policy", "in_flight"), [("drain", 5), ("yield", 5), ("mixed", 4), ("unknown", 4)])
def test_one_standby_where_cohorts_form(policy, in_flight):
    """Rule 4: slots + 1 in flight under drain and yield, slots otherwise."""
    s = Scene().ready(slots=4, policy=PhasePolicy(policy))
    for index in range(8):
        s.arrive(f"t{index}")
    assert len(s.granted) == in_flight


def test_no_standby_where_it_is_switched_off():
    """`native_standby: false`: nobody waits inside an engine that exactly fills its slots."""
    s = Scene(native_standby=False).ready(slots=4, policy=DRAIN)
    for index in range(8):
        s.arrive(f"t{index}")
    assert len(s.granted) == 4


def test_gather_hint_only_with_followers():
    """A lone request never waits for companions; the last of a burst has none either."""
    s = Scene().ready(slots=2, policy=DRAIN).arrive("lone")
    assert s.grant("lone").gather_ms == 0
    s.release("lone")
    s = Scene()
    for name in "abc":
        s.arrive(name)
    s.ready(slots=4, policy=DRAIN)
    assert [s.grant(name).gather_ms for name in "abc"] == [20, 20, 0]
    s = Scene()
    for name in "abcd":
        s.arrive(name)
    s.ready(slots=2, policy=DRAIN)
    assert [s.grant(name).gather_ms for name in "abc"] == [20, 20, 20]
    s.release("a")
    assert s.grant("d").gather_ms == 0
    s = Scene().arrive("a").arrive("b").ready(slots=4, policy=PhasePolicy.MIXED)
    assert s.grant("a").gather_ms == 0


def test_a_request_without_slots_passes_everybody():
    s = Scene().ready(slots=1).arrive("a").arrive("b").arrive("tokenize", tasks=0)
    assert s.granted == ["a", "tokenize"]
    assert s.book.charged == 1
    s.leave("tokenize")
    assert "tokenize" not in s.state.tickets


def test_n_above_the_slots_is_passed_on_at_once():
    """The engine's own 400 is the answer; it must neither wait nor empty the box."""
    s = Scene().ready(slots=2).arrive("a").arrive("b").arrive("c").arrive("silly", tasks=9, n=9)
    assert s.granted == ["a", "b", "silly"]


def test_several_tasks_are_charged_and_nobody_overtakes():
    s = Scene().ready(slots=4).arrive("a").arrive("b").arrive("three", tasks=3).arrive("c")
    assert s.granted == ["a", "b"]
    assert s.reason("three") is Reason.NO_FREE_SLOT
    s.release("a")
    assert s.granted == ["a", "b", "three"]
    s.release("b")
    assert s.granted == ["a", "b", "three", "c"]


def test_wide_request_runs_alone_and_reserves_after_its_patience():
    s = Scene(wide_patience_s=5.0).ready(slots=2, policy=DRAIN)
    s.arrive("a").arrive("wide", tasks=100).arrive("b").arrive("c").arrive("d")
    assert s.granted == ["a", "b", "c"]  # narrower ones pass at first (with the standby)
    assert s.reason("wide") is Reason.WIDE_REQUEST
    s.wait(4.9).release("a")
    assert s.granted == ["a", "b", "c", "d"]
    s.arrive("e").wait(0.2).release("b")
    assert s.granted == ["a", "b", "c", "d"]  # from now on freed slots are kept for it
    assert s.reason("e") is Reason.WIDE_REQUEST
    s.release("c").release("d")
    assert s.granted[-1] == "wide"
    assert [effect.ticket for effect in s.of(Granted) if effect.wide] == ["wide"]
    s.arrive("f")
    assert s.book.standby == 0
    assert s.waiting == ["e", "f"]
    s.release("wide")
    assert s.granted[-2:] == ["e", "f"]


def test_a_wide_newcomer_of_higher_class_does_not_restart_the_patience_of_another():
    s = Scene(wide_patience_s=5.0).ready(slots=2).arrive("a").arrive("wide", tasks=9).wait(6).arrive("b")
    assert s.granted == ["a"]
    s.arrive("wider", tasks=9, priority=10)
    assert s.granted == ["a"]
    s.release("a")
    assert s.granted == ["a", "wider"]
    s.release("wider")
    assert s.granted == ["a", "wider", "wide"]


def test_patience_ends_without_any_event_but_the_timer():
    s = Scene(wide_patience_s=5.0).ready(slots=2).arrive("a").arrive("wide", tasks=9)
    s.wait(6)
    s.arrive("b")
    assert s.granted == ["a"]


@pytest.mark.parametrize(
    ("tasks", "strangers"), [(9, 1), (4, 1), (3, 2)], ids=["wide", "all slots", "some slots"]
)
def test_nobody_is_held_back_for_one_that_strangers_keep_out(tasks, strangers):
    """Other people's work may stay for ever: places kept free for whom that keeps out would serve nobody."""
    s = Scene(queue_timeout_s=600.0).ready(slots=4)
    others = [f"x{index}" for index in range(strangers)]
    s.see(*others).wait(1).see(*others).arrive("big", tasks=tasks).arrive("a")
    for round_ in range(20):
        s.wait(1).see(*others, f"{'a' if round_ < 10 else 'b'}.1")
        if round_ == 10:
            s.release("a").arrive("b")
    assert s.granted == ["a", "b"]
    assert s.reason("big") is (Reason.WIDE_REQUEST if tasks == 9 else Reason.NO_FREE_SLOT)
    # the strangers leave, and from now on its turn is kept
    s.see("b.1").arrive("c")
    if tasks == 3:
        assert s.granted[2:] == ["big"]
    else:
        assert s.granted == ["a", "b"]
        s.release("b")
        assert s.granted == ["a", "b", "big"]


def test_a_client_that_leaves_the_queue_is_gone_at_once():
    s = Scene().arrive("a").arrive("b").leave("a")
    assert s.outcomes == {"a": Outcome.CANCELLED}
    assert s.waiting == ["b"]
    s.ready(slots=1)
    assert s.granted == ["b"]


def test_a_cancelled_grant_stays_charged_until_seen_gone():
    s = Scene().ready(slots=1).arrive("a").arrive("b").wait(1).leave("a")
    assert s.ticket_state("a") is TicketState.CANCELLING
    assert s.outcomes == {"a": Outcome.CANCELLED}
    assert s.granted == ["a"]
    asked = s.now - 0.05
    s.wait(0.1).see(total=1, asked=asked)  # asked before the client left: proves nothing
    assert s.granted == ["a"]
    s.see("a.1", total=1)
    assert s.granted == ["a"]
    s.wait(0.1).see(total=1)
    assert s.granted == ["a", "b"]
    assert "a" not in s.state.tickets


def test_release_while_the_engine_is_done_frees_at_once():
    s = Scene().ready(slots=1).arrive("a").arrive("b").release("a")
    assert s.granted == ["a", "b"]


def test_foreign_work_takes_capacity_but_our_own_endings_do_not():
    s = Scene().ready(slots=2).arrive("a").wait(1).see("a.1", "someone-else", total=2)
    assert s.book.foreign == 1
    s.arrive("b")
    assert s.granted == ["a"]
    s.wait(1).see("a.1", total=2)
    assert s.granted == ["a", "b"]
    asked = s.now
    s.wait(0.01).release("a").see("a.1", "b.1", total=2, asked=asked)
    assert s.book.foreign == 0  # it ended after the snapshot was asked


def test_a_mismatch_is_reported_when_it_lasts():
    """One snapshot that still shows an answer just given is no mismatch, two of the same are."""
    s = Scene().ready(slots=4).see("x").see()
    assert s.mismatches == []
    s.see("x").wait(0.1).see("x")
    assert s.mismatches == [1]
    s.wait(0.1).see("x")
    assert s.mismatches == [1]


def test_stock_engine_charges_cancels_by_number():
    """Busy slots beyond what live grants account for are charged to the cancelled, no more."""
    s = Scene().ready(slots=4).arrive("a").arrive("b").arrive("c").wait(1).leave("a", "b")
    asked = s.now - 0.05
    s.wait(0.1).see("", native=False, asked=asked)
    assert s.book.cancelling == 2
    s.see("", "", "", native=False)
    assert s.book.cancelling == 2
    s.wait(0.1).see("", "", native=False)
    assert s.book.cancelling == 1
    assert s.ticket_state("b") is TicketState.CANCELLING
    s.wait(0.1).see("", native=False)
    assert s.book.cancelling == 0


def test_stock_engine_with_foreign_work_never_locks_up():
    """Four cancelled grants on an engine whose one slot somebody else keeps busy: three slots serve."""
    s = Scene().ready(slots=4)
    for name in "abcd":
        s.arrive(name)
    s.wait(1).leave("a", "b", "c", "d").wait(0.1).see("", native=False)
    assert s.book.charged == 1
    for name in "efgh":
        s.arrive(name)
    assert s.granted == list("abcdefg")


def test_stock_engine_cuts_a_wide_cancel_down():
    s = Scene().ready(slots=4).arrive("wide", tasks=9).wait(1).leave("wide")
    s.wait(0.1).see("", native=False).arrive("a")
    assert s.book.charged == 2
    assert s.granted == ["wide", "a"]


def test_stale_mirror_serves_on_without_trusting_it():
    """Rule 6: a dark mirror slows down, it never stops."""
    s = Scene(stale_after_s=3.0).ready(slots=2, policy=DRAIN).see("x", "y", total=2)
    s.arrive("a").arrive("b")
    assert s.granted == ["a"]  # the standby
    s.wait(2.9)
    assert s.granted == ["a"]
    s.wait(0.2)
    assert s.book.mirror is Mirror.STALE
    assert s.granted == ["a", "b"]
    s.leave("a", "b").arrive("c").arrive("d")
    assert s.granted == ["a", "b", "c"]
    s.release("c")
    assert s.granted == ["a", "b", "c", "d"]
    s.wait(10).see("d.1", total=2)
    assert s.book.cancelling == 0


def test_engine_that_never_shows_its_slots_keeps_no_cancelled_charge():
    s = Scene(stale_after_s=3.0).ready(slots=1).arrive("a").arrive("b").leave("a")
    assert s.granted == ["a"]
    s.wait(2.9)
    assert s.granted == ["a"]
    s.wait(0.2)
    assert s.granted == ["a", "b"]
    s.arrive("c").leave("b")
    assert s.granted == ["a", "b", "c"]


def test_snapshots_out_of_order_do_not_go_back():
    s = Scene().ready(slots=4).wait(1).see("x")
    s.see("y", "z", asked=s.now - 0.5)
    assert s.book.foreign == 1


def test_member_states_are_mirrored():
    s = Scene().ready(slots=4, policy=DRAIN).arrive("a").arrive("b").wait(1)
    walk = [
        (MemberState.QUEUED, TicketState.NATIVE_QUEUED, Reason.COHORT_SEALED),
        (MemberState.PREFILL, TicketState.PREFILL, None),
        (MemberState.READY, TicketState.READY, None),
        (MemberState.GENERATE, TicketState.GENERATING, None),
        (MemberState.PAUSED, TicketState.PAUSED, None),
        (MemberState.GENERATE, TicketState.GENERATING, None),
    ]
    for member, state, reason in walk:
        s.wait(1).see(("a.1", member, 7))
        assert (s.ticket_state("a"), s.reason("a")) == (state, reason)
        assert s.ticket("a").cohort == 7
        assert s.ticket_state("b") is TicketState.GRANTED
    s.wait(1).see()
    assert s.ticket_state("a") is TicketState.GENERATING
    assert s.held("a") == {Reason.COHORT_SEALED: 1.0}


def test_several_tasks_show_the_most_advanced():
    s = Scene().ready(slots=4).arrive("a", tasks=3).wait(1)
    s.see(("a.1", MemberState.READY), ("a.1", MemberState.GENERATE), ("a.1", MemberState.QUEUED))
    assert s.ticket_state("a") is TicketState.GENERATING


def test_first_byte_is_newer_than_a_snapshot_on_its_way():
    s = Scene().ready(slots=4).arrive("a").wait(1)
    asked = s.now
    s.wait(0.05).first_byte("a").see(("a.1", MemberState.READY), asked=asked)
    assert s.ticket_state("a") is TicketState.GENERATING


def test_open_cohort_is_named_in_the_grant():
    s = Scene().ready(slots=4, policy=DRAIN).see(phase=EnginePhase.PREFILL_OPEN, cohort=3).arrive("a")
    assert s.grant("a").cohort == 3
    s.see(phase=EnginePhase.GENERATE, cohort=3).arrive("b")
    assert s.grant("b").cohort is None


def test_dead_backend_ends_what_ran_and_reloads_for_who_waits():
    s = Scene().ready(slots=1).arrive("a").arrive("b").down()
    assert s.ended == {"a": ErrorCode.UPSTREAM_ERROR}
    assert s.outcomes == {"a": Outcome.FAILED}
    assert s.reason("b") is Reason.BACKEND_DOWN
    assert s.loads == 1
    s.ready(key=backend(2))
    assert s.grant("b").tag == "b.2"
    s.release("a")
    assert s.book.charged == 1


def test_old_generations_change_nothing():
    s = Scene().ready(key=backend(1)).arrive("a").ready(key=backend(2))
    assert s.ended == {"a": ErrorCode.UPSTREAM_ERROR}
    s.arrive("b")
    s.down(key=backend(1)).ready(key=backend(1)).see("q", "r", key=backend(1)).release("a")
    assert [view.key for view in s.view.backends] == [backend(2)]
    assert s.book.foreign == 0
    assert s.book.charged == 1
    assert s.grant("b").key == backend(2)


def test_dead_backend_clears_cancelling_grants():
    s = Scene().ready(slots=1).arrive("a").leave("a").down()
    assert s.state.tickets == {}
    assert s.outcomes == {"a": Outcome.CANCELLED}
    assert s.ended == {}


def test_failed_load_fails_its_waiters_and_the_next_tries_again():
    s = Scene().arrive("a").arrive("t", tasks=0).load_failed()
    assert s.ended == {"a": ErrorCode.MODEL_LOAD_FAILED, "t": ErrorCode.MODEL_LOAD_FAILED}
    assert s.error("a").message == "no such file"
    before = s.loads
    s.arrive("b")
    assert s.loads == before + 1


def test_failed_load_spares_those_whom_a_gate_holds():
    s = Scene().arrive("a").gate().load_failed()
    assert s.ended == {}
    s.gate(AdminState.ENABLED)
    assert s.of(Load, s.effects)


def test_gate_holds_then_times_out():
    s = Scene(gate_hold_max_s=10.0).ready(slots=1).gate(reason="driver update").arrive("a")
    assert s.reason("a") is Reason.GATE_BLOCKED
    assert s.granted == []
    s.wait(9.9)
    assert s.ended == {}
    s.wait(0.2)
    assert s.ended == {"a": ErrorCode.GATE_HOLD_TIMEOUT}
    assert s.outcomes == {"a": Outcome.EXPIRED}
    s.arrive("b").gate(AdminState.ENABLED)
    assert s.granted == ["b"]


def test_gate_rejects_newcomers_and_waiters_but_not_what_runs():
    s = Scene().ready(slots=1).arrive("run").arrive("wait").gate(mode="reject").arrive("new")
    assert s.ended == {"wait": ErrorCode.GATE_BLOCKED, "new": ErrorCode.GATE_BLOCKED}
    assert "maintenance" in s.error("new").message
    assert 1 <= s.error("new").retry_after_s <= 60
    assert s.ticket_state("run") is TicketState.GRANTED
    s.gate(AdminState.DRAINING, mode="reject").arrive("later")
    assert s.ended["later"] is ErrorCode.MODEL_DRAINING


def test_draining_holds_without_loading():
    s = Scene().ready(slots=1).arrive("a").gate(AdminState.DRAINING).arrive("b")
    assert s.reason("b") is Reason.MODEL_DRAINING
    s.release("a").down()
    assert s.loads == 0
    s.gate(AdminState.ENABLED)
    assert s.loads == 1


def test_budgets_count_their_own_waits_only():
    """Waiting for a load or a gate does not eat the queue's time, and the other way round."""
    limits = {"m": ModelLimits(load_timeout_s=20.0)}
    s = Scene(queue_timeout_s=10.0, gate_hold_max_s=30.0, models=limits).arrive("a").arrive("b").wait(19)
    s.ready(slots=1).wait(5).gate().wait(29).gate(AdminState.ENABLED).wait(4.9)
    assert s.ended == {}
    s.wait(0.2)
    assert s.ended == {"b": ErrorCode.QUEUE_TIMEOUT}
    assert 1 <= s.error("b").retry_after_s <= 60
    assert s.ticket_state("a") is TicketState.GRANTED
    held = s.held("b")
    assert held[Reason.MODEL_LOADING] == pytest.approx(19)
    assert held[Reason.NO_FREE_SLOT] == pytest.approx(10)
    assert held[Reason.GATE_BLOCKED] == pytest.approx(29)


def test_new_limits_apply_to_those_who_wait():
    s = Scene(queue_timeout_s=10.0).ready(slots=1).arrive("a").arrive("b").wait(5)
    s.post(Configured(Limits(queue_timeout_s=6.0))) and s.wait(0.9)
    assert s.ended == {}
    s.wait(0.2)
    assert s.ended == {"b": ErrorCode.QUEUE_TIMEOUT}


@pytest.mark.parametrize("budget", ["queue", "load", "gate"])
def test_limits_below_what_was_waited_end_the_wait_at_once(budget):
    """A reload may make a deadline one that is past: no timer could ever reach it."""
    off = {"queue_timeout_s": None, "gate_hold_max_s": None, "models": {"m": ModelLimits()}}
    s = Scene(**off)
    if budget == "gate":
        s.gate()
    if budget == "queue":
        s.ready(slots=1).arrive("holds")
    s.arrive("a").wait(50)
    given, code = {
        "queue": ({"queue_timeout_s": 40.0}, ErrorCode.QUEUE_TIMEOUT),
        "load": ({"models": {"m": ModelLimits(load_timeout_s=40.0)}}, ErrorCode.LOAD_TIMEOUT),
        "gate": ({"gate_hold_max_s": 40.0}, ErrorCode.GATE_HOLD_TIMEOUT),
    }[budget]
    s.post(Configured(Limits(**{**off, **given})))
    assert s.ended == {"a": code}
    assert "(40 s)" in s.error("a").message


def test_a_budget_that_a_reload_overdrew_ends_a_wait_when_it_runs_again():
    """The limit fell while another clock ran; once its own runs again there is nothing left of it."""
    s = Scene(queue_timeout_s=60.0).ready(slots=1).arrive("holds").arrive("a").wait(50).gate()
    s.post(Configured(Limits(queue_timeout_s=40.0)))
    assert s.ended == {}
    s.gate(AdminState.ENABLED)
    assert s.ended == {"a": ErrorCode.QUEUE_TIMEOUT}


def test_a_deadline_that_passed_in_the_dark_counts_once_the_mirror_is_back():
    """Nobody saw what became of it; if it still only waits, its time is over, and no timer is ahead of it."""
    s = Scene(queue_timeout_s=10.0).ready(slots=1, policy=DRAIN).arrive("a").arrive("b").arrive("c")
    waits = (("a.1", MemberState.GENERATE), ("b.1", MemberState.QUEUED))
    s.release("c").see(*waits, total=2).wait(1).see(*waits, total=2)
    assert s.ticket_state("b") is TicketState.NATIVE_QUEUED
    s.wait(20)
    assert s.ended == {}
    s.see(*waits, total=2)
    assert s.ended == {"b": ErrorCode.QUEUE_TIMEOUT}
    assert s.ticket_state("b") is TicketState.CANCELLING


def test_who_is_recalled_after_its_deadline_in_the_dark_does_not_wait_again():
    s = Scene(queue_timeout_s=10.0, age_after_s=None).ready(slots=2, policy=DRAIN).arrive("a").arrive("b")
    shown = (("a.1", MemberState.GENERATE), ("b.1", MemberState.GENERATE), ("c.1", MemberState.QUEUED))
    s.arrive("c").wait(1).see(*shown, total=3, phase=EnginePhase.GENERATE)
    s.arrive("d", priority=10)
    assert [effect.ticket for effect in s.of(Recall)] == ["c"]
    s.wait(12)
    s.post(Requeued("c"))
    assert s.ended["c"] is ErrorCode.QUEUE_TIMEOUT
    assert s.state.tickets.get("c") is None


def test_a_reload_that_ends_the_patience_with_a_mirror_frees_what_it_held():
    """An engine that never shows its slots: what can never be confirmed is dropped as soon as that is clear."""
    s = Scene(stale_after_s=60.0, queue_timeout_s=None).ready(slots=1).arrive("a").leave("a").arrive("b")
    s.wait(10)
    assert s.reason("b") is Reason.NO_FREE_SLOT
    s.post(Configured(Limits(stale_after_s=3.0, queue_timeout_s=None)))
    assert s.granted == ["a", "b"]


def test_load_budget():
    s = Scene(models={"m": ModelLimits(load_timeout_s=20.0)}).arrive("a").wait(20)
    assert s.ended == {"a": ErrorCode.LOAD_TIMEOUT}


def test_budgets_that_are_off_never_end_a_wait():
    s = Scene(queue_timeout_s=None, gate_hold_max_s=None, models={}).arrive("a").wait(1e6).ready(slots=1)
    s.arrive("b").wait(1e6).gate().wait(1e6)
    assert s.ended == {}


def test_queue_time_goes_on_in_the_engines_queue():
    """queue_timeout_s covers proxy queue, native queue and barrier."""
    s = Scene(queue_timeout_s=10.0, stale_after_s=100.0).ready(slots=1, policy=DRAIN)
    s.arrive("a").arrive("b").arrive("c").wait(4).release("a").see(("c.1", MemberState.QUEUED))
    s.wait(1).see(("b.1", MemberState.GENERATE), ("c.1", MemberState.QUEUED), total=2)
    assert s.ticket_state("c") is TicketState.NATIVE_QUEUED
    s.wait(6.5)
    assert s.ended == {"c": ErrorCode.QUEUE_TIMEOUT}
    assert s.ticket_state("c") is TicketState.CANCELLING
    assert s.book.charged == 2
    s.leave("c").wait(1).see("b.1")
    assert s.book.charged == 1
    assert s.outcomes["c"] is Outcome.EXPIRED


@pytest.mark.parametrize(
    ("policy", "reason"), [(DRAIN, Reason.COHORT_SEALED), (PhasePolicy.MIXED, Reason.NO_FREE_SLOT)]
)
def test_who_waits_for_a_slot_in_the_engine_says_so_and_has_a_deadline(policy, reason):
    """A standby, or one that came beside a stranger, has no slot: every slot is another's."""
    s = Scene(queue_timeout_s=10.0, stale_after_s=100.0).ready(slots=1, policy=policy)
    s.arrive("a")
    if policy is PhasePolicy.MIXED:
        s.release("a")
    s.arrive("b").wait(0.1)
    assert (s.ticket_state("b"), s.reason("b")) == (TicketState.GRANTED, None)
    s.see(("a.1", MemberState.GENERATE), total=1)
    assert (s.ticket_state("b"), s.reason("b")) == (TicketState.NATIVE_QUEUED, reason)
    s.wait(9.8).see(("a.1", MemberState.GENERATE), total=1)
    assert s.ended == {}
    s.wait(0.3)
    assert s.ended == {"b": ErrorCode.QUEUE_TIMEOUT}
    assert s.held("b")[reason] == pytest.approx(10.0)


@pytest.mark.parametrize("how", ["on its way", "answered", "stock", "no slot taken"])
def test_who_has_no_slot_and_does_not_wait_for_one_stays_granted(how):
    s = Scene().ready(slots=1, policy=DRAIN).arrive("a").arrive("b", tasks=0 if how == "no slot taken" else 1)
    asked = s.now
    s.wait(0.1)
    if how == "answered":
        s.post(Committed("b"))
    s.see("a.1", total=1, native=how != "stock", asked=asked - 0.1 if how == "on its way" else None)
    assert s.ticket_state("b") is TicketState.GRANTED


def test_bounds_of_the_queue():
    s = Scene(max_queue=2).ready(slots=1).arrive("run").arrive("a").arrive("b").arrive("c")
    assert s.ended == {"c": ErrorCode.QUEUE_FULL}
    assert s.outcomes == {"c": Outcome.REJECTED}
    s = Scene(max_queue=9, models={"m": ModelLimits(max_queue=1)}).ready(slots=1)
    s.arrive("run").arrive("a").arrive("b")
    assert s.ended == {"b": ErrorCode.QUEUE_FULL}
    assert "models.m.max_queue" in s.error("b").message


def test_bound_per_key_spans_models():
    s = Scene().ready(slots=1).arrive("run", key="x", max_queue=1).arrive("a", key="x", max_queue=1)
    s.arrive("b", key="x", max_queue=1, model="other").arrive("c", key="y", max_queue=1)
    assert s.ended == {"b": ErrorCode.KEY_QUEUE_FULL}


def test_bound_on_waiting_bytes():
    s = Scene(max_queued_bytes=100).ready(slots=1).arrive("run", body_bytes=500).arrive("a", body_bytes=60)
    s.arrive("b", body_bytes=60).arrive("c", body_bytes=40)
    assert s.ended == {"b": ErrorCode.QUEUE_FULL}
    assert s.view.queued_bytes == 100


def test_a_refused_newcomer_leaves_nobody_blocked():
    """A newcomer of higher class that does not fit is refused; whoever fits behind it still goes."""
    s = (
        Scene(max_queue=1, stale_after_s=3.0)
        .ready(slots=4)
        .arrive("run")
        .see("run.1", "x", "y", "z")
        .arrive("a")
    )
    assert s.granted == ["run"]
    s.now += 3.0  # the mirror goes dark in the very step in which the newcomer comes
    s.arrive("big", tasks=4, priority=10)
    assert s.ended == {"big": ErrorCode.QUEUE_FULL}
    assert s.granted == ["run", "a"]


def test_refusals_hand_out_distinct_times():
    s = Scene(max_queue=1).ready(slots=1).arrive("run").arrive("a")
    for index in range(60):
        s.arrive(f"x{index}")
    times = [s.error(f"x{index}").retry_after_s for index in range(60)]
    assert len({round(at, 2) for at in times}) == 60
    assert all(1 <= at <= 60 for at in times)


def test_reads_never_load():
    s = Scene().arrive("props", tasks=0, may_load=False)
    assert s.ended == {"props": ErrorCode.NO_BACKEND}
    assert s.loads == 0
    s.ready().arrive("again", tasks=0, may_load=False)
    assert s.granted == ["again"]


def test_force_unload_ends_everything_at_once():
    s = Scene().ready(slots=1).arrive("run").arrive("wait").arrive("left", tasks=0).end_model()
    assert set(s.ended) == {"run", "wait", "left"}
    assert set(s.ended.values()) == {ErrorCode.MODEL_UNLOADED}
    assert set(s.outcomes.values()) == {Outcome.CANCELLED}
    assert s.state.tickets == {}
    assert s.view.backends == ()
    s.release("run", "wait").ready(key=backend(1))
    assert s.view.backends == ()  # that generation is dead to us
    s.arrive("next")
    assert s.loads == 1


def test_operator_cancels_in_every_place():
    s = Scene().ready(slots=1).arrive("run").arrive("wait").cancel("wait").cancel("run").cancel("ghost")
    assert s.ended == dict.fromkeys(("wait", "run"), ErrorCode.CANCELLED_BY_OPERATOR)
    assert s.ticket_state("run") is TicketState.CANCELLING
    s.wait(1).see()  # not released yet: its requester may still be writing
    assert s.book.charged == 1
    s.leave("run").wait(1).see()
    assert s.state.tickets == {}
    assert set(s.outcomes.values()) == {Outcome.CANCELLED}


def test_shutdown_in_two_steps():
    s = Scene().ready(slots=1).arrive("run").arrive("wait").shut_down().arrive("new")
    assert s.ended == {"wait": ErrorCode.SHUTTING_DOWN, "new": ErrorCode.SHUTTING_DOWN}
    assert s.outcomes["new"] is Outcome.REJECTED
    s.shut_down(cut=True)
    assert s.ended["run"] is ErrorCode.SHUTTING_DOWN
    s.release("run")
    assert s.state.tickets == {}


def test_dropped_model_lets_what_runs_finish_and_is_forgotten():
    s = Scene().ready(slots=1).arrive("run").arrive("wait").drop_model()
    assert s.ended == {"wait": ErrorCode.MODEL_NOT_FOUND}
    s.release("run").down()
    assert s.state.rooms == {}


def test_a_draining_backend_gets_nothing_new():
    """What runs there goes on; who waits goes elsewhere, waits, or is taken when it no longer drains."""
    one, two = backend(1, "one"), backend(1, "two")
    s = Scene().ready(slots=2, key=one).ready(slots=2, key=two).arrive("a").arrive("b")
    assert {s.grant("a").key, s.grant("b").key} == {one, two}
    here, there = ("a", "b") if s.grant("a").key == one else ("b", "a")
    s.drain(one).arrive("c").arrive("d").arrive("zero", tasks=0)
    assert s.grant("c").key == s.grant("zero").key == two
    assert s.waiting == ["d"] and s.reason("d") is Reason.NO_FREE_SLOT and s.view.free == 0
    s.drain(backend(2, "one"), draining=False)
    assert s.waiting == ["d"], "of another generation"
    s.release(here)
    assert s.outcomes[here] is Outcome.COMPLETED and s.waiting == ["d"]
    s.drain(one, draining=False)
    assert s.grant("d").key == one
    s.release(there, "c", "d").drain(one).drain(two).arrive("e").arrive("wide", tasks=9)
    assert s.waiting == ["e", "wide"] and s.reason("wide") is Reason.NO_FREE_SLOT and s.loads == 0


def test_a_backend_that_is_not_seen_any_more_comes_last():
    """It may be dead: idle as it is, it gets a request only when the one that is seen has no room."""
    one, two = backend(1, "one"), backend(1, "two")
    s = Scene(stale_after_s=3.0).ready(slots=2, key=one).ready(slots=2, key=two).see(key=one, total=2)
    s.see(key=two, total=2).wait(4).see(key=two, total=2)
    for name in "abc":
        s.arrive(name)
    assert [s.grant(name).key for name in "abc"] == [two, two, one]


def test_several_backends_share_the_queue():
    s = Scene().ready(slots=1, key=backend(1, "x")).ready(slots=2, key=backend(1, "y"))
    for name in "abcd":
        s.arrive(name)
    assert [s.grant(name).key.backend for name in "abc"] == ["y", "x", "y"]
    s.down(key=backend(1, "y"))
    assert set(s.ended) == {"a", "c"}
    assert s.loads == 0
    s.release("b")
    assert s.grant("d").key.backend == "x"


def test_who_is_there_in_short():
    """Of one model or of all; an engine may still work for whom a recall brought back."""
    s = Scene(age_after_s=None).ready(slots=1, policy=DRAIN).arrive("a").arrive("b").wait(0.1)
    s.see(("a.1", MemberState.GENERATE), total=1, phase=EnginePhase.GENERATE).arrive("c", priority=10)
    s.post(Requeued("b"))
    s.arrive("other", model="o").leave("a")
    assert live(s.state, "m") == LiveTickets(("b", "c"), (), ("a",), frozenset({"a.1", "b.1"}))
    assert live(s.state) == LiveTickets(("b", "c", "other"), (), ("a",), frozenset({"a.1", "b.1"}))
    s.wait(0.1).see(total=1)
    assert live(s.state, "m") == LiveTickets((), ("b", "c"), (), frozenset({"b.1.r1", "c.1"}))


def test_releases_count_once():
    s = Scene().ready(slots=2).arrive("a").arrive("b").release("a", "a", "a").leave("b", "b").release("b")
    assert s.outcomes == {"a": Outcome.COMPLETED, "b": Outcome.CANCELLED}
    assert s.book.cancelling == 1


def test_own_grants_ask_for_a_fresh_look():
    s = Scene().ready(slots=4).arrive("a")
    assert s.of(Poke, s.effects)
    s.arrive("t", tasks=0)
    assert not s.of(Poke, s.effects)
    s.leave("a")
    assert s.of(Poke, s.effects)


def test_an_early_tick_changes_nothing():
    s = Scene(queue_timeout_s=10).ready(slots=1).arrive("a").arrive("b")
    timer = s.state.timer
    s.now += 0.5
    s.post(Tick())
    assert s.state.timer == timer
    assert s.effects == []


def test_a_live_id_cannot_arrive_twice():
    s = Scene().arrive("a")
    with pytest.raises(ValueError, match="already here"):
        s.post(Arrived(spec("a")))
    assert s.waiting == ["a"]


def test_transition_table():
    """Done is final, every state leads there, and only what an engine has can be recalled into the queue."""
    assert set(TRANSITIONS) == set(TicketState)
    assert TRANSITIONS[TicketState.DONE] == frozenset()
    for state, leads in TRANSITIONS.items():
        if state is not TicketState.DONE:
            assert TicketState.DONE in leads
        ended = state in {TicketState.QUEUED, TicketState.CANCELLING, TicketState.DONE}
        assert (TicketState.QUEUED in leads) is not ended


def test_illegal_transition_changes_nothing():
    from proxy.admission.life import move

    s = Scene().arrive("a")
    entry = s.state.tickets["a"]
    with pytest.raises(IllegalTransitionError):
        move(entry, TicketState.PAUSED, None, s.now)
    assert (entry.state, entry.reason) == (TicketState.QUEUED, Reason.MODEL_LOADING)


@pytest.mark.parametrize("ticket", ["a b", "x" * 70, "ü", "", "a\n"])
def test_tags_always_fit_the_engine(ticket):
    tag = make_tag(ticket, 12)
    assert len(tag) <= 64
    assert tag.endswith(".12")
    assert set(tag) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-_ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert make_tag("ok-1", 3) == "ok-1.3"
