"""Makes room for loads: measures memory, remembers what models took, and asks for unloads as the plan says.

RAM and the memory of NVIDIA GPUs are measured and budgeted; other GPUs' is only what models declare (`vram_bytes`)
against the configured budget (`memory.vram_bytes`). A model that declares nothing is taken at its files' size at first,
then at the most that this model with these arguments was ever seen to hold; one that is offloaded to a GPU (`-ngl`)
needs no RAM for its weights as far as is known beforehand, and GPU memory where that is measured: what was free less
after its last load.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from proxy import logs
from proxy.backends import modelfile
from proxy.backends.gpu import Device, Gpus, visible
from proxy.backends.jobs import Job
from proxy.backends.memory import Evict, Go, Pool, Resident, Rules, Sizes, Wait, concerned, plan
from proxy.clock import Clock
from proxy.settings import Engine, Memory, Model
from proxy.state import StateDir
from proxy.types import ModelState

FILE: Final = "memory.json"
LOOK_S: Final = 0.25
GPU_CHOICE: Final = "CUDA_VISIBLE_DEVICES"
_GPU_FLAGS: Final = ("-ngl", "--gpu-layers", "--n-gpu-layers")
_log = logs.get("backends")


class Tenant(Protocol):
    """What room-making reads off a model."""

    @property
    def settings(self) -> Model:
        """The configuration of what is loaded, which may be an older one than that of the next load."""

    @property
    def occupancy(self) -> tuple[ModelState, int | None, float, float | None]:
        """State, process id, monotonic time of the last state change, and since when it is idle (None: busy)."""


class Room:
    """One per fleet. Loads enter in the order of their coming; the first that waits is served first."""

    def __init__(
        self,
        settings: Memory,
        models: Mapping[str, Model],
        defaults: Engine,
        *,
        state: StateDir,
        clock: Clock,
        wanted: Callable[[str], bool],
        evict: Callable[[str], Job],
        finished: Callable[[str], bool],
        gpus: Gpus | None = None,
    ) -> None:
        """`evict(model)` begins an unload that lets running requests finish; `finished` tells whether that job has ended."""
        ram = settings.ram_bytes or psutil.virtual_memory().total
        budgets = {Pool.RAM: ram} | ({Pool.VRAM: settings.vram_bytes} if settings.vram_bytes else {})
        self._rules = Rules(budgets, settings.min_residency_s, settings.swap_patience_s)
        self._models = models
        self._defaults = defaults
        self._state = state
        self._clock = clock
        self._wanted = wanted
        self._evict = evict
        self._finished = finished
        self._gpus = gpus or Gpus()
        self._loads = 0
        self._tenants: Mapping[str, Tenant] = {}
        self._peaks: dict[str, int] = {}
        self._load_s: dict[str, float] = {}
        self._loading: dict[str, Sizes] = {}
        self._queue: list[object] = []

    def open(self, tenants: Mapping[str, Tenant]) -> None:
        """Learn who lives here, and what an earlier proxy found out."""
        self._tenants = tenants
        self._peaks = self._state.read(FILE, _decode) or {}

    @contextlib.asynccontextmanager
    async def reserved(self, model: str, told: Callable[[str], None]) -> AsyncIterator[None]:
        """Wait for room, and keep it reserved while the block loads the model. `told` gets what it waits for."""
        place, began = object(), self._clock()
        self._queue.append(place)
        evicting: list[str] = []
        try:
            while True:
                devices = await self._devices(model)
                if self._may_go(model, place, began, evicting, told, devices):
                    break
                await asyncio.sleep(LOOK_S)
            self._loading[model] = self.need(model)
        finally:
            self._queue.remove(place)
        self._loads += 1
        loads, number, alone = self._clock(), self._loads, len(self._loading) == 1
        try:
            yield
            self._load_s[model] = self._clock() - loads
            if alone and number == self._loads:
                self._learn_vram(model, devices, await self._devices(model))
        finally:
            self._loading.pop(model, None)

    async def _devices(self, model: str) -> tuple[Device, ...]:
        """Return all GPUs as they are now, none where that makes no difference to the model."""
        return await self._gpus.devices() if self.need(model).get(Pool.VRAM) else ()

    def _may_go(
        self,
        model: str,
        place: object,
        began: float,
        evicting: list[str],
        told: Callable[[str], None],
        devices: tuple[Device, ...],
    ) -> bool:
        if self._queue[0] is not place:
            told("waits for another load to find room")
            return False
        evicting[:] = [job for job in evicting if not self._finished(job)]
        if evicting:
            return False
        need, coming, residents = self.need(model), self._still_coming(), self._residents()
        free, waited_s = measured(), self._clock() - began
        mine = self._chosen(self._models[model], devices)
        if mine:
            free = {**free, Pool.VRAM: sum(device.free_bytes for device in mine)}
            near = {
                r.model
                for r in residents
                if _overlap(mine, self._chosen(self._tenants[r.model].settings, devices))
            }
            residents = concerned(need, residents, coming, self._rules.budgets, near)
        result = plan(need, residents, coming, free, rules=self._rules, waited_s=waited_s)
        match result:
            case Go(blind):
                if blind:
                    _log.warning(
                        "loaded without room", model=model, need={p.value: n for p, n in need.items()}
                    )
                return True
            case Wait(words):
                told(words)
                return False
            case Evict(models, busy):
                told(f"unloads {', '.join(models)}")
                for name in models:
                    _log.info("evicted", model=name, busy=busy, makes_room_for=model)
                    evicting.append(self._evict(name).id)
                return False

    def need(self, model: str) -> Sizes:
        """Return what loading a model takes, as far as is known."""
        return self._need(self._models[model])

    def _need(self, settings: Model) -> Sizes:
        found = {pool: size for pool, size in _declared(settings).items() if size}
        if Pool.RAM not in found and settings.path is not None:
            auto = self._peaks.get(self._peak_key(settings))
            if auto is None and not self._offloaded(settings):
                auto = modelfile.size(settings.path)
            found[Pool.RAM] = auto or 0
        if self._guesses_vram(settings):
            learnt = self._peaks.get(f"{self._peak_key(settings)}|vram")
            found[Pool.VRAM] = learnt or modelfile.size(settings.path)
        return found

    def _guesses_vram(self, model: Model) -> bool:
        """Whether a model takes GPU memory that can be measured, and does not say how much."""
        undeclared = model.vram_bytes is None and model.path is not None
        return undeclared and self._gpus.present and self._offloaded(model)

    def _learn_vram(self, model: str, before: tuple[Device, ...], after: tuple[Device, ...]) -> None:
        """Note what a model that was the only one to load has taken."""
        settings = self._models[model]
        if not before or not after or not self._guesses_vram(settings):
            return
        were, are = self._chosen(settings, before), self._chosen(settings, after)
        taken = sum(one.free_bytes for one in were) - sum(one.free_bytes for one in are)
        if taken > 0:
            self._peaks[f"{self._peak_key(settings)}|vram"] = taken

    def _chosen(self, model: Model, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Return the GPUs that the model's process may use."""
        env = {**os.environ, **self._defaults.env, **model.env}
        return visible(devices, env.get(GPU_CHOICE))

    def learn(self, model: Model, pid: int) -> None:
        """Note what a ready process holds at most, for the next load of what it was started from."""
        size = _held(pid, offloaded=self._offloaded(model))
        key = self._peak_key(model)
        if size > self._peaks.get(key, 0):
            self._peaks[key] = size

    def save(self) -> None:
        """Write down what was learnt (blocks for as long as the disk does)."""
        if self._peaks:
            self._state.write(FILE, self._peaks, durable=False)

    def _residents(self) -> list[Resident]:
        now, found = self._clock(), []
        for name, tenant in self._tenants.items():
            state, _, since, idle_since = tenant.occupancy
            if state not in (ModelState.READY, ModelState.STOPPING):
                continue
            leaving = state is ModelState.STOPPING
            idle = None if leaving or idle_since is None or self._wanted(name) else now - idle_since
            need, resident_s = self._need(tenant.settings), 0.0 if leaving else now - since
            found.append(Resident(name, need, resident_s, idle, self._load_s.get(name, 1.0)))
        return found

    def _still_coming(self) -> list[Sizes]:
        """Return what loads in progress have reserved and not taken yet."""
        found: list[Sizes] = []
        for name, need in self._loading.items():
            pid = self._tenants[name].occupancy[1]
            taken = _held(pid, offloaded=False) if pid is not None else 0
            found.append({**need, Pool.RAM: max(0, need.get(Pool.RAM, 0) - taken)})
        return found

    def _offloaded(self, model: Model) -> bool:
        args = (*self._defaults.args, *model.args)
        return any(flag in _GPU_FLAGS and value != "0" for flag, value in itertools.pairwise(args))

    def _peak_key(self, model: Model) -> str:
        return f"{model.path}|{' '.join((*self._defaults.args, *model.args))}"


def measured() -> Sizes:
    """Return the free memory of this machine, by pool."""
    return {Pool.RAM: psutil.virtual_memory().available}


def _overlap(one: tuple[Device, ...], other: tuple[Device, ...]) -> bool:
    return not {device.index for device in one}.isdisjoint(device.index for device in other)


def _declared(model: Model) -> dict[Pool, int | None]:
    return {Pool.RAM: model.ram_bytes, Pool.VRAM: model.vram_bytes}


def _held(pid: int, *, offloaded: bool) -> int:
    """Return the most a process has held in RAM; of one with its weights elsewhere only what is its own."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    field = "RssAnon:" if offloaded else "VmHWM:"
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def _decode(data: Any) -> dict[str, int]:
    return {str(key): int(size) for key, size in data.items() if int(size) > 0}
