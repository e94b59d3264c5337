"""The policy in scenarios: classes, shares, ageing, recall, shape, estimates, backends, reasons, promises."""

import pytest
from admission_kit import MODEL, Scene, backend

from proxy.admission.events import Committed, Recall, Reported, Requeued, SwapWait
from proxy.admission.records import make_tag
from proxy.errors import ErrorCode
from proxy.types import AdminState, EnginePhase, MemberState, Outcome, PhasePolicy, Reason, TicketState

DRAIN = PhasePolicy.DRAIN
GENERATE = EnginePhase.GENERATE
BIG = 4000  # bytes of a prompt: about 1,000 tokens
SMALL = 400


def recalls(s):
    return [effect.ticket for effect in s.of(Recall)]


def counter(s, key, priority=0):
    return s.state.rooms[MODEL].shares.shares[priority].accounts[key].counter


# --- shares -----------------------------------------------------------------------------------------


def test_the_key_with_less_service_goes_first():
    s = Scene().ready(slots=1).arrive("run", key="a", prompt_bytes=BIG)
    s.arrive("a1", key="a").arrive("a2", key="a").arrive("b1", key="b", prompt_bytes=SMALL)
    s.arrive("c1", key="c", prompt_bytes=SMALL)
    assert counter(s, "a") == pytest.approx(1000)
    assert s.reason("a1") is Reason.NO_FREE_SLOT  # everybody was lifted to a's counter: arrival decides
    s.release("run")
    assert s.granted == ["run", "a1"]
    s.state.tickets["a1"].tokens = 50
    s.arrive("a3", key="a")
    assert s.waiting[:2] == ["b1", "c1"]
    assert s.reason("a2") is Reason.FAIRNESS
    s.release("a1")
    assert s.granted[-1] == "b1"


def test_weights_divide_what_is_charged():
    s = Scene().ready(slots=2)
    s.arrive("a", key="a", weight=1.0, prompt_bytes=BIG).arrive("b", key="b", weight=4.0, prompt_bytes=BIG)
    assert counter(s, "a") - counter(s, "b") == pytest.approx(750)


def test_a_key_that_returns_neither_owes_nor_saved_up():
    s = Scene().ready(slots=1).arrive("new0", key="new").release("new0")
    for index in range(20):
        s.arrive(f"old{index}", key="old", prompt_bytes=BIG)
    for index in range(10):
        s.release(f"old{index}")
    s.arrive("new1", key="new")
    s.release("old10")
    granted = s.granted[-1]
    assert granted in {"new1", "old11"}
    assert counter(s, "new") >= counter(s, "old") - 1000.1, "twenty quiet rounds gave no credit"


def test_the_report_settles_and_teaches():
    """Estimates start at 4 bytes a token and follow what the engine counted; caches are not charged."""
    s = Scene().ready(slots=4).arrive("a", key="a", prompt_bytes=BIG)
    assert s.ticket("a").estimate_tokens == 1000
    s.state.tickets["a"].tokens = 10
    s.post(Reported("a", 2000, 500, 30))
    assert counter(s, "a") == pytest.approx(1500 + 2 * 30)
    s.post(Reported("a", 9, 9, 9))
    assert counter(s, "a") == pytest.approx(1560)
    s.release("a").arrive("b", key="b", prompt_bytes=BIG)
    assert 1800 < s.ticket("b").estimate_tokens < 2000


def test_a_cancel_before_the_engine_began_is_refunded():
    s = Scene().ready(slots=1, policy=DRAIN).see(total=1).arrive("a", key="a")
    s.arrive("b", key="b", prompt_bytes=BIG).wait(0.1)
    s.see(("a.1", MemberState.GENERATE), total=1, phase=GENERATE)
    before = counter(s, "b")
    s.leave("b")
    assert before - counter(s, "b") == pytest.approx(1000)
    at_work = counter(s, "a")
    s.leave("a")
    assert counter(s, "a") == at_work


