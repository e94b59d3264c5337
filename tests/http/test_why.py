"""Why nothing moves: for every reason there is, words that name who waits, for what, and who holds it."""

import asyncio

import pytest

from proxy.admission import BackendView, Mirror, ModelAdmissionView, TicketView
from proxy.app.why import why
from proxy.backends import Kind, ModelStatus, Stage
from proxy.types import (
    AdminState,
    BackendKey,
    Cause,
    EnginePhase,
    ModelState,
    Reason,
    Snapshot,
    TicketState,
)

from .test_operate import CHAT, ask, proxy
from .world import until

KEY = BackendKey("demo", "process", 1)
NOW = 1000.0


def ticket(name, state=TicketState.QUEUED, reason=None, position=0, age_s=10.0, queued_s=0.0, **more):
    made = {
        "key": "alice", "priority": "normal", "endpoint": "chat", "stream": True, "tasks": 1, "cost": int(state is not TicketState.QUEUED),
        "body_bytes": 9, "tokens": 0, "backend": None, "tag": "", "cohort": None, "held_s": {},
    } | more  # fmt: skip
    return TicketView(
        id=name, model="demo", state=state, reason=reason, position=position, age_s=age_s, queued_s=queued_s,
        **made,
    )  # fmt: skip


def status(state=ModelState.READY, **more):
    return ModelStatus("demo", Kind.PROCESS, state, AdminState.ENABLED, "", Cause.REQUEST, 1, NOW - 7, **more)


def view(*, gate_reason="", running=2, free=0, cancelling=0, foreign=0):
    books = BackendView(KEY, 4, 4, cancelling, foreign, free, 0, Mirror.NATIVE, 2)
    return ModelAdmissionView(
        "demo", AdminState.ENABLED, gate_reason, "hold", 1, running, cancelling, 9, 1.0, {}, {}, (books,)
    )


def seen(phase):
    return Snapshot(KEY, NOW, NOW, (), native=True, phase=phase)


LONG = ticket("long", TicketState.PREFILL, age_s=300.0, queued_s=10.0, estimate_tokens=200_000)
OLD = ticket("old", TicketState.GENERATING, age_s=90.0, queued_s=1.0, estimate_tokens=20, tokens=5000)
LATE = ticket("late", TicketState.GENERATING, age_s=95.0, queued_s=80.0, tokens=10)

