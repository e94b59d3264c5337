"""The wedge watchdog alone: scenarios of polls, each with the verdict it must and must not bring."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.backoff import Backoff
from proxy.backends.slots import parse
from proxy.backends.watchdog import (
    LONGEST_GUESS_S,
    Rules,
    Watchdog,
    first_decode_s,
    tokens_at_stake,
)
from proxy.types import BackendKey, EnginePhase, MemberState, SlotView, Snapshot

KEY = BackendKey("m", "process", 1)
RULES = Rules(wedge_after_s=3.0, probe_timeout_s=2.0, model_bytes=90_000_000, batch_tokens=512)


def snap(at, *slots, running_ms=0.0, seq=0, native=True):
    return Snapshot(KEY, at, at, slots, native=native, decode_running_ms=running_ms, seq=seq)


def prefill(processed=0, total=500, slot=0):
    return SlotView(
        slot, True, 1, member=MemberState.PREFILL, prompt_tokens=total, processed_tokens=processed
    )


def generate(decoded, slot=0):
    return SlotView(slot, True, 1, member=MemberState.GENERATE, prompt_tokens=5, decoded_tokens=decoded)


IDLE = SlotView(0, False)


def verdicts(rules, *snapshots):
    dog = Watchdog(rules, 0.0)
    return [found.rule if found else None for found in map(dog.seen, snapshots)]


# -- (a) silence ---------------------------------------------------------------------------------------------


def test_three_silent_polls_in_a_row_are_a_wedge():
    dog = Watchdog(RULES, 0.0)
    assert dog.silent(0.0, 2.0) is None
    assert dog.silent(2.0, 4.01) is None
    found = dog.silent(4.01, 6.02)
    assert found is not None and found.rule == "silent" and "6.0 s" in found.words


def test_an_answer_or_a_refusal_between_starts_the_count_anew():
    for between in (lambda dog: dog.seen(snap(4.0, IDLE)), lambda dog: dog.refused()):
        dog = Watchdog(RULES, 0.0)
        assert dog.silent(0.0, 2.0) is dog.silent(2.0, 4.0) is None
        between(dog)
        assert dog.silent(4.0, 6.0) is dog.silent(6.0, 8.0) is None
        assert dog.silent(8.0, 10.0) is not None


def test_our_own_stall_is_not_the_engines_silence():
    """The proxy was stopped for a minute: each poll under way comes back late, none counts."""
    dog = Watchdog(RULES, 0.0)
    assert dog.silent(0.0, 2.0) is dog.silent(2.0, 4.0) is None
    assert dog.silent(4.0, 64.0) is None
    assert dog.silent(64.0, 66.0) is dog.silent(66.0, 68.0) is None
    assert dog.silent(68.0, 70.0) is not None


# -- (b) one decode call ---------------------------------------------------------------------------------------


def test_a_first_batch_longer_than_wedge_after_is_no_wedge():
    """wedge_after_s 3, the first call runs for 9 s: within the guess from the model's size."""
    polls = [snap(t / 10, prefill(500), running_ms=t * 100) for t in range(90)]
    assert set(verdicts(RULES, *polls)) == {None}


def test_a_first_batch_far_beyond_the_guess_is_one():
    limit = 10 * first_decode_s(RULES.model_bytes, 500)
    polls = [snap(float(t), prefill(500), running_ms=t * 1000) for t in range(int(limit) + 3)]
    found = verdicts(RULES, *polls)
    assert found[-1] == "decode" and found.index("decode") == int(limit) + 1


def test_later_calls_are_held_against_the_longest():
    """A longest call of 0.5 s over 500 tokens: 10 times that is the limit, and for few tokens it is the same."""
    learnt = [snap(0.5, prefill(500), running_ms=500), snap(0.51, generate(1), running_ms=10)]
    for slot in (prefill(500), generate(2)):
        calls = [snap(1 + t, slot, running_ms=t * 1000) for t in range(1, 8)]
        assert verdicts(RULES, *learnt, *calls)[2:] == [None] * 5 + ["decode"] * 2


def test_the_limit_grows_with_the_tokens_at_stake():
    """Learnt from one generated token: a full prompt batch may take as many times longer."""
    learnt = [snap(0.05, generate(1), running_ms=50), snap(0.1, generate(2), running_ms=1)]
    long = [snap(1 + t, prefill(500), running_ms=t * 1000) for t in range(1, 100)]
    assert set(verdicts(RULES, *learnt, *long)) == {None}


