"""The pure cores of operators' control: jobs, gates, leases."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends import gates, leases
from proxy.backends.gates import Gate
from proxy.backends.jobs import ENDED, JobBook, JobEnded, JobKind, JobState, Progress
from proxy.backends.leases import LeaseBook, TooManyLeases
from proxy.types import AdminState, Audit, Cause

ME = Audit("ops", "127.0.0.1")


# -- jobs ------------------------------------------------------------------------------------------------------


def test_a_job_from_start_to_end():
    book = JobBook("a-")
    job, new = book.open(JobKind.LOAD, "m", Cause.OPERATOR, ME, 10.0, 1e9)
    assert new and (job.id, job.state, job.audit) == ("a-1", JobState.RUNNING, ME)
    half = book.advance(job.id, Progress("loading", 5, 10))
    assert half.progress.bytes_read == 5 and half.seconds(12.0) == 2.0
    assert book.advance(job.id, Progress("loading", 5, 10)) is None
    done = book.close(job.id, JobState.DONE, 13.0, result={"pid": 7})
    assert done.ended and done.seconds(99.0) == 3.0 and book.get(job.id) == done
    with pytest.raises(JobEnded):
        book.advance(job.id, Progress("x"))
    with pytest.raises(JobEnded):
        book.close(job.id, JobState.FAILED, 14.0)
    assert book.get(job.id) == done and book.get("a-2") is None


def test_twice_at_once_is_one_per_model_and_kind():
    book = JobBook()
    first, _ = book.open(JobKind.FORCE, "m", Cause.FORCE, ME, 0, 0)
    again, new = book.open(JobKind.FORCE, "m", Cause.FORCE, Audit("bob"), 1, 1)
    assert not new and again == first
    assert book.open(JobKind.LOAD, "m", Cause.REQUEST, ME, 1, 1)[1]
    assert book.open(JobKind.FORCE, "n", Cause.FORCE, ME, 1, 1)[1]
    book.close(first.id, JobState.DONE, 2)
    assert book.open(JobKind.FORCE, "m", Cause.FORCE, ME, 3, 3)[1]


def test_an_end_is_an_end():
    book = JobBook()
    job, _ = book.open(JobKind.LOAD, "m", Cause.REQUEST, ME, 0, 0)
    with pytest.raises(ValueError, match="running is not an end"):
        book.close(job.id, JobState.RUNNING, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(JobKind), st.booleans()), max_size=80))
def test_the_book_is_bounded_and_never_forgets_what_runs(events):
    book, running, ids = JobBook(history=5), {}, set()
    for now, (model, kind, ends) in enumerate(events):
        if ends and (model, kind) in running:
            book.close(running.pop((model, kind)), JobState.DONE, now)
        else:
            job, new = book.open(kind, model, Cause.OPERATOR, ME, now, now)
            assert new == (job.id not in ids)
            ids.add(job.id)
            running[model, kind] = job.id
        jobs = book.all()
        assert {job.id for job in jobs if not job.ended} == set(running.values())
        assert sum(job.state in ENDED for job in jobs) <= 5
        assert [job.started_at for job in jobs] == sorted((j.started_at for j in jobs), reverse=True)
        for (name, what), job_id in running.items():
            assert book.running(name, what).id == job_id


# -- gates -----------------------------------------------------------------------------------------------------

_gates = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.builds(
        Gate,
        st.sampled_from([AdminState.ENABLED, AdminState.BLOCKED]),
        st.text(max_size=9),
        st.sampled_from(gates.MODES),
        st.builds(Audit, st.text(max_size=4), st.text(max_size=4)),
        st.floats(0, 1e10),
    ),
    max_size=4,
)


@given(_gates)
def test_gates_survive_the_disk(some):
    again = gates.decode(json.loads(json.dumps(gates.encode(some))))
    assert again == {name: gate for name, gate in some.items() if not gate.open}


@pytest.mark.parametrize(
    "data",
    [[], {"m": {}}, {"m": {"state": "odd"}}, {"m": None}, 3,
     {"m": {"state": "draining", "mode": "hold", "reason": "", "key": "", "address": "", "since_wall": 0}},
     {"m": {"state": "blocked", "mode": "odd", "reason": "", "key": "", "address": "", "since_wall": 0}}],
)  # fmt: skip
def test_other_data_is_refused(data):
    with pytest.raises((ValueError, KeyError, TypeError)):
        gates.decode(data)


def test_draining_overrides_an_open_gate_only():
    draining, blocked = Gate(AdminState.DRAINING, "unloading"), Gate(AdminState.BLOCKED, "repairs", "reject")
    assert gates.effective(gates.OPEN, None) == gates.OPEN
    assert gates.effective(gates.OPEN, draining) == draining
    assert gates.effective(blocked, draining) == blocked


# -- leases ----------------------------------------------------------------------------------------------------


def test_leases_expire_by_themselves_and_hold_until_the_last():
    book = LeaseBook()
    book.grant("a", 10, "backup", ME, now=100, wall=5000)
    book.grant("b", 30, "", ME, now=100, wall=5000)
    assert [lease.id for lease in book.held(105)] == ["a", "b"] and book.awake_until(105) == 130
    assert book.held(105)[0].left_s(105) == 5
    assert [lease.id for lease in book.expire(110)] == ["a"]
    assert book.awake_until(115) == 130 and book.awake_until(130) is None
    assert book.release("b").id == "b" and book.release("b") is None
    assert book.held(105) == ()


def test_a_lease_can_be_renewed_and_there_are_only_so_many():
    book = LeaseBook()
    for n in range(leases.MAX_LEASES):
        book.grant(str(n), 10, "", ME, now=0, wall=0)
    assert book.grant("0", 99, "", ME, now=0, wall=0).expires_at == 99
    with pytest.raises(TooManyLeases):
        book.grant("one more", 10, "", ME, now=0, wall=0)


@pytest.mark.parametrize("ttl", [0, -1, float("inf"), float("nan"), leases.MAX_TTL_S * 2])
def test_a_length_out_of_bounds_is_refused(ttl):
    with pytest.raises(ValueError, match="ttl_s"):
        LeaseBook().grant("a", ttl, "", ME, now=0, wall=0)


@given(
    ttl=st.floats(1, 1e6),
    passed=st.floats(0, 2e6),
    step=st.floats(-1e7, 1e7),
    same_boot=st.booleans(),
)
def test_across_a_restart_clock_steps_have_no_effect_and_a_reboot_never_prolongs(
    ttl, passed, step, same_boot
):
    """Same boot: the monotonic clock alone decides. Another boot: wall time, at most the lease's own length."""
    book = LeaseBook()
    lease = book.grant("a", ttl, "why", ME, now=1000.0, wall=1e9)
    data = json.loads(json.dumps(leases.encode((lease,), "boot-1")))
    now = 1000.0 + passed if same_boot else 5.0
    found = leases.decode(data, "boot-1" if same_boot else "boot-2", now=now, wall=1e9 + passed + step)
    if same_boot:
        assert bool(found) == (ttl - passed > 0) or abs(ttl - passed) < 1e-6
        if found:
            assert found[0].expires_at == pytest.approx(1000.0 + ttl)
    elif found:
        assert 0 < found[0].left_s(now) <= ttl + 1e-6
    again = LeaseBook()
    again.restore(found)
    assert again.held(now) == found


def test_an_unknown_boot_falls_back_to_the_wall_clock():
    lease = LeaseBook().grant("a", 60, "", ME, now=0, wall=1000)
    data = leases.encode((lease,), "")
    assert leases.decode(data, "", now=500, wall=1030)[0].left_s(500) == 30
    assert leases.decode(data, "", now=0, wall=2000) == ()
