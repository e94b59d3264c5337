"""The parser of `/slots`: recorded answers, the phase fields, and hostile JSON."""

import contextlib
import copy
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.backends.client import ProbeError
from proxy.backends.probes import parse_props
from proxy.backends.slots import ParseError, SlotsReport, parse
from proxy.types import EnginePhase, MemberState, PhaseEvent, PhasePolicy

DATA = Path(__file__).parent / "data"


def recorded(name: str) -> bytes:
    return (DATA / name).read_bytes()


def phase(engine="generate", member="generate", **more):
    """A slot's phase object as a phase-aware engine writes it."""
    return {
        "engine": engine,
        "sealed": True,
        "cohort": 7,
        "member": member,
        "t_queue_ms": 1.5,
        "t_wait_ms": 20.25,
        "t_paused_ms": 0.0,
        "n_prompt_total": 120,
        "request": "a1b2.3",
        "decode_running_ms": 12.5,
    } | more


def native(*phases):
    return [
        {"id": i, "n_ctx": 1024, "speculative": False, "is_processing": p["member"] != "none", "phase": p}
        for i, p in enumerate(phases)
    ]


def light(*phases, **more):
    slots = [{"id": i, "is_processing": p["member"] != "none", "phase": p} for i, p in enumerate(phases)]
    events = [
        {
            "seq": 5,
            "t_us": 1000,
            "event": "admit",
            "slot": 0,
            "cohort": 7,
            "request": "a1b2.3",
            "tokens": 120,
        },
        {"seq": 6, "t_us": 2000, "event": "open", "slot": -1, "cohort": 7, "request": "", "tokens": 0},
    ]
    return {"slots": slots, "events": events, "seq": 6, "lost": 2} | more


def test_stock_fresh():
    """A never-used slot has four keys."""
    report = parse(recorded("slots-stock-fresh.json"))
    assert [slot.id for slot in report.slots] == [0, 1, 2, 3]
    assert report.busy == 0 and not report.native and report.phase is EnginePhase.UNKNOWN


def test_stock_busy():
    """A busy slot says what it holds; an idle one that was used before says nothing."""
    report = parse(recorded("slots-stock-busy.json"))
    assert report.busy == 1
    slot = report.slots[3]
    assert (slot.busy, slot.task, slot.held_tokens, slot.decoded_tokens) == (True, 2, 68, 63)
    assert slot.prompt_tokens is None and slot.tag == "" and slot.member is MemberState.NONE
    idle = report.slots[2]
    assert not idle.busy and idle.task is None and idle.held_tokens is None


def test_stock_idle_fields_are_not_believed():
    report = parse(recorded("slots-stock-idle.json"))
    assert report.busy == 0 and all(slot.task is None for slot in report.slots)


def test_native_full_view():
    report = parse(orjson.dumps(native(phase(), phase(member="ready", request=""), phase(member="none"))))
    assert report.native and report.phase is EnginePhase.GENERATE and report.cohort == 7
    assert report.decode_running_ms == 12.5
    first = report.slots[0]
    assert (first.tag, first.member, first.prompt_tokens) == ("a1b2.3", MemberState.GENERATE, 120)
    assert (first.queue_ms, first.wait_ms, first.paused_ms) == (1.5, 20.25, 0.0)
    assert not report.slots[2].busy and report.seq is None


def test_native_light_view():
    report = parse(orjson.dumps(light(phase())))
    assert report.native and (report.seq, report.lost) == (6, 2)
    assert report.events == (
        PhaseEvent(5, 1000, "admit", 0, 7, "a1b2.3", 120),
        PhaseEvent(6, 2000, "open", None, 7, "", 0),
    )
    assert report.slots[0].held_tokens is None


@pytest.mark.parametrize("name", ["slots-native-busy.json", "slots-native-light.json"])
def test_native_recorded(name):
    """As a phase-aware engine under `drain` wrote it: one generates, a latecomer waits on its slot."""
    report = parse(recorded(name))
    assert report.native and report.phase is EnginePhase.GENERATE and report.cohort == 1
    late, first = report.slots[2], report.slots[3]
    assert (first.tag, first.member, first.cohort) == ("aa.1", MemberState.GENERATE, 1)
    assert first.decoded_tokens and first.held_tokens == first.prompt_tokens + first.decoded_tokens
    assert (late.tag, late.member, late.cohort) == ("bb.1", MemberState.QUEUED, None)
    assert late.prompt_tokens == 1802 and late.queue_ms > 0 and late.decoded_tokens == 0
    assert not report.slots[0].busy
    if "light" in name:
        assert report.seq == report.events[-1].seq and report.engine_us > report.events[-1].t_us
        assert [e.event for e in report.events] == ["admit", "admit", "ready", "seal", "open", "admit"]
        assert report.events[4].slot is None


