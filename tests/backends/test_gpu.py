"""GPU memory: read off the driver's library (a small one of ours here), and what loads do with it."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from proxy.backends import gpu
from proxy.backends.gpu import Device, Gpus, Nvml, NvmlError, visible
from proxy.backends.memory import Evict, Go, Pool, Resident, Rules, Wait, concerned, plan
from proxy.backends.room import Room
from proxy.settings import Engine, Memory, Model
from proxy.state import StateDir
from proxy.types import ModelState
from tests.backends.conftest import eventually

G = 1 << 30
A, B = "GPU-11111111-2222", "GPU-33333333-4444"
TWO = f"{A} {80 * G} {70 * G}\n{B} {80 * G} {10 * G}\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """Compile the stand-in; it keeps state, so that each test opens a copy of its own."""
    made = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(source)], check=True, timeout=60)
    return made


@pytest.fixture
def driver(library, tmp_path, monkeypatch):
    """Return `(open, file)`: how to open the driver's library, and the file that says what GPUs there are."""
    file, own = tmp_path / "gpus", tmp_path / "libnvidia-ml.so.1"
    own.write_bytes(library.read_bytes())
    file.write_text(TWO)
    monkeypatch.setenv("NVML_FILE", str(file))
    return (lambda: Nvml.open(str(own))), file


# -- the library ---------------------------------------------------------------------------------------------


def test_devices_are_read(driver):
    nvml = driver[0]()
    assert nvml.devices() == (Device(0, A, 80 * G, 70 * G), Device(1, B, 80 * G, 10 * G))
    driver[1].write_text(f"{A} {80 * G} 5\n")
    assert [device.free_bytes for device in nvml.devices()] == [5]


def test_a_driver_that_refuses_is_quoted(driver):
    driver[1].write_text("broken\n")
    with pytest.raises(NvmlError, match="nvmlDeviceGetCount_v2: GPU is lost"):
        driver[0]().devices()


def test_no_driver_no_library(tmp_path):
    assert Nvml.open(str(tmp_path / "none.so")) is None
    other = tmp_path / "other.so"
    source = tmp_path / "other.c"
    source.write_text("int other(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(other), str(source)], check=True, timeout=60)
    assert Nvml.open(str(other)) is None, "a library that is none of the driver's"


async def test_trouble_is_said_once_and_limits_nothing(driver, capsys):
    gpus = Gpus(driver[0])
    assert gpus.present and len(await gpus.devices()) == 2
    driver[1].write_text("broken\n")
    assert await gpus.devices() == () == await gpus.devices()
    driver[1].write_text(TWO)
    assert len(await gpus.devices()) == 2
    said = capsys.readouterr()
    assert (said.out + said.err).count("GPU memory cannot be measured") == 1


async def test_a_driver_that_never_answers_holds_nobody_up(driver, monkeypatch):
    """The deadline passes, later questions wait for the same answer, and it counts again once it comes."""
    monkeypatch.setattr(gpu, "ANSWER_S", 0.1)
    gpus = Gpus(driver[0])
    driver[1].write_text("silent\n")
    assert await gpus.devices() == ()
    asked = gpus._pending
    assert await gpus.devices() == () and gpus._pending is asked
    driver[1].write_text(TWO)
    await eventually(asked.done)
    monkeypatch.setattr(gpu, "ANSWER_S", 10)
    assert len(await gpus.devices()) == 2


async def test_without_a_driver_there_are_no_gpus():
    gpus = Gpus(lambda: None)
    assert not gpus.present and await gpus.devices() == ()


@pytest.mark.gpu
async def test_the_real_driver():
    gpus = Gpus()
    if not gpus.present:
        pytest.skip(f"needs {gpu.LIBRARY}, which comes with NVIDIA's driver")
    devices = await gpus.devices()
    assert devices and len({device.uuid for device in devices}) == len(devices)
    for device in devices:
        assert device.uuid.startswith("GPU-") and 0 < device.free_bytes <= device.total_bytes
    assert visible(devices, devices[-1].uuid) == (devices[-1],)


# -- which GPUs a model uses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "indexes"),
    [
        (None, [0, 1]), ("0,1", [0, 1]), ("1", [1]), (" 1 , 0 ", [1, 0]), ("", []), ("-1", []), ("0,7,1", [0]),
        ("GPU-3333", [1]), (f"{B},0", [1, 0]), ("0,0", [0]), ("MIG-1", []),
    ],
)  # fmt: skip
def test_visible_devices(chosen, indexes):
    devices = (Device(0, A, 1, 1), Device(1, B, 1, 1))
    assert [device.index for device in visible(devices, chosen)] == indexes


# -- the plan ------------------------------------------------------------------------------------------------


def vram(size):
    return {Pool.VRAM: size * G}


def decide(need, residents=(), loading=(), free=80, budget=None):
    rules = Rules(vram(budget) if budget else {}, 60, 120)
    return plan(vram(need), residents, loading, vram(free), rules=rules, waited_s=0)