SCENES = {
    Reason.GATE_BLOCKED: (
        status(), view(gate_reason="new disk"), [], EnginePhase.IDLE,
        ["blocked its gate (new disk)"], None, "llama-proxy gate open demo",
    ),
    Reason.MODEL_DRAINING: (
        status(), view(gate_reason="roll-out"), [OLD], EnginePhase.GENERATE,
        ["it drains (roll-out): 2 requests still run"], "old", None,
    ),
    Reason.MODEL_LOADING: (
        status(ModelState.FAILED, last_error="no such file\nmore", retry_at=NOW + 12), view(), [], None,
        ["no such file; it is tried again in 12 s"], None, "llama-proxy logs demo",
    ),
    Reason.BACKEND_DOWN: (
        status(ModelState.LOADING, stage=Stage.LOADING), view(), [], None,
        ["being loaded for 7 s, stage loading"], None, None,
    ),
    Reason.SWAP_WAIT: (
        status(ModelState.STARTING, stage=Stage.MEMORY, waits_for="60 bytes of vram too little are free"), view(), [],
        None, ["its load waits for 7 s: 60 bytes of vram too little are free"], None, None,
    ),
    Reason.NO_FREE_SLOT: (
        status(), view(cancelling=1, foreign=2), [OLD, LATE], EnginePhase.GENERATE,
        ["all 4 slots are taken, 1 by requests that are being ended, 2 by somebody else",
         "old of alice holds it (about 20 tokens of prompt, 5000 of answer, 90 s old)"],
        "old", "llama-proxy cancel old",
    ),
    Reason.COHORT_SEALED: (
        status(), view(), [OLD, LONG], EnginePhase.PREFILL_SEALED,
        ["waits for the next cohort; the engine reads the prompts of a cohort", "about 200000 tokens of prompt"],
        "long", "llama-proxy cancel long",
    ),
    Reason.COHORT_SHAPE: (status(), view(), [LATE], EnginePhase.PREFILL_OPEN, ["about 777 tokens"], "late", None),
    Reason.FAIRNESS: (status(), view(), [LATE], EnginePhase.GENERATE, ["another key's turn"], "late", None),
    Reason.WIDE_REQUEST: (
        status(), view(free=1, foreign=1), [OLD], EnginePhase.GENERATE,
        ["needs 4 slots at once and 1 of 4 are free (taken: 1 by somebody else); the"], "old", "llama-proxy cancel old",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", SCENES, ids=lambda reason: reason.value)
def test_every_reason_is_explained(reason):
    """The head of the line, its reason, who holds what it waits for (never who waits as well), and what to do."""
    model, books, others, phase, words, holder, after = SCENES[reason]
    tasks = 9 if reason is Reason.WIDE_REQUEST else 1
    head = ticket("first", reason=reason, position=1, age_s=33.0, tasks=tasks, estimate_tokens=777)
    second = ticket("second", reason=Reason.NO_FREE_SLOT, position=2, age_s=99.0)
    shown = why(model, books, [*others, second, head], seen(phase) if phase else None, NOW)
    assert shown is not None
    assert shown["reason"] == reason.value
    assert shown["head"] == {"id": "first", "key": "alice", "state": "queued", "age_s": 33.0}
    for part in words:
        assert part in shown["words"]
    assert (shown["holder"] or {}).get("id") == holder
    assert shown["next"] == after


def test_who_needs_several_slots_reads_how_many_not_that_all_are_taken():
    head = ticket("first", reason=Reason.NO_FREE_SLOT, position=1, tasks=3)
    shown = why(status(), view(free=2, foreign=1, cancelling=1), [OLD, head], seen(EnginePhase.GENERATE), NOW)
    taken = "1 by requests that are being ended, 1 by somebody else"
    assert f"needs 3 slots at once and 2 of 4 are free (taken: {taken})" in shown["words"]


def test_every_reason_has_its_scene():
    assert set(SCENES) == set(Reason)


def test_nobody_waits_nothing_is_explained():
    assert why(status(), view(), [OLD, LONG], seen(EnginePhase.GENERATE), NOW) is None


def test_who_waits_inside_the_engine_is_the_head_when_nobody_waits_here():
    native = ticket("native", TicketState.NATIVE_QUEUED, Reason.COHORT_SEALED, age_s=5.0)
    shown = why(status(), view(), [OLD, native], seen(EnginePhase.GENERATE), NOW)
    assert shown["head"]["id"] == "native" and shown["holder"]["id"] == "old"


async def test_an_operator_reads_it_off_the_model():
    """Behind a blocked gate: `/api/models` says who waits and how to go on, and no more once the gate is open."""
    async with proxy() as (made, client):
        await ask(client, "POST", "/api/models/demo/gate", {"state": "blocked", "reason": "new disk"})
        assert (await ask(client, "GET", "/api/models/demo"))[1]["why"] is None
        headers = {"Authorization": "Bearer ka", "x-request-id": "mine"}
        waiting = asyncio.ensure_future(ask(client, "POST", "/v1/chat/completions", CHAT, headers=headers))
        await until(lambda: made.live == 1)
        shown = (await ask(client, "GET", "/api/models/default"))[1]["why"]
        assert shown["reason"] == "gate_blocked" and "new disk" in shown["words"]
        assert shown["head"]["key"] == "alice" and shown["next"] == "llama-proxy gate open demo"
        assert [one["why"] for one in (await ask(client, "GET", "/api/models"))[1]["models"]] == [
            shown | {"head": shown["head"] | {"age_s": pytest.approx(shown["head"]["age_s"], abs=5)}},
            None,
        ]
        await ask(client, "POST", "/api/models/demo/gate", {"state": "open"})
        assert (await waiting)[0] == 502, "there is no engine to load it with"
        assert (await ask(client, "GET", "/api/models/demo"))[1]["why"] is None
