"""Who may be loaded, and who has to go for it: scenarios, and what must hold for any."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.memory import Evict, Go, Pool, Resident, Rules, Wait, plan, shortage
from proxy.backends.room import Room
from proxy.settings import Engine, Memory, Model
from proxy.state import StateDir
from tests.backends.conftest import Collect, completion, eventually

G = 1 << 30
RULES = Rules({}, min_residency_s=60, swap_patience_s=120)


def ram(size):
    return {Pool.RAM: size * G}


def resident(name, size, *, idle=100.0, age=1000.0, reload=1.0, pool=Pool.RAM):
    return Resident(name, {pool: size * G}, age, idle, reload)


def decide(need, residents=(), loading=(), free=100, rules=RULES, waited=0.0):
    return plan(ram(need), residents, loading, ram(free), rules=rules, waited_s=waited)


def test_what_fits_is_loaded():
    assert decide(10) == Go() and decide(100) == Go()
    assert decide(60, loading=[ram(40)]) == Go()


def test_a_load_in_progress_keeps_its_budget():
    assert isinstance(decide(61, loading=[ram(40)]), Wait)


def test_the_cheapest_idle_models_go_and_not_one_too_many():
    models = [
        resident("long", 10, idle=900),
        resident("slow", 10, idle=900, reload=99),
        resident("new", 10, idle=1),
    ]
    assert decide(5, models, free=0) == Evict(("long",))
    assert decide(20, models, free=0) == Evict(("long", "slow"))
    assert decide(30, models, free=0) == Evict(("long", "slow", "new"))
    # the small cheap one is not enough, and once the large one goes it need not
    assert decide(9, [resident("small", 1, idle=900), resident("large", 10, idle=1)], free=0) == Evict(
        ("large",)
    )


def test_busy_and_just_loaded_models_stay():
    assert isinstance(decide(5, [resident("busy", 10, idle=None)], free=0), Wait)
    assert isinstance(decide(5, [resident("young", 10, age=59)], free=0), Wait)
    assert decide(5, [resident("young", 10, age=60)], free=0) == Evict(("young",))


def test_after_its_patience_a_swap_drains_a_busy_one():
    busy = [resident("busy", 10, idle=None)]
    assert isinstance(decide(5, busy, free=0, waited=119), Wait)
    assert decide(5, busy, free=0, waited=120) == Evict(("busy",), busy=True)
    assert isinstance(decide(5, [resident("busy", 10, idle=None, age=1)], free=0, waited=999), Wait)


def test_what_no_wait_could_give_is_tried():
    """Larger than the machine, or held by others: the engine may say it better."""
    assert decide(500, free=100) == Go(blind=True)
    assert decide(500, [resident("a", 10)], free=100) == Go(blind=True)


def test_a_budget_limits_without_any_measurement():
    rules = Rules({Pool.VRAM: 80 * G}, 60, 120)
    loaded = [resident("a", 50, pool=Pool.VRAM)]
    assert plan({Pool.VRAM: 30 * G}, loaded, (), {}, rules=rules, waited_s=0) == Go()
    assert plan({Pool.VRAM: 31 * G}, loaded, (), {}, rules=rules, waited_s=0) == Evict(("a",))
    assert plan(ram(999), loaded, (), {}, rules=rules, waited_s=0) == Go()


_sizes = st.dictionaries(st.sampled_from(Pool), st.integers(0, 100), max_size=2)
_residents = st.lists(
    st.builds(
        Resident,
        st.uuids().map(str),
        _sizes,
        st.floats(0, 200),
        st.one_of(st.none(), st.floats(0, 1000)),
        st.floats(0, 100),
    ),
    max_size=6,
)


@given(_sizes, _residents, st.lists(_sizes, max_size=3), _sizes, _sizes, st.floats(0, 300))
def test_any_plan_is_just(need, residents, loading, measured, budgets, waited):
    """It goes only when it fits or nothing helps; never evicts busy ones early, young ones, or one too many."""
    rules = Rules(budgets, 60, 120)
    result = plan(need, residents, loading, measured, rules=rules, waited_s=waited)
    short = shortage(need, residents, loading, measured, budgets)
    by_name = {r.model: r for r in residents}
    match result:
        case Go(blind):
            assert blind == bool(short)
        case Wait(words):
            assert short and words
        case Evict(models, busy):
            assert models and len(set(models)) == len(models)
            for name in models:
                assert by_name[name].resident_s >= 60 and (busy or by_name[name].idle_s is not None)
            assert not busy or waited >= 120
            for pool, size in short.items():
                assert sum(by_name[name].need.get(pool, 0) for name in models) >= size
            for name in models:
                rest = [by_name[other] for other in models if other != name]
                assert any(sum(r.need.get(p, 0) for r in rest) < size for p, size in short.items())


@pytest.mark.parametrize("pool", list(Pool))
def test_nothing_needed_is_nothing_missing(pool):
    assert shortage({pool: 0}, (), (), {pool: 0}, {pool: 0}) == {}


@pytest.mark.engine
async def test_a_model_makes_room_for_another_and_a_busy_one_only_after_a_while(
    fleets, engine_binary, mid_model, tmp_path
):
    """A budget for one: the idle one goes, the busy one stays until the patience is over and then drains."""
    model = {"path": mid_model, "vram_bytes": 60}
    fleet, seen = fleets(
        {"a": model, "b": model, "small": model | {"vram_bytes": 40}},
        engine_binary,
        engine_args=("-c", "32768", "-t", "1", "-np", "4", "--no-warmup"),
        memory={"vram_bytes": 100, "min_residency_s": 0, "swap_patience_s": 1},
    )
    await fleet.load("a")
    await fleet.load("small")
    assert fleet.status("a").state == "ready"
    await fleet.load("b")
    assert [s.state.value for s in fleet.statuses()] == ["unloaded", "ready", "ready"]
    assert ("a", "ready", "stopping", "evict") in seen.of("state")
    exchange, sink = await fleet.upstream(fleet.key("b")).open(completion(1500)), Collect()
    pump = asyncio.create_task(exchange.attach(sink))
    await sink.first.wait()
    job = fleet.begin_load("a")
    await eventually(lambda: fleet.status("a").stage == "memory")
    assert fleet.status("b").state == "ready"
    await asyncio.wait_for(pump, 240)
    assert b'"stop":true' in sink.body
    assert (await fleet.jobs.wait(job.id, 60)).state == "done"
    assert fleet.status("b").state == "unloaded"


@pytest.mark.engine
async def test_what_a_model_took_is_remembered(fleets, engine_binary, mid_model, tmp_path):
    fleet, _ = fleets({"a": {"path": mid_model}}, engine_binary, state=StateDir.open(tmp_path))
    await fleet.start()
    size = mid_model.stat().st_size
    assert fleet._room.need("a") == {Pool.RAM: size}
    await fleet.load("a")
    await fleet.unload("a")
    learnt = fleet._room.need("a")[Pool.RAM]
    assert learnt > 10 << 20
    await fleet.stop(5)
    after, _ = fleets({"a": {"path": mid_model}}, engine_binary, state=StateDir.open(tmp_path))
    assert after._room.need("a") == {Pool.RAM: learnt}


def test_offloaded_and_declared_models():
    models = {
        "gpu": Model(path="/none", args=("-ngl", "99"), vram_bytes=5),
        "cpu": Model(path="/none", args=("-ngl", "0"), ram_bytes=7),
        "far": Model(url="http://x:1"),
    }
    room = Room(
        Memory(), models, Engine(), state=StateDir.open(None), clock=lambda: 0.0,
        wanted=lambda _: False, evict=lambda _: None, finished=lambda _: True,
    )  # fmt: skip
    assert room.need("gpu") == {Pool.VRAM: 5, Pool.RAM: 0}
    assert room.need("cpu") == {Pool.RAM: 7} and room.need("far") == {}
