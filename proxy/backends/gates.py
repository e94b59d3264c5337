"""Operators' gates: which models take new requests, and what becomes of those that come meanwhile. Pure.

A gate is the operator's wish and outlives the proxy; draining belongs to a job and does not. What holds at an
instant is both together (`effective`): a model that drains does so whatever its gate, a blocked one stays blocked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from proxy.types import NOBODY, AdminState, Audit

GateMode = Literal["hold", "reject"]
MODES: Final[tuple[GateMode, ...]] = ("hold", "reject")
MAX_REASON: Final = 500


@dataclass(frozen=True, slots=True)
class Gate:
    """One model's gate. `mode` says whether requests that come are held or refused; `since_wall` is for people."""

    state: AdminState = AdminState.ENABLED
    reason: str = ""
    mode: GateMode = "hold"
    audit: Audit = NOBODY
    since_wall: float = 0.0

    @property
    def open(self) -> bool:
        """Whether new requests pass."""
        return self.state is AdminState.ENABLED


OPEN: Final = Gate()


def effective(gate: Gate, draining: Gate | None) -> Gate:
    """Return what holds now: a job that drains the model overrides an open gate, never a blocked one."""
    return draining if draining is not None and gate.open else gate


def encode(gates: Mapping[str, Gate]) -> dict[str, Any]:
    """Return gates as JSON values; open ones need no record."""
    return {
        name: {
            "state": gate.state.value,
            "reason": gate.reason,
            "mode": gate.mode,
            "key": gate.audit.key,
            "address": gate.audit.address,
            "since_wall": gate.since_wall,
        }
        for name, gate in gates.items()
        if not gate.open
    }


def decode(data: Any) -> dict[str, Gate]:
    """Return gates from what `encode` made. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
    if not isinstance(data, dict):
        raise TypeError(f"expected gates by model, found {type(data).__name__}")
    return {str(name): _gate(item) for name, item in data.items()}


def _gate(item: Any) -> Gate:
    state, mode = AdminState(item["state"]), item["mode"]
    if state is AdminState.DRAINING or mode not in MODES:
        raise ValueError(f"{state.value}, {mode!r} is not a gate")
    return Gate(
        state=state,
        reason=str(item["reason"]),
        mode=mode,
        audit=Audit(str(item["key"]), str(item["address"])),
        since_wall=float(item["since_wall"]),
    )
