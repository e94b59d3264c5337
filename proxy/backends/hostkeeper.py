"""Keeps hosts: wakes one before a load, runs its idle command when nobody needs it. One owner per host.

The machine (`hosts.step`) says where a host is, `hosts.due` what is due; this shell probes, runs the hooks, logs and counts.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, assert_never

from proxy import logs
from proxy.backends import hooks, hosts
from proxy.backends.hosts import Due, HostCause, HostEvent, HostState, Retire, Sleep, Stay, Use
from proxy.clock import Clock
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.settings import Host, Wake

PROBE_EVERY_S: Final = 15.0
LOOK_S: Final = 1.0
"""How often it looks; a shorter idle time is met a fraction of itself late."""
LOOKS_PER_IDLE_TIME: Final = 10.0
RESEND_S: Final = 5.0
"""A Wake-on-LAN packet may get lost; a host that is still going to sleep does not hear it."""
ASK_S: Final = 0.5
_log = logs.get("backends")


@dataclass(frozen=True, slots=True)
class HostStatus:
    """One host at this instant. `since_s` is how long it has been in its state, `idle_in_s` when its idle time is over."""

    name: str
    state: HostState
    since_s: float
    idle_in_s: float | None
    error: str


class HostKeeper:
    """Owner of one host's state. All methods belong to the event loop's thread."""

    def __init__(
        self,
        name: str,
        settings: Host,
        *,
        use: Callable[[str], Use],
        unload: Callable[[str], object],
        wanted: Callable[[str], bool],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`use(name)` tells what needs the host now; `unload(model)` begins an unload; `wanted(model)` tells of requests."""
        self.name: Final = name
        self._settings = settings
        self._use = use
        self._unload = unload
        self._wanted = wanted
        self._metrics = metrics
        self._clock = clock
        self._host = hosts.Host(since=clock(), used_at=clock())
        self._waking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._hook_over = asyncio.Event()
        self._hook_over.set()
        self._probed_at: float | None = None
        self._stopped = False
        for hook in ("wake", "idle"):
            metrics.host_hook_failures.labels(name, hook)
        if settings.wake is not None:
            metrics.host_awake.labels(name).set(0)

    def start(self) -> None:
        """Begin to look after the host."""
        self._watching = asyncio.create_task(self._watch(), name=f"host:{self.name}")

    async def stop(self) -> None:
        """End hooks and looks; nothing is woken any more. Idempotent."""
        self._stopped = True
        tasks = [task for task in (self._watching, self._waking) if task is not None]
        self._watching = self._waking = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def status(self) -> HostStatus:
        """Return the host as it is now."""
        host, now, idle = self._host, self._clock(), self._settings.idle
        left = None
        if (
            idle is not None
            and idle.after_s is not None
            and host.state in (HostState.UNKNOWN, HostState.AWAKE)
        ):
            left = max(0.0, idle.after_s - (now - hosts.used(host, self._use(self.name), now).used_at))
        return HostStatus(self.name, host.state, now - host.since, left, host.error)

    # -- waking -----------------------------------------------------------------------------------------

    async def ensure(self, model: str, *, asked: bool, told: Callable[[str], None]) -> None:
        """Return once the host answers; `told` gets what is waited for. Raises `ProxyError` (`wake_failed`).

        All loads share one waking; a cancelled one does not end it. One that nobody `asked` for and no request wants (a
        restart after a crash) wakes nobody: a host that was switched off stays off.
        """
        await self._hook_done(told)
        wake = self._settings.wake
        if wake is None:
            # nobody can tell: it is used, so it is taken for awake
            self._post(HostEvent.ANSWERED, HostCause.REQUEST)
            return
        if self._waking is None or self._waking.done():
            if await self._probe(HostCause.REQUEST):
                return
            self._begin_waking(wake, model, asked=asked)
        waking = self._waking
        if waking is None:
            return
        told(f"host {self.name} is being woken")
        await asyncio.wait((waking,))
        if waking.cancelled():
            raise ProxyError(ErrorCode.SHUTTING_DOWN, "the proxy is shutting down")
        error = waking.exception()
        if isinstance(error, ProxyError):
            raise ProxyError(error.code, error.message)
        if error is not None:
            raise error

    def _begin_waking(self, wake: Wake, model: str, *, asked: bool) -> None:
        """Begin to wake the host, unless another load has begun meanwhile."""
        if self._waking is not None and not self._waking.done():
            return
        if self._stopped:
            raise ProxyError(ErrorCode.SHUTTING_DOWN, "the proxy is shutting down")
        wanted = self._wanted(model)
        if not asked and not wanted:
            raise ProxyError(
                ErrorCode.WAKE_FAILED,
                f"host {self.name!r} of model {model!r} does not answer at {wake.probe}; "
                "it is woken when a request or an operator's load wants the model",
            )
        cause = HostCause.REQUEST if wanted else HostCause.OPERATOR
        self._post(HostEvent.WAKE_BEGUN, cause)
        self._waking = asyncio.create_task(self._wake(wake, cause), name=f"wake:{self.name}")
        # with nobody left to wait for it, its failure is told by the state
        self._waking.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _hook_done(self, told: Callable[[str], None]) -> None:
        """Wait for an idle command that runs, and for what it began: a host that goes to sleep still answers."""
        while True:
            if not self._hook_over.is_set():
                told(f"the idle command of host {self.name} runs")
                await self._hook_over.wait()
            left_s = self._host.settled_at - self._clock()
            if left_s <= 0:
                return
            told(f"host {self.name} goes to sleep; it is woken after that")
            await asyncio.sleep(left_s)

    async def _wake(self, wake: Wake, cause: HostCause) -> None:
        began, trouble, tail = self._clock(), "", ""
        try:
            if wake.command is not None:
                end = await hooks.run(wake.command, wake.timeout_s)
                trouble, tail = end.trouble, end.tail
            if not trouble:
                async with asyncio.timeout(max(0.0, wake.timeout_s - (self._clock() - began))):
                    await self._until_it_answers(wake)
        except TimeoutError:
            trouble = f"it did not answer at {wake.probe} within {wake.timeout_s:g} s"
        except OSError as error:
            trouble = f"the packet could not be sent to {wake.broadcast}: {error.strerror or error}"
        except asyncio.CancelledError:
            self._post(HostEvent.WAKE_FAILED, HostCause.SHUTDOWN, error="the proxy is shutting down")
            raise
        if trouble:
            words = f"{trouble}: {tail}" if tail else trouble
            self._failed("wake", HostEvent.WAKE_FAILED, words, cause)
            raise ProxyError(ErrorCode.WAKE_FAILED, f"host {self.name!r} was not woken: {words}")
        self._post(HostEvent.ANSWERED, cause)

    async def _until_it_answers(self, wake: Wake) -> None:
        sent_at: float | None = None
        while True:
            if wake.mac is not None and (sent_at is None or self._clock() - sent_at >= RESEND_S):
                hooks.send_packet(wake.mac, wake.broadcast, wake.port)
                sent_at = self._clock()
            if await hooks.answers(wake.probe):
                return
            await asyncio.sleep(ASK_S)

    # -- idle -------------------------------------------------------------------------------------------

    def _look(self) -> Due:
        """Bring the time of the last use up to date; return what is due."""
        now, use = self._clock(), self._use(self.name)
        self._host = hosts.used(self._host, use, now)
        idle = self._settings.idle
        return hosts.due(self._host, use, now, idle.after_s if idle else None)

    async def look(self) -> None:
        """Look once: probe when it is time, unload or run the idle command when that is due."""
        now = self._clock()
        if self._settings.wake is not None and (
            self._probed_at is None or now - self._probed_at >= PROBE_EVERY_S
        ):
            await self._probe(HostCause.PROBE)
        match self._look():
            case Stay():
                return
            case Retire(models):
                for model in models:
                    self._unload(model)
            case Sleep():
                if self._settings.wake is not None:
                    await self._probe(HostCause.PROBE)
                # a request may have come meanwhile, or it sleeps already
                if isinstance(self._look(), Sleep):
                    await self._idle()
            case other:
                assert_never(other)

    async def _idle(self) -> None:
        idle = self._settings.idle
        if idle is None:
            return
        self._hook_over.clear()
        try:
            self._post(HostEvent.IDLE_BEGUN, HostCause.IDLE)
            end = await hooks.run(idle.command, idle.timeout_s)
            if end.trouble:
                self._failed("idle", HostEvent.IDLE_FAILED, end.words, HostCause.IDLE)
            else:
                self._post(HostEvent.IDLE_DONE, HostCause.IDLE, settle_s=idle.settle_s)
        except asyncio.CancelledError:
            self._post(HostEvent.IDLE_FAILED, HostCause.SHUTDOWN, error="the proxy is shutting down")
            raise
        finally:
            self._hook_over.set()

    async def _watch(self) -> None:
        idle = self._settings.idle
        after_s = idle.after_s if idle is not None else None
        every_s = min(LOOK_S, after_s / LOOKS_PER_IDLE_TIME) if after_s else LOOK_S
        while True:
            try:
                await self.look()
            except Exception:
                _log.exception("a host could not be looked after", host=self.name)
            await asyncio.sleep(every_s)

    # -- both -------------------------------------------------------------------------------------------

    async def _probe(self, cause: HostCause) -> bool:
        """Ask the host once, and note what it said; one that is being woken is its waking's to tell."""
        wake = self._settings.wake
        if wake is None:
            return True
        seen = await hooks.answers(wake.probe)
        self._probed_at = self._clock()
        if self._host.state is not HostState.WAKING:
            self._post(HostEvent.ANSWERED if seen else HostEvent.SILENT, cause)
        return seen

    def _post(self, event: HostEvent, cause: HostCause, *, settle_s: float = 0.0, error: str = "") -> None:
        self._host, moved = hosts.step(
            self._host, event, self._clock(), cause=cause, settle_s=settle_s, error=error
        )
        if moved is None:
            return
        before, after = moved.before.value, moved.after.value
        self._metrics.host_transitions.labels(self.name, before, after, cause.value).inc()
        if self._settings.wake is not None:
            self._metrics.host_awake.labels(self.name).set(moved.after is HostState.AWAKE)
        _log.info("host state", host=self.name, before=before, after=after, cause=cause.value)

    def _failed(self, hook: str, event: HostEvent, words: str, cause: HostCause) -> None:
        self._metrics.host_hook_failures.labels(self.name, hook).inc()
        _log.error("host hook failed", host=self.name, hook=hook, error=words)
        self._post(event, cause, error=words)