@pytest.mark.parametrize("how", ["release", "leave", "down", "cancel"])
def test_an_answer_that_was_cut_is_charged_though_nobody_waits(how):
    """Its usage never came, and no decision charged it on the way: the key had the tokens all the same."""
    s = Scene(fair_decode_weight=2.0).ready(slots=1).arrive("a", key="k1", prompt_bytes=40)
    account = s.state.tickets["a"].account
    prompt = account.counter
    s.see("a.1", total=1).first_byte("a")
    s.state.tickets["a"].tokens += 700
    match how:
        case "release":
            s.release("a", outcome=Outcome.FAILED)
        case "leave":
            s.leave("a").wait(0.1).see(total=1)
        case "down":
            s.down()
        case "cancel":
            s.cancel("a").leave("a").wait(0.1).see(total=1)
    assert s.state.tickets == {}
    assert account.counter == prompt + 1400


def test_a_count_of_the_engine_is_the_last_word():
    """Tokens counted on the way to the client may differ: a decision after the report charges nothing anew."""
    s = Scene(fair_decode_weight=2.0).ready(slots=1).arrive("a", key="k1", prompt_bytes=40)
    account = s.state.tickets["a"].account
    s.see("a.1", total=1).first_byte("a")
    s.state.tickets["a"].tokens += 700
    s.post(Reported("a", 10, 0, 650))
    s.leave("a").arrive("b", key="k2")
    assert account.counter == 10 + 1300
    s.wait(0.1).see(total=1)
    assert account.counter == 10 + 1300


def test_what_an_engine_has_of_a_conversation_is_not_charged_again():
    s = Scene().ready(slots=4).arrive("a", prompt_bytes=BIG, prefix=(b"1", b"2"))
    s.post(Reported("a", 1000, 0, 50))
    s.release("a").arrive("b", prompt_bytes=BIG + 400, prefix=(b"1", b"2", b"3"))
    assert 80 <= s.ticket("b").estimate_tokens <= 120


def test_position_is_the_order_of_the_policy():
    s = Scene().ready(slots=1).arrive("run", key="x", prompt_bytes=BIG)
    for index in range(3):
        s.arrive(f"a{index}", key="a", prompt_bytes=BIG)
    s.arrive("b0", key="b", prompt_bytes=BIG).arrive("top", key="c", priority=10)
    assert s.waiting == ["top", "a0", "b0", "a1", "a2"]


def test_arrival_order_where_shares_are_off():
    s = Scene(fair_share=False).ready(slots=1).arrive("run")
    for name, key in (("a", "a"), ("b", "a"), ("c", "c")):
        s.arrive(name, key=key, prompt_bytes=BIG)
    s.release("run").release("a").release("b")
    assert s.granted == ["run", "a", "b", "c"]


# --- ageing -----------------------------------------------------------------------------------------


def test_age_bounds_the_wait_of_the_lowest_class():
    """However many of a higher class come: every third grant is for whoever waits longest."""
    s = Scene(age_after_s=30.0, age_every=3).ready(slots=1).arrive("run").arrive("low", priority=-10)
    s.wait(31)
    for index in range(6):
        s.arrive(f"hi{index}", priority=10)
    s.release("run").release("hi0")
    assert s.granted == ["run", "hi0", "low"]


def test_without_age_it_would_wait_on():
    s = Scene(age_after_s=None).ready(slots=1).arrive("run").arrive("low", priority=-10).wait(300)
    for index in range(6):
        s.arrive(f"hi{index}", priority=10)
    for name in ("run", "hi0", "hi1", "hi2", "hi3"):
        s.release(name)
    assert "low" not in s.granted


# --- recall -----------------------------------------------------------------------------------------


def draining(**limits):
    """One slot of two generates, one ticket is parked on the other, one is the standby."""
    s = Scene(**limits).ready(slots=2, policy=DRAIN).arrive("a", key="a").wait(0.1)
    s.see(("a.1", MemberState.GENERATE), total=2, phase=GENERATE)
    s.arrive("b", key="b").arrive("c", key="c").wait(0.1)
    return s.see(("a.1", MemberState.GENERATE), ("b.1", MemberState.QUEUED), total=2, phase=GENERATE)


