"""Recordings: what is written comes back, a kill costs one line, and what is broken is named."""

import json
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.backends.slots import SlotsReport
from proxy.observe.recording import Recorder, Recording, RecordingError, line_of
from proxy.observe.records import (
    KINDS,
    Counters,
    End,
    Event,
    Header,
    LogLine,
    LogNote,
    Mark,
    Record,
    RecordError,
    Sample,
    ServerState,
    decode,
    encode,
)
from proxy.types import EnginePhase, MemberState, PhaseEvent, SlotView

HEADER = Header(10.0, 1e9, 0.25, ("127.0.0.1:1", "127.0.0.1:2"), ("a.log",), "0.1", "3.11")
EVENT = PhaseEvent(7, 10_100_000, "release", 1, 3, "r.1", 12)
SAMPLE = Sample(
    *(0, 1, 11.0, 11.01),
    SlotsReport(
        slots=(
            SlotView(0, busy=False),
            SlotView(
                1, busy=True, task=5, tag="r.1", member=MemberState.READY, cohort=3, prompt_tokens=9,
                processed_tokens=4, cached_tokens=5, held_tokens=9, decoded_tokens=0, wait_ms=1.5,
            ),
        ),
        native=True, phase=EnginePhase.PREFILL_SEALED, sealed=True, cohort=3, decode_running_ms=2.5, seq=7,
        lost=2, events=(EVENT,), engine_us=11_005_000,
    ),
    Counters(10.9, 10.95, 100, 20),
    Counters(11.1, 11.2, 100, 20),
)  # fmt: skip
RECORDS: list[Record] = [
    Mark(0, 1, 10.5, ServerState.UP, native=True, policy="drain", note="n"),
    Event(0, 1, 10.9, 0.001, EVENT),
    SAMPLE,
    LogLine(0, 11.3, "line “of” a log\t\x1b[0m"),
    LogNote(0, 11.4, "the file was replaced"),
    Mark(1, 0, 11.5, ServerState.GONE, "nobody listens there"),
    End(12.0, "time"),
]


def write(path: Path, records: list[Record] = RECORDS) -> Path:
    with Recorder(path) as recorder:
        for record in (HEADER, *records):
            recorder.write(record)
    return path


def test_everything_comes_back(tmp_path: Path) -> None:
    """Each kind of record; events come back within the sample that brought them as well."""
    file = write(tmp_path / "r.jsonl")
    with Recording(file) as recording:
        assert recording.header == HEADER
        assert list(recording) == RECORDS
        assert recording.notes == []
    lines = file.read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["header", "server", "event", "sample", "log", "log_note", "server", "end"]  # fmt: skip
    assert {json.loads(line)["kind"] for line in lines} == set(KINDS)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_cut_at_any_byte_costs_one_line_at_most(tmp_path: Path) -> None:
    """Whole lines before the cut are read; what is cut is told."""
    whole = write(tmp_path / "r.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    cut = tmp_path / "cut.jsonl"
    for size in range(first, len(whole)):
        cut.write_bytes(whole[:size])
        with Recording(cut) as recording:
            found = list(recording)
        assert len(found) == whole[:size].count(b"\n") - 1
        assert bool(recording.notes) == (whole[size - 1 : size] != b"\n")


def test_each_record_is_on_disk_at_once(tmp_path: Path) -> None:
    """No buffer stands between a record and the file."""
    file = tmp_path / "r.jsonl"
    with Recorder(file) as recorder:
        for count, record in enumerate((HEADER, *RECORDS), 1):
            recorder.write(record)
            assert file.read_bytes().count(b"\n") == count


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("mine")
    with pytest.raises(RecordingError, match="exists; choose another name"):
        Recorder(file)
    assert file.read_text() == "mine"
    with pytest.raises(RecordingError, match="No such file"):
        Recorder(tmp_path / "no" / "r.jsonl")


def test_a_full_disk_is_an_error_with_a_name() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    recorder = object.__new__(Recorder)
    import os

    recorder._path, recorder._fd = full, os.open(full, os.O_WRONLY)
    with recorder, pytest.raises(RecordingError, match="No space left"):
        recorder.write(HEADER)


BROKEN = {
    "nothing": (b"", "is no recording"),
    "another format": (b'{"kind": "event"}\n', "server: is missing"),
    "a header of something else": (b'{"kind":"header","started_s":1,"started_unix_s":1,"interval_s":1,"servers":[],"format":"x"}\n', "is no recording"),
    "a newer version": (b'{"kind":"header","started_s":1,"started_unix_s":1,"interval_s":1,"servers":[],"version":2}\n', "version 2"),
    "no json": (b"hello\n", "line 1: not JSON"),
    "a number": (b"1\n", "line 1: expected a JSON object"),
    "a binary file": (bytes(range(256)) * 10 + b"\n", "line 1: not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_recording_is_refused(tmp_path: Path, name: str) -> None:
    content, words = BROKEN[name]
    file = tmp_path / "x"
    file.write_bytes(content)
    with pytest.raises(RecordingError, match=words):
        Recording(file)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    """In the middle a broken line is damage, not a kill: file, line and field are said."""
    file = write(tmp_path / "r.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"asked_s":11.0', b'"asked_s":NaN')
    file.write_bytes(b"".join(lines))
    with Recording(file) as recording, pytest.raises(RecordingError, match=r"r\.jsonl, line 4: NaN"):
        list(recording)
    lines[3] = line_of(SAMPLE).replace(b'"member":"ready"', b'"member":"asleep"')
    file.write_bytes(b"".join(lines))
    with (
        Recording(file) as recording,
        pytest.raises(RecordingError, match=r"line 4: report\.slots\[1\]\.member: 'asleep' is not one of"),
    ):
        list(recording)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(RECORDS), st.data())
@settings(max_examples=300, deadline=None)
def test_no_mutation_does_more_than_be_refused(record: Record, data: st.DataObject) -> None:
    """Any value in any place is either taken or refused with the place's name."""
    wire = json.loads(line_of(record))
    places: list[tuple[dict, str]] = []

    def collect(value: object) -> None:
        if isinstance(value, dict):
            places.extend((value, key) for key in value)
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    collect(wire)
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(json_values)
    try:
        again = decode(wire)
    except RecordError as error:
        assert str(error)
    else:
        assert decode(json.loads(json.dumps(encode(again)))) is not None