def test_wedge_after_is_the_least():
    rules = Rules(wedge_after_s=60, probe_timeout_s=2)
    learnt = [snap(0.05, generate(1), running_ms=5), snap(0.1, generate(2), running_ms=1)]
    calls = [snap(1 + t, generate(3), running_ms=t * 1000) for t in range(1, 63)]
    assert verdicts(rules, *learnt, *calls)[-3:] == [None, "decode", "decode"]


def test_a_call_may_have_been_longer_than_it_was_seen():
    """Five tokens were seen to run for 1 ms and were over 99 ms later: a full batch may take 10 times 100 times that."""
    learnt = [snap(0.001, prefill(5, 5), running_ms=1), snap(0.1, generate(1), running_ms=0)]
    long = [snap(1 + t, prefill(500), running_ms=t * 1000) for t in range(1, 99)]
    assert set(verdicts(RULES, *learnt, *long)) == {None}
    # the next call was already running: the one before cannot have lasted until this answer
    learnt = [snap(0.001, prefill(5, 5), running_ms=1), snap(0.1, generate(1), running_ms=98)]
    dog = Watchdog(RULES, 0.0)
    for one in learnt:
        dog.seen(one)
    assert dog.longest_s == 0.0, "98 ms may be the same call"
    dog.seen(snap(0.101, generate(2), running_ms=0.5))
    assert 0.098 <= dog.longest_s < 0.099


def test_our_own_stall_makes_no_call_longer():
    dog = Watchdog(RULES, 0.0)
    dog.seen(snap(0.1, prefill(500), running_ms=100))
    dog.seen(snap(60.0, generate(1), running_ms=0))
    assert 0.1 < dog.longest_s <= 0.36


# -- (c) nothing runs ------------------------------------------------------------------------------------------


def test_busy_slots_and_no_decode_are_stuck():
    polls = [snap(t / 2, prefill(3), seq=9) for t in range(1, 9)]
    assert verdicts(RULES, *polls) == [None] * 7 + ["stuck"]


@pytest.mark.parametrize(
    "step",
    [
        lambda t: snap(t, generate(int(t)), seq=1),
        lambda t: snap(t, prefill(int(t)), seq=1),
        lambda t: snap(t, prefill(3), seq=int(t)),
        lambda t: snap(t, prefill(3), seq=1, running_ms=10 + t % 2),
        lambda t: snap(t, IDLE),
    ],
    ids=["a token", "a prompt part", "an event", "a decode seen running", "idle"],
)
def test_any_sign_of_work_is_enough(step):
    assert set(verdicts(RULES, *(step(float(t)) for t in range(1, 60)))) == {None}


def queued(slot=0):
    return SlotView(slot, True, 1, tag="r.1", member=MemberState.QUEUED, prompt_tokens=5)


def held(at, *slots):
    """The engine could begin and waits for companions."""
    return Snapshot(KEY, at, at, slots, native=True, phase=EnginePhase.IDLE, seq=1)


def test_an_admit_window_is_no_wedge_however_long():
    """wedge_after_s 3 and a window of a minute: nothing decodes for 60 s, and only 3 s more are too many."""
    rules = Rules(wedge_after_s=3, probe_timeout_s=2, admit_s=60)
    found = verdicts(rules, *(held(t / 2, queued(), IDLE) for t in range(1, 140)))
    assert found.index("stuck") == 127, "the first answer later than 63 s after the first"


def test_a_request_may_ask_for_companions_for_a_second():
    rules = Rules(wedge_after_s=0.2, probe_timeout_s=2)
    found = verdicts(rules, *(held(1 + t / 10, queued(), IDLE) for t in range(20)))
    assert set(found[:12]) == {None} and found[14] == "stuck"


def test_the_window_is_no_excuse_once_a_phase_runs():
    rules = Rules(wedge_after_s=3, probe_timeout_s=2, admit_s=60)
    assert verdicts(rules, *(snap(t / 2, prefill(3), seq=9) for t in range(1, 9)))[-1] == "stuck"