def test_a_higher_class_takes_the_place_of_what_only_waits_natively():
    s = draining().arrive("top", priority=10)
    assert recalls(s) == ["c"]
    s.arrive("top2", priority=10).arrive("top3", priority=10)
    assert recalls(s) == ["c", "b"]  # and what is at work stays
    s.post(Requeued("c"))
    assert s.ticket_state("c") is TicketState.QUEUED
    assert s.granted == ["a", "b", "c"]
    s.wait(0.1).see(("a.1", MemberState.GENERATE), ("b.1", MemberState.QUEUED), total=2, phase=GENERATE)
    assert s.granted == ["a", "b", "c", "top"]
    assert s.ticket("c").recalls == 1
    assert s.waiting[-1] == "c"


def test_a_recalled_ticket_keeps_its_place_and_is_left_alone_from_then_on():
    s = draining().arrive("d", key="c").arrive("top", priority=10)
    s.post(Requeued("c"))
    assert s.waiting == ["top", "c", "d"]
    s.wait(0.1).see(("a.1", MemberState.GENERATE), ("b.1", MemberState.QUEUED), total=2, phase=GENERATE)
    s.release("top")
    assert s.state.tickets["c"].grant.tag == make_tag("c", 1, 1) == "c.1.r1"
    s.wait(0.1).see(("a.1", MemberState.GENERATE), ("b.1", MemberState.QUEUED), total=2, phase=GENERATE)
    s.arrive("top2", priority=10)
    assert recalls(s) == ["c", "b"]


def test_a_key_far_behind_is_worth_a_recall():
    s = draining()
    account = s.state.tickets["c"].account
    s.arrive("d", key="d")
    assert recalls(s) == []
    account.counter += 100_000  # c's key was served much since
    s.wait(0.1).see(("a.1", MemberState.GENERATE), ("b.1", MemberState.QUEUED), total=2, phase=GENERATE)
    assert recalls(s) == ["c"]


@pytest.mark.parametrize("how", ["committed", "not replayable", "off", "stale", "open"])
def test_no_recall(how):
    if how == "not replayable":
        s = Scene().ready(slots=1, policy=DRAIN).arrive("a").wait(0.1)
        s.see(("a.1", MemberState.GENERATE), total=1, phase=GENERATE).arrive("b", replayable=False)
        s.wait(0.1).see(("a.1", MemberState.GENERATE), total=1, phase=GENERATE)
    else:
        s = draining(recall=how != "off")
    if how == "committed":
        s.post(Committed("b"))
        s.post(Committed("c"))
    if how == "stale":
        s.wait(5)
    if how == "open":
        s.see(("a.1", MemberState.PREFILL), total=2, phase=EnginePhase.PREFILL_OPEN)
    s.arrive("top", priority=10)
    assert recalls(s) == []


def test_a_void_recall_looks_for_another_place():
    s = draining().arrive("top", priority=10)
    s.post(Committed("c"))
    s.post(Requeued("c"))
    assert s.ticket_state("c") is not TicketState.QUEUED
    assert recalls(s) == ["c", "b"]


def test_a_recalled_tickets_old_grant_ends_with_its_engine_only():
    s = draining().arrive("top", priority=10)
    s.post(Requeued("c"))
    s.down()
    assert set(s.ended) == {"a", "b"}
    assert s.reason("c") is Reason.BACKEND_DOWN


@pytest.mark.parametrize("how", ["shut down", "dropped", "gate"])
def test_a_recalled_ticket_comes_back_to_a_closed_door(how):
    s = draining().arrive("top", priority=10)
    match how:
        case "shut down":
            s.shut_down()
        case "dropped":
            s.drop_model()
        case _:
            s.gate()
    s.post(Requeued("c"))
    if how == "gate":
        assert s.reason("c") is Reason.GATE_BLOCKED
    else:
        assert "c" in s.ended


# --- shape ------------------------------------------------------------------------------------------


def shaped(**limits):
    """An engine of four slots that reads 1,000 tokens in a second and answers a second long."""
    s = Scene(shape=True, shape_max_wait_s=10.0, **limits).ready(slots=4, policy=DRAIN)
    s.see(phase=EnginePhase.IDLE, cohort=0)
    pace = s.state.rooms[MODEL].books["b"].pace
    pace.reading_s, pace.read_tokens, pace.generation_s = 1.0, 1000.0, 1.0
    return s