@pytest.mark.parametrize(
    ("engine", "sealed", "members", "wanted"),
    [
        ("idle", False, ["none"], EnginePhase.IDLE),
        ("prefill", False, ["prefill", "none"], EnginePhase.PREFILL_OPEN),
        ("prefill", True, ["prefill", "ready"], EnginePhase.PREFILL_SEALED),
        ("prefill", True, ["prefill", "paused"], EnginePhase.YIELD_PREFILL),
        ("prefill", False, ["prefill", "paused"], EnginePhase.YIELD_PREFILL),
        ("generate", True, ["generate", "queued"], EnginePhase.GENERATE),
    ],
)
def test_engine_phase(engine, sealed, members, wanted):
    """The shown phase follows from the engine's, the seal and paused members."""
    slots = native(*(phase(engine, member, sealed=sealed) for member in members))
    assert parse(orjson.dumps(slots)).phase is wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[0].pop("id"), r"slots\[0\]\.id: is missing"),
        (lambda s: s[0].update(id=-1), r"slots\[0\]\.id: expected an integer of at least 0, found -1"),
        (lambda s: s[1].update(id=0), "two slots have the same id"),
        (
            lambda s: s[1].update(is_processing=1),
            r"slots\[1\]\.is_processing: expected true or false, found 1",
        ),
        (lambda s: s[0]["phase"].update(engine="sleeping"), r"slots\[0\]\.phase\.engine: 'sleeping'"),
        (lambda s: s[0]["phase"].update(member="dreaming"), r"slots\[0\]\.phase\.member: 'dreaming'"),
        (lambda s: s[0]["phase"].update(request=5), r"slots\[0\]\.phase\.request: expected a text"),
        (lambda s: s[0]["phase"].update(t_wait_ms="x"), r"slots\[0\]\.phase\.t_wait_ms: expected a number"),
        (lambda s: s[0]["phase"].update(sealed=None), r"slots\[0\]\.phase\.sealed"),
        (lambda s: s[1].pop("phase"), "1 of 2 slots have a phase"),
        (lambda s: s[0].update(phase=[]), r"slots\[0\]\.phase: expected an object"),
        (lambda s: s.append(3), r"slots\[2\]: expected an object, found int"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    slots = native(phase(), phase(member="ready"))
    change(slots)
    with pytest.raises(ParseError, match=message):
        parse(orjson.dumps(slots))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 5000, b"null", b'"x"', b"{}", b'{"error":{"code":503}}', b"\xff"]
)
def test_not_slots_at_all(body):
    with pytest.raises(ParseError):
        parse(body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_BASES = [
    orjson.loads(recorded("slots-stock-busy.json")),
    orjson.loads(recorded("slots-stock-fresh.json")),
    native(phase(), phase(member="paused"), phase(member="none")),
    light(phase(), phase("prefill", "prefill")),
    orjson.loads(recorded("slots-native-busy.json")),
    orjson.loads(recorded("slots-native-light.json")),
]


def paths(value, at=()):
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*at, key))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_mutation_is_parsed_or_refused(data):
    """Replace or remove anything in a real answer: a sound report or a `ParseError`, nothing else."""
    mutated = copy.deepcopy(data.draw(st.sampled_from(_BASES)))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(paths(mutated))))
        if not path:
            mutated = data.draw(_JSON)
            continue
        at = mutated
        for key in path[:-1]:
            at = at[key]
        if isinstance(at, dict) and data.draw(st.booleans()):
            del at[path[-1]]
        else:
            at[path[-1]] = data.draw(_JSON)
    try:
        body = orjson.dumps(mutated)
    except TypeError:  # an integer beyond 64 bits
        return
    try:
        report = parse(body)
    except ParseError as error:
        assert str(error)
        return
    assert isinstance(report, SlotsReport) and 0 <= report.busy <= len(report.slots)
    for slot in report.slots:
        assert slot.busy or (slot.tag == "" and slot.task is None and slot.member is MemberState.NONE)
        assert isinstance(slot.tag, str) and all(n is None or n >= 0 for n in (slot.held_tokens, slot.cohort))


@given(st.binary(max_size=200))
def test_any_bytes(body):
    with contextlib.suppress(ParseError):
        parse(body)


def test_props():
    """Stock and patched `/props`; a missing field is named."""
    stock = orjson.loads(recorded("props-stock.json"))
    info = parse_props(stock)
    assert (info.slots, info.context_tokens, info.policy) == (4, 1024, PhasePolicy.UNKNOWN)
    assert info.modalities == {"vision": False, "video": False, "audio": False}
    assert info.build == stock["build_info"]
    patched = stock | {
        "phase": {"policy": "yield", "yield_ms": 2000, "admit_ms": 0},
        "build": {"series": "ab12"},
    }
    info = parse_props(patched)
    assert info.policy is PhasePolicy.YIELD and info.series == "ab12"
    with pytest.raises(ProbeError, match="total_slots: expected a number, found None"):
        parse_props({k: v for k, v in stock.items() if k != "total_slots"})
