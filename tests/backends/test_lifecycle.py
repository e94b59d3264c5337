"""The state machine alone: table, causes, generations, illegal events."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.backoff import Backoff
from proxy.backends.lifecycle import (
    TABLE,
    AdminSet,
    BecameReady,
    EngineLost,
    Exited,
    IllegalEvent,
    Life,
    LoadAsked,
    LoadFailed,
    LoadRefused,
    Moved,
    Reshaped,
    RetryDue,
    RetryPlanned,
    Started,
    StartEngine,
    StopAsked,
    StopEngine,
    Stopped,
    TooSoon,
    step,
)
from proxy.types import AdminState, Cause, ModelState

S = ModelState


def run(*events, life=Life()):
    effects = []
    for event in events:
        life, more = step(life, event)
        effects += more
    return life, effects


READY = (LoadAsked(Cause.REQUEST), Started(1), BecameReady(1))


def test_a_whole_life():
    """Every change has its cause, and the stop takes a generation of its own."""
    life, effects = run(*READY, StopAsked(Cause.TTL), Stopped(2))
    assert life == Life(S.UNLOADED, generation=2, cause=Cause.TTL)
    assert effects == [
        Moved(S.UNLOADED, S.STARTING, Cause.REQUEST),
        StartEngine(1, Cause.REQUEST),
        Moved(S.STARTING, S.LOADING, Cause.REQUEST),
        Moved(S.LOADING, S.READY, Cause.REQUEST),
        Moved(S.READY, S.STOPPING, Cause.TTL),
        StopEngine(2, Cause.TTL, was_ready=True),
        Moved(S.STOPPING, S.UNLOADED, Cause.TTL),
    ]


def test_loads_join_and_do_not_start_twice():
    life, effects = run(*READY, LoadAsked(Cause.OPERATOR))
    assert sum(isinstance(effect, StartEngine) for effect in effects) == 1
    assert life.cause is Cause.REQUEST


def test_a_crash_is_told_and_a_restart_planned_which_requests_join():
    life, effects = run(*READY, Exited(1))
    assert life.operational is S.FAILED
    assert effects[-2:] == [EngineLost(1, Cause.CRASH), RetryPlanned(1, 0.0)]
    life, effects = run(LoadAsked(Cause.REQUEST), life=life)
    assert effects == [] and life.operational is S.FAILED
    life, effects = run(RetryDue(1), life=life)
    assert life.generation == 2 and effects[-1] == StartEngine(2, Cause.CRASH)


def test_an_operators_load_does_not_wait_for_the_back_off():
    life, _ = run(*READY, Exited(1))
    life, effects = run(LoadAsked(Cause.OPERATOR), life=life)
    assert effects[-1] == StartEngine(2, Cause.OPERATOR)
    assert run(RetryDue(1), life=life) == (life, [])


def crash(life, now, served=0.0, cause=Cause.CRASH):
    """Let a failed or unloaded life come up at `now` and crash after serving."""
    rule = Backoff(first_s=1, max_s=60, stable_s=300)
    event = RetryDue(life.generation) if life.restart else LoadAsked(Cause.REQUEST)
    life, _ = step(life, event, now, rule)
    for event in (Started(life.generation), BecameReady(life.generation)):
        life, _ = step(life, event, now, rule)
    return step(life, Exited(life.generation, cause), now + served, rule)


def test_restarts_back_off_and_good_service_forgives():
    life, waits, now = Life(), [], 0.0
    for _ in range(5):
        life, effects = crash(life, now, served=1.0)
        waits.append(effects[-1].at - now - 1.0)
        now = effects[-1].at
    assert waits == [0, 1, 2, 4, 8] and life.strikes == 5
    life, effects = crash(life, now, served=300.0)
    assert effects[-1].at == now + 300.0 and life.strikes == 1


def test_a_restart_that_fails_is_planned_again_and_a_requests_attempt_is_not():
    life, _ = run(*READY, Exited(1), RetryDue(1))
    life, effects = step(life, LoadFailed(2), 10.0)
    assert effects[-1] == RetryPlanned(2, 11.0) and life.restart
    life, effects = run(LoadAsked(Cause.REQUEST), LoadFailed(1))
    assert not life.restart and not any(isinstance(e, RetryPlanned) for e in effects)


def test_requests_come_too_soon_after_their_second_failed_attempt():
    life, _ = run(LoadAsked(Cause.REQUEST), LoadFailed(1), LoadAsked(Cause.REQUEST))
    life, _ = step(life, LoadFailed(2), 10.0)
    assert step(life, LoadAsked(Cause.REQUEST), 10.5) == (life, (TooSoon(11.0),))
    assert step(life, LoadAsked(Cause.REQUEST), 11.0)[1][-1] == StartEngine(3, Cause.REQUEST)
    assert step(life, LoadAsked(Cause.OPERATOR), 10.5)[1][-1] == StartEngine(3, Cause.OPERATOR)


def test_a_stop_forgets_the_plan_and_the_strikes():
    life, _ = run(*READY, Exited(1), StopAsked(Cause.OPERATOR))
    assert (life.operational, life.restart, life.strikes, life.retry_at) == (S.UNLOADED, False, 0, None)
    assert run(RetryDue(1), life=life) == (life, [])


def test_another_configuration_is_not_blamed_for_failures_of_the_old_one():
    """Strikes go; a planned restart comes now, and a request need not wait; what works or stops is left as it is."""
    failed = Life(S.FAILED, generation=3, cause=Cause.CRASH, strikes=4, retry_at=99.0)
    life, effects = step(failed, Reshaped(), 10.0)
    assert (life.operational, life.strikes, life.retry_at, effects) == (S.FAILED, 0, None, ())
    assert step(life, LoadAsked(Cause.REQUEST), 10.0)[0].operational is S.STARTING
    life, effects = step(replace(failed, restart=True), Reshaped(), 10.0)
    assert (life.strikes, effects) == (0, (RetryPlanned(3, 10.0),))
    assert step(life, RetryDue(3), 10.0)[1][-1] == StartEngine(4, Cause.CRASH)
    for state in set(S) - {S.FAILED}:
        assert step(Life(state, strikes=1), Reshaped(), 10.0) == (Life(state, strikes=1), ())


def test_a_blocked_model_is_not_restarted():
    life, effects = run(*READY, AdminSet(AdminState.BLOCKED, "x"), Exited(1), RetryDue(1))
    assert life.operational is S.FAILED and not life.restart
    assert not [e for e in effects if isinstance(e, StartEngine)][1:]
    assert run(RetryDue(1), life=life) == (life, [])


def test_without_restarts_a_crash_waits_for_the_next_request():
    off = Backoff(first_s=0)
    life, _ = run(*READY)
    life, effects = step(life, Exited(1), 5.0, off)
    assert not life.restart and effects[-1] == EngineLost(1, Cause.CRASH)
    assert step(life, LoadAsked(Cause.REQUEST), 5.0, off)[1][-1] == StartEngine(2, Cause.REQUEST)


def test_a_failed_attempt_may_be_tried_again():
    life, effects = run(LoadAsked(Cause.REQUEST), LoadFailed(1), LoadAsked(Cause.REQUEST))
    assert life.operational is S.STARTING and life.generation == 2


def test_a_stop_in_any_state_ends_unloaded():
    for events in ((), READY[:1], READY[:2], READY, (*READY, Exited(1))):
        life, _ = run(*events, StopAsked(Cause.FORCE))
        if life.operational is S.STOPPING:
            life, _ = run(Stopped(life.generation), life=life)
        assert life.operational is S.UNLOADED and life.cause is Cause.FORCE or not events


def test_a_load_during_a_stop_comes_after_it():
    life, effects = run(*READY, StopAsked(Cause.FORCE), LoadAsked(Cause.REQUEST), Stopped(2))
    assert life.operational is S.STARTING and life.generation == 3
    assert effects[-1] == StartEngine(3, Cause.REQUEST)


def test_a_second_stop_forgets_the_load_that_waited():
    life, _ = run(
        *READY, StopAsked(Cause.FORCE), LoadAsked(Cause.REQUEST), StopAsked(Cause.FORCE), Stopped(2)
    )
    assert life.operational is S.UNLOADED


@pytest.mark.parametrize("admin", [AdminState.BLOCKED, AdminState.DRAINING])
def test_a_gate_refuses_requests_but_not_operators(admin):
    life, effects = run(AdminSet(admin, "why"), LoadAsked(Cause.REQUEST))
    assert effects == [LoadRefused(admin, "why")] and life.operational is S.UNLOADED
    life, _ = run(LoadAsked(Cause.OPERATOR), life=life)
    assert life.operational is S.STARTING


def test_a_gate_set_while_stopping_refuses_the_load_that_waited():
    life, effects = run(
        *READY,
        StopAsked(Cause.FORCE),
        LoadAsked(Cause.REQUEST),
        AdminSet(AdminState.BLOCKED, "x"),
        Stopped(2),
    )
    assert life.operational is S.UNLOADED and effects[-1] == LoadRefused(AdminState.BLOCKED, "x")


def test_an_operators_load_that_waits_for_a_stop_passes_a_gate_though_a_request_asked_first():
    life, _ = run(
        *READY,
        StopAsked(Cause.FORCE),
        LoadAsked(Cause.REQUEST),
        LoadAsked(Cause.OPERATOR),
        LoadAsked(Cause.REQUEST),
        AdminSet(AdminState.BLOCKED, "x"),
        Stopped(2),
    )
    assert (life.operational, life.cause) == (S.STARTING, Cause.OPERATOR)


@pytest.mark.parametrize(
    "event", [Started(0), BecameReady(0), LoadFailed(0), Exited(0), Stopped(0), RetryDue(0)]
)
def test_stale_generations_change_nothing(event):
    for events in (READY[:1], READY[:2], READY, (*READY, StopAsked(Cause.FORCE))):
        life, _ = run(*events)
        assert step(life, event) == (life, ())


def test_the_table_is_what_is_legal():
    """Each state with each event of its generation: in the table it moves there, else it raises."""
    events = [
        LoadAsked(Cause.REQUEST),
        Started(5),
        BecameReady(5),
        LoadFailed(5),
        Exited(5),
        Stopped(5),
        StopAsked(Cause.TTL),
        RetryDue(5),
    ]
    for state in S:
        for event in events:
            life = Life(state, generation=5, restart=state is S.FAILED)
            wanted = TABLE[state].get(type(event))
            if wanted is None:
                with pytest.raises(IllegalEvent, match=f"{type(event).__name__} in state {state.value}"):
                    step(life, event)
            else:
                joins = state is S.FAILED and isinstance(event, LoadAsked)
                assert step(life, event)[0].operational is (S.FAILED if joins else wanted)


_generation = st.integers(0, 8)
_cause = st.sampled_from(Cause)
_events = st.one_of(
    st.builds(LoadAsked, _cause),
    st.builds(StopAsked, _cause),
    st.builds(Started, _generation),
    st.builds(BecameReady, _generation),
    st.builds(LoadFailed, _generation),
    st.builds(Exited, _generation),
    st.builds(Stopped, _generation),
    st.builds(RetryDue, _generation),
    st.builds(AdminSet, st.sampled_from(AdminState)),
    st.just(Reshaped()),
)


@given(st.lists(_events, max_size=40))
def test_any_history_keeps_the_invariants(events):
    """Generations never go back, moves chain, one start or stop per generation, illegal events change nothing."""
    life, moves, numbered = Life(), [], []
    for event in events:
        before = life
        try:
            life, effects = step(life, event)
        except IllegalEvent:
            assert life is before
            continue
        assert life.generation >= before.generation
        moves += [effect for effect in effects if isinstance(effect, Moved)]
        numbered += [e.generation for e in effects if isinstance(e, StartEngine | StopEngine)]
        if life.operational is not before.operational:
            assert moves[-1].after is life.operational
        if isinstance(event, StopAsked):
            assert not life.loading and life.operational is not S.READY
    assert all(first.after is second.before for first, second in zip(moves, moves[1:], strict=False))
    assert numbered == sorted(set(numbered))