def test_a_long_prompt_lets_short_ones_go_first():
    s = shaped().arrive("run", prompt_bytes=SMALL).wait(0.1)
    s.see(("run.1", MemberState.GENERATE), phase=GENERATE, cohort=1)
    s.arrive("long", prompt_bytes=40_000).arrive("s1", prompt_bytes=SMALL).arrive("s2", prompt_bytes=SMALL)
    assert s.granted == ["run"]  # chosen when the cohort has ended
    assert s.reason("long") is Reason.COHORT_SEALED
    s.release("run")
    assert s.granted == ["run", "s1", "s2"]
    assert s.reason("long") is Reason.COHORT_SHAPE
    s.wait(0.1).see(("s1.1", MemberState.GENERATE), ("s2.1", MemberState.GENERATE), phase=GENERATE, cohort=2)
    s.release("s1", "s2")
    assert s.granted[-1] == "long"


def test_shape_has_a_bound():
    s = shaped(stale_after_s=1e9).arrive("run", prompt_bytes=SMALL).arrive("long", prompt_bytes=40_000)
    assert s.reason("long") is Reason.COHORT_SHAPE
    s.wait(9.9)
    assert s.granted == ["run"]
    s.wait(0.2)
    assert s.granted == ["run", "long"]
    assert s.held("long")[Reason.COHORT_SHAPE] == pytest.approx(10.0)


def test_a_bound_of_nothing_holds_nobody_back():
    """`cohort_shape_max_wait_s: 0`: whose wait is over before it begins must not need another event to go."""
    s = (
        Scene(shape=True, shape_max_wait_s=0.0)
        .ready(slots=4, policy=DRAIN)
        .see(phase=EnginePhase.IDLE, cohort=0)
    )
    pace = s.state.rooms[MODEL].books["b"].pace
    pace.reading_s, pace.read_tokens, pace.generation_s = 1.0, 1000.0, 1.0
    s.arrive("run", prompt_bytes=SMALL).arrive("long", prompt_bytes=40_000)
    assert s.granted == ["run", "long"]


def test_where_reading_is_cheap_nothing_is_left_out():
    s = shaped()
    s.state.rooms[MODEL].books["b"].pace.generation_s = 1000.0
    s.arrive("run", prompt_bytes=SMALL).arrive("long", prompt_bytes=40_000)
    assert s.granted == ["run", "long"]


def test_shape_needs_a_fresh_mirror_and_no_strangers():
    s = shaped().arrive("run", prompt_bytes=SMALL).arrive("long", prompt_bytes=40_000)
    s.wait(5)
    assert s.granted == ["run", "long"]  # the mirror went dark
    s = shaped().arrive("run", prompt_bytes=SMALL).wait(0.1)
    s.see(("run.1", MemberState.GENERATE), "stranger", phase=GENERATE, cohort=1)
    s.arrive("next", prompt_bytes=SMALL)
    assert s.granted == ["run", "next"]


# --- backends ---------------------------------------------------------------------------------------


def test_an_open_cohort_first_then_an_idle_engine_then_the_shorter_wait():
    x, y, z = (backend(1, name) for name in "xyz")
    s = Scene()
    for key in (x, y, z):
        s.ready(slots=4, policy=DRAIN, key=key)
    s.see("f", key=x, phase=EnginePhase.PREFILL_OPEN, cohort=1).see(key=y, phase=EnginePhase.IDLE)
    s.see("g", "h", key=z, phase=GENERATE, cohort=5)
    for index in range(9):
        s.arrive(f"t{index}")
    places = [s.grant(f"t{index}").key.backend for index in range(9)]
    assert places[:4] == ["x"] * 4  # three free slots and the standby
    assert places[4:9] == ["y"] * 5
    s.arrive("late")
    assert s.grant("late").key.backend == "z"


