"""`llama-proxy watch`: what people and scripts get."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from click.testing import CliRunner
from rich.console import Console

from proxy.backends.slots import SlotsReport
from proxy.cli.main import cli
from proxy.cli.watch_view import clean, plain_lines, view
from proxy.observe.account import Account
from proxy.observe.recording import Recorder
from proxy.observe.records import (
    Counters,
    End,
    Event,
    Header,
    LogLine,
    LogNote,
    Mark,
    Record,
    Sample,
    ServerState,
)
from proxy.types import EnginePhase, MemberState, PhaseEvent, SlotView
from tests.engine.conftest import EngineFactory
from tests.engine.enginekit.prompts import words
from tests.support.wait import until

ROOT = Path(__file__).resolve().parents[2]
HEADER = Header(100.0, 1e9, 0.5, ("a:1", "b:2"), ("/var/log/engine.log",))
G, P = EnginePhase.GENERATE, EnginePhase.PREFILL_OPEN


def sample(
    server: int, at: float, prompt: int, generated: int, *slots: SlotView, run: int = 1, lost: int = 0
) -> Sample:
    """A sample whose counters stand at these; what was generated comes as one release."""
    event = PhaseEvent(int(at * 10), int(at * 1e6), "release", 3, 1, "", generated)
    report = SlotsReport(
        slots=slots or (SlotView(0, busy=False),), native=True, phase=G if slots else EnginePhase.IDLE,
        cohort=4, seq=int(at * 10), lost=lost, events=(event,) if generated else (), engine_us=int(at * 1e6),
    )  # fmt: skip
    counters = Counters(at, at, prompt, 0)
    return Sample(server, run, at, at + 0.01, report, counters, counters)


def story() -> list[Record]:
    """Two servers: 300 prompt and 40 generated tokens in 2 s together; then the second one is gone and comes back."""
    up = {"native": True, "counters": True, "policy": "drain", "model": "m.gguf", "build": "b1"}
    return [
        Mark(0, 1, 100.0, ServerState.UP, **up),
        Mark(1, 1, 100.0, ServerState.UP, **up),
        sample(0, 101.0, 1000, 0),
        sample(1, 101.1, 500, 0),
        LogLine(0, 101.5, "a line\x1b[2J"),
        sample(0, 103.0, 1200, 30),
        sample(1, 103.1, 600, 10),
        Mark(1, 1, 104.0, ServerState.GONE, "nobody listens there"),
        sample(0, 105.0, 1300, 20),
        LogNote(0, 105.5, "the file was replaced"),
        Mark(1, 2, 107.0, ServerState.UP, **up),
        sample(0, 107.0, 1300, 0),
        sample(1, 107.1, 5, 0, run=2),
        End(108.0, "stopped"),
    ]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    file = tmp_path / "run.jsonl"
    with Recorder(file) as recorder:
        recorder.write(HEADER)
        for record in story():
            if isinstance(record, Sample):
                for event in record.report.events:
                    recorder.write(Event(record.server, record.run, event.t_us / 1e6, 0.0, event))
            recorder.write(record)
    return file


def test_summary_adds_up(recording: Path) -> None:
    """Combined tokens by wall time, without the time in which a server was gone; gaps named."""
    done = CliRunner().invoke(cli, ["watch", "--summary", str(recording), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    combined = found["combined"]
    assert (combined["prompt_tokens"], combined["generated_tokens"], combined["wall_s"]) == (300, 40, 2.0)
    assert combined["rate"] == {"prompt": 150.0, "generated": 20.0, "total": 170.0}
    assert combined["skew_max_s"] == 0.11
    assert combined["broken"] == [{"begin_s": 3.055, "end_s": 7.055}]
    assert combined["unpaired_samples"] == 1
    assert [server["prompt_tokens"] for server in found["servers"]] == [300, 100]
    assert [server["generated_tokens"] for server in found["servers"]] == [50, 10]
    assert found["gaps"] == [
        {
            "server": 1,
            "begin_s": 3.11,
            "end_s": 7.1,
            "why": "gone: nobody listens there",
            "tokens_counted": False,
        }
    ]
    assert found["ended"] == "stopped"
    assert found["log_lines"] == {"/var/log/engine.log": 1}


def test_summary_for_people(recording: Path) -> None:
    text = CliRunner().invoke(cli, ["watch", "--summary", str(recording)]).output
    for wanted in (
        "150.0",
        "20.0",
        "skew at most 110.0 ms",
        "gap: b:2 3.11 to 7.10 s, gone: nobody listens there; nothing is counted across it",
        "the file was replaced",
        "drain, m.gguf, b1",
    ):
        assert wanted in text, f"{wanted!r} is not in:\n{text}"
    assert "\x1b" not in text


def test_a_cut_recording_is_added_up_and_told(recording: Path) -> None:
    recording.write_bytes(recording.read_bytes()[:-9])
    done = CliRunner().invoke(cli, ["watch", "--summary", str(recording)])
    assert done.exit_code == 0
    assert "is cut" in done.output
    found = json.loads(CliRunner().invoke(cli, ["watch", "--summary", str(recording), "--json"]).output)
    assert found["ended"] == "cut"
    assert found["combined"]["prompt_tokens"] == 300


def test_a_record_of_an_unknown_server_is_refused(recording: Path) -> None:
    text = recording.read_text().splitlines(keepends=True)
    recording.write_text("".join([*text[:2], text[2].replace('"server":1', '"server":7'), *text[3:]]))
    done = CliRunner().invoke(cli, ["watch", "--summary", str(recording)])
    assert done.exit_code == 1
    assert "server 7 is not in the header" in done.output


USAGE = {
    "a bad address": (["ftp://x"], 2, "no address of a server"),
    "the same address twice": (["a:1", "http://a:1/"], 2, "given twice"),
    "a summary of a server": (["a:1", "--summary", "x"], 2, "takes no URL"),
    "an interval of nothing": (["a:1", "--interval", "0"], 2, "--interval"),
    "a recording that is not there": (["--summary", "no.jsonl"], 1, "cannot read no.jsonl: No such file"),
    "nobody there": (
        ["127.0.0.1:9", "--for", "0.2"],
        1,
        "nothing was seen: 127.0.0.1:9: nobody listens there",
    ),
}


@pytest.mark.parametrize("name", USAGE)
def test_mistakes_are_explained(name: str) -> None:
    arguments, code, text = USAGE[name]
    done = CliRunner().invoke(cli, ["watch", *arguments])
    assert done.exit_code == code, done.output
    assert text in done.output
    assert "Traceback" not in done.output


def test_a_recording_is_never_overwritten(recording: Path) -> None:
    before = recording.read_bytes()
    done = CliRunner().invoke(cli, ["watch", "127.0.0.1:9", "--for", "0.1", "--record", str(recording)])
    assert done.exit_code == 1
    assert "exists; choose another name" in done.output
    assert recording.read_bytes() == before


def slots() -> tuple[SlotView, ...]:
    M = MemberState
    return (
        SlotView(0, busy=False),
        SlotView(1, busy=True, task=1, tag="q.1", member=M.QUEUED, prompt_tokens=9000, processed_tokens=0, queue_ms=1500),
        SlotView(2, busy=True, task=2, tag="a-very-long-request-id-that-goes-on-and-on-and-on-and-on", member=M.PREFILL, prompt_tokens=4000, processed_tokens=900, cached_tokens=100),
        SlotView(3, busy=True, task=3, tag="r.3", member=M.READY, prompt_tokens=40, processed_tokens=40, cached_tokens=0, wait_ms=250),
        SlotView(4, busy=True, task=4, tag="g.4", member=M.GENERATE, prompt_tokens=40, processed_tokens=40, decoded_tokens=77),
        SlotView(5, busy=True, task=5),
    )  # fmt: skip


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("height", [12, 24, 60])
def test_the_view_fits_and_shows_each_slot(width: int, height: int) -> None:
    """Nothing is wider than the terminal; what does not fit in height is counted."""
    account = Account(HEADER)
    for record in story()[:7]:
        account.add(record)
    account.add(sample(0, 104.0, 1250, 0, *slots()))
    console = Console(
        width=width,
        height=height,
        force_terminal=True,
        color_system=None,
        record=True,
        file=io.StringIO(),
    )
    console.print(view(account, width, height))
    text = console.export_text()
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines)
    assert "\x1b" not in text
    assert len(lines) <= max(height, 18)
    assert text.count("prompt 366.7/s generated 35.7/s") == 1
    if height == 60:
        for wanted in (
            "queued",
            "1.5 s",
            "1000/4000",
            "ready",
            "250 ms",
            "generate",
            "77",
            "task 5",
            "together",
            "skew ≤",
            "a line�[2J",
        ):
            assert wanted in text, f"{wanted!r} is not in:\n{text}"
    if height == 12:
        assert "more" in text


def test_plain_lines_and_clean_text() -> None:
    account = Account(HEADER)
    assert [line.split()[0] for line in plain_lines(account)] == ["a:1", "b:2", "together"]
    for record in story()[:8]:
        account.add(record)
    first, second, both = plain_lines(account)
    assert "idle" in first
    assert "prompt 100.0/s generated 15.0/s" in first
    assert "gone" in second
    assert "nobody listens there" in second
    assert both.startswith("together")
    assert clean("a\x1b[1m\tb\n") == "a�[1m b�"


BEGIN_S = 120.0
"""For the start of a program that needs a second of the processor, on a machine with little of it to spare."""


def run_watch(*arguments: str, out: int | IO[bytes] = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "proxy", "watch", *arguments],
        stdout=out, stderr=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def lines_of(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines(keepends=True) if file.exists() else []


def samples_after_a_release(file: Path) -> bool:
    """Whether the sample that came with a release is there, and one more, so that it is whole."""
    lines = lines_of(file)
    place = next((n for n, line in enumerate(lines) if b'"event":"release"' in line), len(lines))
    return sum(b'"kind":"sample"' in line for line in lines[place:]) > 1


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_watch_in_order(engine: EngineFactory, tmp_path: Path, number: int) -> None:
    """The recording is whole, the summary is printed, and `--summary` says the same again."""
    server = engine("llama", "drain")
    file = tmp_path / "r.jsonl"
    arguments = (f":{server.port}", "--record", str(file), "--log", str(server.log_path), "--json")
    with (tmp_path / "out").open("wb") as told:
        # nobody reads a pipe meanwhile: once full, it would hold up the watch
        watching = run_watch(*arguments, out=told)
    try:
        until("a sample", lambda: any(b'"kind":"sample"' in line for line in lines_of(file)), BEGIN_S)
        server.complete(words(50, 1), 9)
        until("its sample", lambda: samples_after_a_release(file))
        watching.send_signal(number)
        _, err = watching.communicate(timeout=30)
    finally:
        watching.kill()
    out = (tmp_path / "out").read_bytes()
    assert watching.returncode == 0, err
    printed = [json.loads(line) for line in out.splitlines()]
    recorded = [json.loads(line) for line in lines_of(file)]
    assert printed[:-1] == recorded
    assert [recorded[0]["kind"], recorded[-1]["kind"]] == ["header", "end"]
    assert printed[-1]["servers"][0]["generated_tokens"] == 9
    again = CliRunner().invoke(cli, ["watch", "--summary", str(file), "--json"])
    assert json.loads(again.output) == printed[-1]


@pytest.mark.engine
def test_a_kill_leaves_a_recording_that_adds_up(engine: EngineFactory, tmp_path: Path) -> None:
    server = engine("llama", "drain")
    file = tmp_path / "r.jsonl"
    watching = run_watch(f":{server.port}", "--record", str(file), "--interval", "0.02")
    try:
        until("samples", lambda: len(lines_of(file)) > 5, BEGIN_S)
        server.complete(words(50, 1), 9)
        until("its sample", lambda: samples_after_a_release(file))
    finally:
        watching.kill()
        watching.communicate(timeout=30)
    assert all(json.loads(line) for line in lines_of(file)[:-1])
    found = json.loads(CliRunner().invoke(cli, ["watch", "--summary", str(file), "--json"]).output)
    assert found["ended"] == "cut"
    assert found["servers"][0]["generated_tokens"] == 9


@pytest.mark.engine
@pytest.mark.parametrize("options", [("--json", "--interval", "0.02"), ()])
def test_a_reader_that_goes_away_ends_the_watch(engine: EngineFactory, options: tuple[str, ...]) -> None:
    """`llama-proxy watch [--json] | head -1`: nothing is observed for nobody."""
    server = engine("llama", "drain")
    watching = run_watch(f":{server.port}", *options)
    assert watching.stdout is not None
    try:
        line = watching.stdout.readline()
        assert json.loads(line)["kind"] == "header" if options else line
        watching.stdout.close()
        watching.stdout = None
        assert b"Traceback" not in watching.communicate(timeout=60)[1]
    finally:
        watching.kill()
        watching.wait(10)