def idle(name, size):
    return Resident(name, vram(size), 1000.0, 100.0)


def test_measured_gpu_memory_limits():
    assert decide(60) == Go() and decide(90) == Go(blind=True)
    assert decide(60, [idle("a", 30)], free=50) == Evict(("a",))


def test_nobody_goes_for_what_a_load_in_progress_has_taken_already():
    """30 of 80 are reserved and taken: 50 are free, and 40 fit once the load is done. 60 do not fit even then."""
    assert isinstance(decide(40, [idle("a", 20)], [vram(30)], free=50), Wait)
    assert decide(60, [idle("a", 60)], [vram(30)], free=50) == Evict(("a",))
    assert decide(40, [idle("a", 20)], [vram(30)], free=50, budget=80) == Evict(("a",)), "the budget is exact"
    assert decide(40, [], [], free=50) == Go()


def test_models_on_other_gpus_have_nothing_to_give():
    near, far = idle("near", 30), idle("far", 30)
    found = concerned(vram(40), [near, far], [], {}, {"near"})
    assert [dict(r.need) for r in found] == [vram(30), {}]
    assert plan(vram(40), found, [], vram(20), rules=Rules({}, 0, 0), waited_s=0) == Evict(("near",))
    # a budget is one for all GPUs
    assert concerned(vram(40), [near, far], [], vram(90), {"near"}) == [near, far]


# -- the room ------------------------------------------------------------------------------------------------


class Tenant:
    def __init__(self, settings):
        self.settings = settings
        self.state, self.since, self.idle_since = ModelState.UNLOADED, 0.0, None

    @property
    def occupancy(self):
        return self.state, None, self.since, self.idle_since


def make_room(driver, models, evicted, *, state=None, finished=lambda _job: True, **memory):
    made = {name: Model.model_validate({"path": "/none.gguf"} | model) for name, model in models.items()}
    tenants = {name: Tenant(model) for name, model in made.items()}

    class Job:
        id = "j"

    def evict(model):
        evicted.append(model)
        return Job

    room = Room(
        Memory(min_residency_s=0, **memory), made, Engine(args=("-ngl", "99")), state=state or StateDir.open(None),
        clock=lambda: 1000.0, wanted=lambda _: False, evict=evict, finished=finished, gpus=Gpus(driver[0]),
    )  # fmt: skip
    room.open(tenants)
    return room, tenants


async def test_a_load_waits_for_measured_gpu_memory(driver):
    """10 of 80 GiB are free on the model's own GPU: the idle model there goes, then the load waits until it is gone."""
    evicted, words = [], []
    pinned = {"vram_bytes": 60 * G, "env": {"CUDA_VISIBLE_DEVICES": "1"}}
    room, tenants = make_room(
        driver, {"new": pinned, "near": pinned, "far": {**pinned, "env": {"CUDA_VISIBLE_DEVICES": "0"}}}, evicted
    )  # fmt: skip
    for name in ("near", "far"):
        tenants[name].state, tenants[name].idle_since = ModelState.READY, 0.0
    loading = []

    async def load():
        async with room.reserved("new", words.append):
            loading.append(True)

    task = asyncio.create_task(load())
    await eventually(lambda: evicted)
    assert set(evicted) == {"near"} and words[-1] == "unloads near" and not loading
    tenants["near"].state = ModelState.STOPPING
    await eventually(lambda: "bytes of vram too little are free" in words[-1])
    assert not loading, "its memory is not free before it is"
    tenants["near"].state = ModelState.UNLOADED
    driver[1].write_text(f"{A} {80 * G} {70 * G}\n{B} {80 * G} {75 * G}\n")
    await asyncio.wait_for(task, 10)
    assert loading and set(evicted) == {"near"}


async def test_what_a_model_takes_of_a_gpu_is_learnt(driver, tmp_path):
    """Undeclared: the file's size at first, then what was free less after its load, also for the next proxy."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x" * 1000)
    models = {"m": {"path": str(file)}, "cpu": {"path": str(file), "args": ["-ngl", "0"]}}
    state = StateDir.open(tmp_path / "state")
    room, _ = make_room(driver, models, [], state=state)
    assert room.need("m") == {Pool.RAM: 0, Pool.VRAM: 1000}
    async with room.reserved("m", print):
        driver[1].write_text(f"{A} {80 * G} {50 * G}\n{B} {80 * G} {9 * G}\n")
    assert room.need("m")[Pool.VRAM] == 21 * G
    room.save()
    after, _ = make_room(driver, models, [], state=state)
    assert after.need("m")[Pool.VRAM] == 21 * G


def test_without_a_driver_an_undeclared_model_needs_no_gpu_memory_that_is_known(tmp_path):
    room, _ = make_room((lambda: None, None), {"m": {}}, [])
    assert room.need("m") == {Pool.RAM: 0}