def test_a_known_conversation_breaks_ties():
    x, y = backend(1, "x"), backend(1, "y")
    s = Scene().ready(slots=4, key=x).ready(slots=4, key=y)
    s.arrive("first", prefix=(b"1",))
    s.post(Reported("first", 500, 0, 10))
    home = s.grant("first").key.backend
    s.release("first").arrive("other", prefix=(b"9",)).release("other")
    s.arrive("next", prefix=(b"1", b"2"))
    assert s.grant("next").key.backend == home


# --- reasons ----------------------------------------------------------------------------------------


def test_each_reason_is_reached_and_counted():
    """All that can be said of a wait, each once, with its seconds in the account."""
    seen = {}

    def note(s, name):
        seen[s.reason(name)] = s
        before = dict(s.held(name))
        reason = s.reason(name)
        s.wait(1.0)
        assert s.ticket(name).held_s[reason] >= before.get(reason, 0.0) + 0.99

    s = Scene().arrive("w")
    note(s, "w")
    s.post(SwapWait(MODEL, True))
    note(s, "w")
    s.post(SwapWait(MODEL, False))
    assert s.reason("w") is Reason.MODEL_LOADING
    note(Scene().ready(slots=1).arrive("a").arrive("w"), "w")
    note(Scene().ready(slots=1).gate().arrive("w"), "w")
    note(Scene().ready(slots=1).gate(AdminState.DRAINING).arrive("w"), "w")
    note(Scene().ready(slots=1).arrive("a").arrive("w").down(), "w")
    note(Scene().ready(slots=1).arrive("a").arrive("w", tasks=9), "w")
    s = Scene().ready(slots=1).arrive("a", key="a", prompt_bytes=BIG).arrive("w", key="a")
    s.arrive("b", key="b")
    s.state.tickets["a"].tokens = 500
    s.arrive("c", key="b")
    note(s, "w")
    note(shaped(stale_after_s=1e9).arrive("a", prompt_bytes=SMALL).arrive("w", prompt_bytes=40_000), "w")
    s = draining(stale_after_s=1e9).arrive("w")
    note(s, "w")
    assert set(seen) == set(Reason)


# --- refusals ---------------------------------------------------------------------------------------


def test_who_comes_back_as_told_has_its_seniority_and_a_place():
    s = Scene(max_queue=4).ready(slots=1).arrive("run")
    for index in range(4):
        s.arrive(f"q{index}")
    s.arrive("early", retry_id="mine")
    assert s.ended == {"early": ErrorCode.QUEUE_FULL}
    after = s.error("early").retry_after_s
    s.arrive("later", retry_id="other")
    s.wait(after).release("run")
    s.arrive("fresh")
    assert s.ended["fresh"] is ErrorCode.QUEUE_FULL  # the free place is kept
    s.arrive("again", retry_id="mine")
    assert "again" not in s.ended
    s.release("q0", "q1")
    s.arrive("newcomer")
    assert s.waiting.index("again") < s.waiting.index("newcomer")


def test_too_early_is_told_the_same_time_again():
    s = Scene(max_queue=1).ready(slots=1).arrive("run").arrive("q").arrive("x", retry_id="mine").arrive("y")
    first = s.error("x").retry_after_s
    s.arrive("z", retry_id="mine")
    assert s.error("z").retry_after_s == pytest.approx(max(1.0, first))
    s.arrive("stranger", retry_id="mine", key="another")
    assert s.error("stranger").retry_after_s > first


def test_too_late_is_a_newcomer():
    s = Scene(max_queue=1, queue_timeout_s=None).ready(slots=1).arrive("run").arrive("q")
    s.arrive("x", retry_id="mine").wait(200).release("run").arrive("y").arrive("x2", retry_id="mine")
    assert s.ended["x2"] is ErrorCode.QUEUE_FULL


def test_places_are_kept_for_those_only_who_do_come_back():
    s = Scene(max_queue=4, queue_timeout_s=None).ready(slots=1).arrive("run")
    for index in range(4):
        s.arrive(f"q{index}")
    for round_ in range(40):
        s.arrive(f"ghost{round_}", retry_id=f"g{round_}").wait(100)
    assert s.state.rooms[MODEL].returns.kept < 0.05
    assert len(s.state.rooms[MODEL].returns.promises) <= 1