@pytest.mark.parametrize(
    "others",
    [
        (queued(1), queued(2)),
        (SlotView(1, True, 2, member=MemberState.READY, prompt_tokens=5, decoded_tokens=0),),
        (SlotView(1, True, 2, member=MemberState.PAUSED, prompt_tokens=5, decoded_tokens=9),),
    ],
    ids=["queued behind a cohort", "ready at the barrier", "paused by a yield"],
)
def test_who_waits_for_members_that_decode_is_not_stuck(others):
    """The others do not move for minutes; what they wait for runs in calls longer than wedge_after_s."""
    polls, processed = [snap(0.5, prefill(0, 90_000), *others, running_ms=500)], 0
    for n in range(1, 1200):
        processed += 512 if n % 10 == 0 else 0
        polls.append(snap(n / 2, prefill(processed, 90_000), *others, seq=4, running_ms=(n % 10) * 500))
    assert set(verdicts(RULES, *polls)) == {None}


def test_recorded_answers_of_an_engine_that_stopped_moving():
    """The engine's own light view, again and again: a queued and a generating slot and no call; then one that runs on."""
    body = (Path(__file__).parent / "data" / "slots-native-light.json").read_bytes()

    def answer(at, running_ms=0.0):
        report = parse(body)
        return Snapshot(
            KEY, at, at, report.slots, native=True, phase=report.phase, cohort=report.cohort,
            decode_running_ms=running_ms, seq=report.seq or 0,
        )  # fmt: skip

    assert verdicts(RULES, *(answer(t / 2) for t in range(1, 9))) == [None] * 7 + ["stuck"]
    # not yet: 500 tokens of the queued prompt count, so that the first call may take as long as a full batch
    limit = 10 * first_decode_s(RULES.model_bytes, 513)
    found = verdicts(RULES, *(answer(float(t), t * 1000) for t in range(1, int(limit) + 2)))
    assert found[-1] == "decode" and set(found[:-1]) == {None}


def test_work_after_a_long_idle_time_is_not_stuck_at_once():
    assert verdicts(RULES, snap(1.0, IDLE), snap(1000.0, prefill(0), seq=1)) == [None, None]


def test_a_stock_engine_is_only_watched_for_silence():
    polls = [snap(float(t), SlotView(0, True, 1), native=False) for t in range(100)]
    assert set(verdicts(RULES, *polls)) == {None}


# -- the numbers -----------------------------------------------------------------------------------------------


def test_tokens_at_stake():
    assert tokens_at_stake(snap(0, IDLE), 512) == 1
    assert tokens_at_stake(snap(0, prefill(0, 100), generate(3, slot=1)), 512) == 101
    assert tokens_at_stake(snap(0, prefill(0, 9000), generate(3, slot=1)), 512) == 513
    assert tokens_at_stake(snap(0, SlotView(0, True, 1)), 512) == 512


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_the_guess_is_positive_and_bounded(size, tokens):
    assert 0 < first_decode_s(size, tokens) <= LONGEST_GUESS_S


@given(
    st.lists(
        st.tuples(st.floats(0.001, 2.0), st.floats(0, 2000), st.integers(0, 5), st.booleans()), max_size=60
    )
)
def test_an_engine_that_keeps_decoding_is_never_wedged(steps):
    """Whatever the pace: no call longer than wedge_after_s, and something moves at least as often."""
    dog, now, decoded = Watchdog(RULES, 0.0), 0.0, 0
    for gap, running, more, answers in steps:
        now += gap
        if answers:
            decoded += more + 1
            assert dog.seen(snap(now, generate(decoded), running_ms=running)) is None
        else:
            dog.refused()


@given(st.integers(0, 500), st.floats(0, 1e6))
def test_back_off_grows_to_its_cap_and_forgives_good_service(strikes, served):
    rule = Backoff(first_s=1, max_s=60, stable_s=300)
    assert rule.wait_s(strikes) <= rule.wait_s(strikes + 1) <= 60
    assert rule.wait_s(1) == 0 and rule.wait_s(2) == 1 and rule.wait_s(3) == 2 and rule.wait_s(10) == 60
    assert rule.strikes(strikes, served) == (1 if served >= 300 else strikes + 1)


def test_back_off_that_is_off_never_waits():
    rule = Backoff(first_s=0)
    assert not rule.restarts and rule.wait_s(50) == 0
