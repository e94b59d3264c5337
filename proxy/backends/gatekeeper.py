"""Keeps the operators' gates: applies them, remembers them across proxies, and lets jobs drain a model meanwhile."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from proxy import logs
from proxy.backends.gates import MAX_REASON, OPEN, Gate, GateMode, decode, effective, encode
from proxy.backends.ports import GateChanged, Listener, Requests
from proxy.clock import wall
from proxy.metrics import Metrics
from proxy.state import StateDir
from proxy.types import NOBODY, AdminState, Audit

FILE: Final = "gates.json"
SAVE_S: Final = 10.0
"""How long who orders a gate waits for the disk; it is effective at once, and written when the disk takes it."""
_log = logs.get("backends")
Apply = Callable[[str, Gate], None]
"""Puts a gate on a model's own life: loads by requests are refused behind it."""


class Gatekeeper:
    """One gate per model. What holds is the operator's gate, or a job's draining over an open one."""

    def __init__(
        self,
        models: tuple[str, ...],
        *,
        state: StateDir,
        requests: Requests,
        apply: Apply,
        metrics: Metrics,
        tell: Listener,
    ) -> None:
        self._gates: dict[str, Gate] = {}
        self._draining: dict[str, list[Gate]] = {}
        self._state = state
        self._requests = requests
        self._apply_to_life = apply
        self._metrics = metrics
        self._tell = tell
        self._saving = asyncio.Lock()
        self._savers: set[asyncio.Task[str]] = set()
        self._saver: asyncio.Task[str] | None = None
        """Writes, or wrote, the gates as they are; None since the last change."""
        for name in models:
            self.add(name)

    def add(self, model: str) -> None:
        """Take in a model, with an open gate."""
        self._gates[model], self._draining[model] = OPEN, []
        self._saver = None
        self._metrics.gate_blocked.labels(model).set(0)

    def forget(self, model: str) -> None:
        """Let go of a model that is no more."""
        self._gates.pop(model, None)
        self._saver = None
        self._draining.pop(model, None)

    def restore(self) -> None:
        """Apply the gates that an earlier proxy left; a model that is no more is forgotten."""
        for name, gate in (self._state.read(FILE, decode) or {}).items():
            if name in self._gates:
                _log.info("gate restored", model=name, state=gate.state.value, reason=gate.reason)
                self._gates[name] = gate
                self._apply(name)

    def gate(self, model: str) -> Gate:
        """Return the operator's gate of a model; an open one for a model that is no more."""
        return self._gates.get(model, OPEN)

    def effective(self, model: str) -> Gate:
        """Return what holds now for new requests."""
        draining = self._draining[model]
        return effective(self._gates[model], draining[-1] if draining else None)

    def set(self, model: str, gate: Gate) -> None:
        """Set a gate, effective before this returns; `save` makes it last."""
        before = self._gates[model]
        self._gates[model] = gate
        self._saver = None
        _log.info(
            "gate",
            model=model,
            state=gate.state.value,
            mode=gate.mode,
            reason=gate.reason,
            key=gate.audit.key,
            address=gate.audit.address,
            before=before.state.value,
        )
        self._apply(model)

    async def save(self, within_s: float = SAVE_S) -> str:
        """Write the gates down; return an empty text, or why they will not survive the proxy.

        They are written whether or not the caller stays; the answer comes `within_s`, whatever the disk does.
        """
        saver = self._saver
        if saver is None or (saver.done() and saver.result()):
            saver = self.save_soon()
        done, _ = await asyncio.wait((saver,), timeout=within_s)
        return saver.result() if done else f"{FILE} is still being written: the disk is slow or hangs"

    def save_soon(self) -> "asyncio.Task[str]":
        """Begin to write the gates down, for whoever may not live to see it done."""
        self._saver = saver = asyncio.create_task(self._save(), name="save-gates")
        self._savers.add(saver)
        saver.add_done_callback(self._savers.discard)
        return saver

    def catch_up(self) -> None:
        """Try again to write what could not be written: the disk may have room by now."""
        if self._state.behind(FILE) and not self._savers:
            self.save_soon()

    async def close(self) -> None:
        """Finish writing."""
        if self._savers:
            await asyncio.wait(self._savers)

    async def _save(self) -> str:
        async with self._saving:
            return await asyncio.to_thread(self._state.write, FILE, encode(self._gates))

    @contextlib.contextmanager
    def draining(self, model: str, gate: Gate) -> Iterator[None]:
        """Let the model drain while the block runs; jobs may overlap, and the model may be forgotten meanwhile."""
        self._draining[model].append(gate)
        self._apply(model)
        try:
            yield
        finally:
            draining = self._draining.get(model, [])
            if gate in draining:
                draining.remove(gate)
                self._apply(model)

    def _apply(self, model: str) -> None:
        gate = self.effective(model)
        self._metrics.gate_blocked.labels(model).set(gate.state is AdminState.BLOCKED)
        self._apply_to_life(model, gate)
        self._requests.gate(model, gate)
        self._tell(GateChanged(model, gate))


def blocked(reason: str, mode: GateMode = "hold", audit: Audit = NOBODY) -> Gate:
    """Return a gate that lets no new request pass: they wait, or are refused with the reason."""
    return Gate(AdminState.BLOCKED, reason[:MAX_REASON], mode, audit, wall())


def opened(audit: Audit = NOBODY) -> Gate:
    """Return an open gate with who opened it."""
    return Gate(AdminState.ENABLED, "", "hold", audit, wall())
