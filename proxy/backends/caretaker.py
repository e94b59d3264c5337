"""Unloads models that nobody has used for their `ttl_s`, unless something is kept awake; lets leases run out.

Now and then it also tries again to write down what a full or read-only disk did not take.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from proxy import logs
from proxy.backends.leasing import Leasing
from proxy.backends.runner import ModelRunner
from proxy.clock import Clock

LOOK_S: Final = 1.0
"""How often it looks; a shorter ttl is met a fraction of itself late."""
LOOKS_PER_TTL: Final = 10.0
CATCH_UP_S: Final = 10.0
"""How often what could not be written is tried again."""
_log = logs.get("backends")


def idle_for(idle_since: float | None, now: float) -> float:
    """Return for how long a model has been idle, 0 while it is not."""
    return 0.0 if idle_since is None else max(0.0, now - idle_since)


class Caretaker:
    """One task for the whole fleet. It never stops anything itself: it asks for an unload."""

    def __init__(
        self,
        runners: Mapping[str, ModelRunner],
        ttl_s: Mapping[str, float],
        *,
        leasing: Leasing,
        wanted: Callable[[str], bool],
        unload: Callable[[str], object],
        catch_up: Callable[[], object],
        clock: Clock,
    ) -> None:
        """`ttl_s` has the models that may be unloaded, and may change; `wanted` tells whether requests wait for or use one."""
        self._runners = runners
        self._ttl_s = ttl_s
        self._leasing = leasing
        self._wanted = wanted
        self._unload = unload
        self._catch_up = catch_up
        self._caught_up_at = clock()
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin looking."""
        self._task = asyncio.create_task(self._run(), name="caretaker")

    async def stop(self) -> None:
        """Look no more. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))

    def look(self) -> None:
        """Look once."""
        self._leasing.expire()
        now = self._clock()
        if now - self._caught_up_at >= CATCH_UP_S:
            self._caught_up_at = now
            self._catch_up()
        if self._leasing.awake():
            return
        for name, ttl_s in self._ttl_s.items():
            if idle_for(self._runners[name].idle_since, now) >= ttl_s and not self._wanted(name):
                self._unload(name)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min([LOOK_S, *(ttl / LOOKS_PER_TTL for ttl in self._ttl_s.values())]))
            try:
                self.look()
            except Exception:
                _log.exception("the caretaker failed")
