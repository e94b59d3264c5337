"""Free memory of NVIDIA GPUs, asked of the driver's own library (NVML, `libnvidia-ml`).

The library comes with the driver, so that where it is missing there is nothing to measure. Five of its calls are used,
through ctypes: the C interface is stable since 2012 and needs no package. A driver may take seconds to wake up, and one
that is broken may never answer: it is asked on a thread of its own, with a deadline.
"""

import asyncio
import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from proxy import logs

LIBRARY: Final = "libnvidia-ml.so.1"
ANSWER_S: Final = 5.0
_UUID_BYTES: Final = 96
_log = logs.get("backends")


class NvmlError(Exception):
    """The driver's library refused; the message holds the call and the library's own words."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU as the driver counts them (by PCI bus)."""

    index: int
    uuid: str
    total_bytes: int
    free_bytes: int


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Nvml:
    """The driver's library. Any call may block for as long as the driver does: not for an event loop."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._begun = False
        library.nvmlErrorString.restype = ctypes.c_char_p

    @classmethod
    def open(cls, path: str = LIBRARY) -> "Nvml | None":
        """Return the library, None where there is no such driver."""
        try:
            return cls(ctypes.CDLL(path))
        except (OSError, AttributeError):
            return None

    def devices(self) -> tuple[Device, ...]:
        """Return every GPU with its memory now. Raises `NvmlError`."""
        if not self._begun:
            self._call("nvmlInit_v2")
            self._begun = True
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return tuple(self._device(index) for index in range(count.value))

    def _device(self, index: int) -> Device:
        handle, memory = ctypes.c_void_p(), _Memory()
        uuid = ctypes.create_string_buffer(_UUID_BYTES)
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        self._call("nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID_BYTES))
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return Device(index, uuid.value.decode("ascii", "replace"), memory.total, memory.free)

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code != 0:
            words = self._library.nvmlErrorString(code)
            raise NvmlError(f"{name}: {words.decode('utf-8', 'replace') if words else f'error {code}'}")


class Gpus:
    """What the proxy knows of GPUs. Says once when they cannot be read, and once when they can again."""

    def __init__(self, open_library: Callable[[], Nvml | None] = Nvml.open) -> None:
        self._nvml = open_library()
        self._pending: asyncio.Future[tuple[Device, ...]] | None = None
        self._troubled = False

    @property
    def present(self) -> bool:
        """Whether there is a driver that could be asked."""
        return self._nvml is not None

    async def devices(self) -> tuple[Device, ...]:
        """Return the GPUs as they are now; none where there are none, or where they cannot be read in time."""
        nvml = self._nvml
        if nvml is None:
            return ()
        if self._pending is None or self._pending.done():
            self._pending = _on_a_thread(nvml.devices)
        try:
            async with asyncio.timeout(ANSWER_S):
                found = await asyncio.shield(self._pending)
        except (NvmlError, AttributeError, TimeoutError) as error:
            if not self._troubled:
                words = str(error) or f"the driver gave no answer for {ANSWER_S:g} s"
                _log.warning("GPU memory cannot be measured", error=words)
            self._troubled = True
            return ()
        if self._troubled:
            _log.info("GPU memory is measured again")
        self._troubled = False
        return found


def visible(devices: Sequence[Device], chosen: str | None) -> tuple[Device, ...]:
    """Return the GPUs that a process with this `CUDA_VISIBLE_DEVICES` uses (None: it is not set).

    As the CUDA runtime reads it: indexes, or beginnings of UUIDs, up to the first that is no device. The runtime's own
    order of indexes is that of the driver only with `CUDA_DEVICE_ORDER=PCI_BUS_ID`, or where all GPUs are alike.
    """
    if chosen is None:
        return tuple(devices)
    found: list[Device] = []
    for word in (part.strip() for part in chosen.split(",")):
        if word.isdecimal():
            match = next((device for device in devices if device.index == int(word)), None)
        else:
            match = next((device for device in devices if word and device.uuid.startswith(word)), None)
        if match is None or match in found:
            break
        found.append(match)
    return tuple(found)


def _on_a_thread(work: Callable[[], tuple[Device, ...]]) -> "asyncio.Future[tuple[Device, ...]]":
    """Run `work` where it may hang without keeping anybody from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Device, ...]] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def tell(found: tuple[Device, ...] | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(found or ())

    def run() -> None:
        found, failed = None, None
        try:
            found = work()
        except Exception as error:
            failed = error
        try:
            loop.call_soon_threadsafe(tell, found, failed)
        except RuntimeError:
            return  # the loop is closed: nobody asks any more

    threading.Thread(target=run, name="nvml", daemon=True).start()
    return future
