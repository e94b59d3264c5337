"""Why a model's queue does not move: who waits first, for what, who holds what it waits for, what to do. Pure."""

from collections.abc import Sequence
from typing import Any, Final, assert_never

from proxy.admission import ModelAdmissionView, TicketView
from proxy.backends import ModelStatus
from proxy.types import EnginePhase, ModelState, Reason, Snapshot, TicketState

_ON_THE_ENGINE: Final = frozenset(
    {TicketState.PREFILL, TicketState.READY, TicketState.GENERATING, TicketState.PAUSED}
)
_HOLDS: Final = _ON_THE_ENGINE | {TicketState.GRANTED, TicketState.CANCELLING}
_DOING: Final = {
    EnginePhase.IDLE: "the engine is idle",
    EnginePhase.PREFILL_OPEN: "the engine reads prompts, and its cohort takes more",
    EnginePhase.PREFILL_SEALED: "the engine reads the prompts of a cohort that nobody enters any more",
    EnginePhase.YIELD_PREFILL: "answers pause while the engine reads late prompts",
    EnginePhase.GENERATE: "the engine generates the answers of its cohort",
    EnginePhase.UNKNOWN: "what the engine does cannot be seen",
}


def why(
    status: ModelStatus,
    view: ModelAdmissionView,
    tickets: Sequence[TicketView],
    snapshot: Snapshot | None,
    now: float,
) -> dict[str, Any] | None:
    """Return why the first of a model's waiting requests waits, as JSON values; None when nobody waits.

    `tickets` are the model's. `head` is the first in line, or who has waited longest in the engine's own queue.
    `holder` is the request that holds the box: the longest prompt being read, else who has been on the engine longest.
    """
    head = _head(tickets)
    if head is None or head.reason is None:
        return None
    holder = _holder(tickets)
    return {
        "reason": head.reason.value,
        "words": _words(head.reason, head, holder, status, view, snapshot, now),
        "next": _next(head.reason, holder, status),
        "head": {"id": head.id, "key": head.key, "state": head.state.value, "age_s": round(head.age_s, 3)},
        "holder": {
            "id": holder.id,
            "key": holder.key,
            "state": holder.state.value,
            "prompt_tokens": holder.estimate_tokens,
            "tokens": holder.tokens,
            "age_s": round(holder.age_s, 3),
        }
        if holder
        else None,
    }


def _head(tickets: Sequence[TicketView]) -> TicketView | None:
    waiting = [ticket for ticket in tickets if ticket.reason is not None]
    first = next((ticket for ticket in waiting if ticket.position == 1), None)
    return first or max(waiting, key=lambda ticket: ticket.age_s, default=None)


def _holder(tickets: Sequence[TicketView]) -> TicketView | None:
    reading = [ticket for ticket in tickets if ticket.state is TicketState.PREFILL]
    if reading:
        return max(reading, key=lambda ticket: ticket.estimate_tokens)
    holding = [ticket for ticket in tickets if ticket.state in _HOLDS]
    on_it = [ticket for ticket in holding if ticket.state in _ON_THE_ENGINE]
    return max(on_it or holding, key=lambda ticket: ticket.age_s - ticket.queued_s, default=None)


def _words(
    reason: Reason,
    head: TicketView,
    holder: TicketView | None,
    status: ModelStatus,
    view: ModelAdmissionView,
    snapshot: Snapshot | None,
    now: float,
) -> str:
    match reason:
        case Reason.GATE_BLOCKED:
            return f"an operator blocked its gate{_because(view.gate_reason)}"
        case Reason.MODEL_DRAINING:
            return f"it drains{_because(view.gate_reason)}: {view.running} requests still run"
        case Reason.MODEL_LOADING | Reason.BACKEND_DOWN | Reason.SWAP_WAIT:
            return _not_ready(status, now)
        case Reason.NO_FREE_SLOT:
            if view.backends and all(backend.draining for backend in view.backends):
                return (
                    "its engines are about to go (the name has other addresses now), and no other serves yet"
                )
            if head.tasks > 1 and view.free > 0:
                return f"{_too_few(head, view)}; {_engine(snapshot, holder)}"
            takers = "".join(f", {taker}" for taker in _takers(view))
            return f"all {view.slots} slots are taken{takers}; {_engine(snapshot, holder)}"
        case Reason.COHORT_SEALED:
            return f"it waits for the next cohort; {_engine(snapshot, holder)}"
        case Reason.COHORT_SHAPE:
            return f"its prompt (about {head.estimate_tokens} tokens) would hold up the cohort that is being read"
        case Reason.FAIRNESS:
            return "it is another key's turn: its own has had more"
        case Reason.WIDE_REQUEST:
            return f"{_too_few(head, view)}; {_engine(snapshot, holder)}"
        case _:
            assert_never(reason)


def _too_few(head: TicketView, view: ModelAdmissionView) -> str:
    """Say how many slots of one engine a request needs: what waits holds none yet, so its cost does not tell."""
    needs = min(head.tasks, max((backend.slots for backend in view.backends), default=head.tasks))
    takers = ", ".join(_takers(view))
    taken = f" (taken: {takers})" if takers else ""
    return f"it needs {needs} slots at once and {view.free} of {view.slots} are free{taken}"


def _takers(view: ModelAdmissionView) -> list[str]:
    """Say how many slots are taken by what is no running request of ours."""
    foreign = sum(backend.foreign for backend in view.backends)
    found = [(view.cancelling, "by requests that are being ended"), (foreign, "by somebody else")]
    return [f"{count} {who}" for count, who in found if count]


def _not_ready(status: ModelStatus, now: float) -> str:
    since = f"for {now - status.since:.0f} s"
    match status.state:
        case ModelState.STARTING | ModelState.LOADING:
            if status.waits_for:
                return f"its load waits {since}: {status.waits_for}"
            stage = f", stage {status.stage.value}" if status.stage else ""
            return f"it is being loaded {since}{stage}"
        case ModelState.FAILED:
            again = ""
            if status.retry_at is not None:
                again = f"; it is tried again in {max(0.0, status.retry_at - now):.0f} s"
            return f"{_first_line(status.last_error) or 'its engine ended'}{again}"
        case ModelState.STOPPING:
            return f"it is being stopped {since} ({status.cause.value}) and loaded again after that"
        case ModelState.UNLOADED:
            return "it is not loaded; its load was asked for"
        case ModelState.READY:
            return "it has just become ready"
        case _:
            assert_never(status.state)


def _next(reason: Reason, holder: TicketView | None, status: ModelStatus) -> str | None:
    """Return the command that would help, None where waiting does."""
    match reason:
        case Reason.GATE_BLOCKED:
            return f"llama-proxy gate open {status.model}"
        case Reason.MODEL_LOADING | Reason.BACKEND_DOWN:
            return f"llama-proxy logs {status.model}" if status.state is ModelState.FAILED else None
        case Reason.NO_FREE_SLOT | Reason.COHORT_SEALED | Reason.WIDE_REQUEST:
            return f"llama-proxy cancel {holder.id}" if holder else "llama-proxy doctor --reconcile"
        case Reason.MODEL_DRAINING | Reason.SWAP_WAIT | Reason.COHORT_SHAPE | Reason.FAIRNESS:
            return None
        case _:
            assert_never(reason)


def _engine(snapshot: Snapshot | None, holder: TicketView | None) -> str:
    doing = _DOING[snapshot.phase if snapshot is not None else EnginePhase.UNKNOWN]
    if holder is None:
        return doing
    size = f"about {holder.estimate_tokens} tokens of prompt, {holder.tokens} of answer"
    return f"{doing}; {holder.id} of {holder.key} holds it ({size}, {holder.age_s:.0f} s old)"


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
