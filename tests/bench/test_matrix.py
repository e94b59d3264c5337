"""The matrix's plan, how a run's end is judged, and the arithmetic of the summary."""

import json
from collections import Counter
from typing import Any

import pytest

from proxy.bench import (
    BenchError,
    Configuration,
    HashRule,
    Matrix,
    Outcome,
    Policy,
    Result,
    parse_policies,
    plan_runs,
    plots,
    summarize,
)
from proxy.bench.evidence import judge, parse_result
from proxy.bench.matrix import Run
from proxy.bench.stats import spread
from proxy.bench.svg import Axis
from proxy.cli.bench_report import explain, render

SETUP = Configuration(lengths=(16, 96), predict=8, slots=2, batch=32, ubatch=16)


def matrix(**changes: Any) -> Matrix:
    values: dict[str, Any] = {
        "configuration": SETUP,
        "policies": tuple(Policy),
        "repetitions": 3,
        "shuffle_seed": 1,
        "model": "m.gguf 1 aa",
        "engine": "e",
    }
    return Matrix(**(values | changes))


def report(run: Run, prefill_us: int, **changes: Any) -> dict[str, Any]:
    requests = [
        {
            "length": length,
            "slot": slot,
            "t_first_token_us": prefill_us + 5,
            "barrier_wait_us": 10 * slot,
            "t_end_us": prefill_us + 100,
            "hash": f"h{length}",
            "first_row_hash": f"r{length}",
            "drafted": [],
            "smallest_gap": 0.5,
        }
        for slot, length in enumerate(run.order)
    ]
    part = {"slot": 0, "tokens": 3, "kind": "prompt"}
    return {
        "ok": True,
        "config": {"policy": str(run.policy)},
        "engine": {"build": "b1", "model": "tiny"},
        "hash": "-".join(map(str, run.order)),
        "work": {"prompt_tokens": 112, "sampled_tokens": 16, "decoded_generated_tokens": 14, "batches": 11},
        "times": {
            "total_prefill_us": prefill_us,
            "prefill_cpu_us": prefill_us // 2,
            "prefill_span_us": prefill_us,
            "makespan_us": prefill_us + 100,
        },
        "memory": {"peak_rss_bytes": 1000},
        "requests": requests,
        "trace": [{"t_start_us": 0, "t_end_us": prefill_us, "seqs": [part]}],
    } | changes


def evidence(run: Run, prefill_us: int = 1000, **changes: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "run": run.key,
        "outcome": "ok",
        "name": "",
        "message": "",
        "report": report(run, prefill_us, **changes),
    }


def result(run: Run, prefill_us: int = 1000, **changes: Any) -> Result:
    return parse_result(evidence(run, prefill_us, **changes), run, "file")


def test_every_cell_runs_once_per_repetition_in_a_shuffled_order() -> None:
    runs = plan_runs(matrix())
    assert len(runs) == len({run.key for run in runs}) == 4 * 2 * 3
    for number in (1, 2, 3):
        block = runs[8 * (number - 1) : 8 * number]
        assert {run.repetition for run in block} == {number}
        assert Counter(run.policy for run in block) == dict.fromkeys(Policy, 2)
    assert runs == plan_runs(matrix())
    assert runs != plan_runs(matrix(shuffle_seed=2))
    first = [(run.policy, run.order) for run in runs[:8]]
    assert first != [(run.policy, run.order) for run in runs[8:16]]


def test_a_palindrome_has_one_order() -> None:
    assert matrix().orders == ((16, 96), (96, 16))
    same = Configuration(lengths=(5, 9, 5), predict=1, slots=3, batch=8, ubatch=8)
    assert matrix(configuration=same).orders == ((5, 9, 5),)


def test_the_flags_say_the_whole_configuration() -> None:
    setup = Configuration(
        lengths=(1,), predict=2, slots=3, batch=4, ubatch=5, cache="q8_0", flash_attn="on", kv_unified=True,
        threads=6, gpu_layers="7", tensor_split=(3.0, 1.5), ctx=8, mtp=True, mtp_draft=9, prompt_seed=10,
        memory_limit_mib=11, dry_run=True,
    )  # fmt: skip
    expected = (
        "--predict 2 --slots 3 --batch 4 --ubatch 5 --cache q8_0 --flash-attn on --threads 6 --gpu-layers 7 --ctx 8 "
        "--seed 10 --tensor-split 3,1.5 --kv-unified --mtp --mtp-draft 9 --memory-limit-mib 11 --dry-run"
    )
    assert " ".join(setup.flags()) == expected


def test_policies() -> None:
    assert parse_policies("all") == tuple(Policy)
    assert parse_policies("barrier-fair, mixed") == (Policy.FAIR, Policy.MIXED)
    for wrong in ("", "drain", "mixed,mixed"):
        with pytest.raises(BenchError, match="--policies"):
            parse_policies(wrong)


@pytest.mark.parametrize(
    ("said", "exit_status", "log", "expected"),
    [
        ({"ok": True, "failure": None}, 0, "", (Outcome.OK, "")),
        (
            {"ok": False, "failure": {"kind": "memory", "name": "context", "message": "m"}},
            4,
            "",
            (Outcome.MEMORY, "context"),
        ),
        (
            {"ok": False, "failure": {"kind": "invariant", "name": "one-owner", "message": "m"}},
            3,
            "",
            (Outcome.INVARIANT, "one-owner"),
        ),
        (
            {"ok": False, "failure": {"kind": "model", "name": "model", "message": "m"}},
            1,
            "",
            (Outcome.FAILED, "model"),
        ),
        (None, None, "", (Outcome.TIMEOUT, "deadline")),
        (None, -9, "", (Outcome.MEMORY, "killed")),
        (None, -6, "CUDA error: out of memory", (Outcome.MEMORY, "abort")),
        (None, -11, "boom", (Outcome.FAILED, "signal 11")),
        (None, 0, "", (Outcome.FAILED, "exit status 0")),
        ({"ok": True, "failure": None}, 1, "", (Outcome.FAILED, "exit status 1")),
    ],
)
def test_how_a_run_ended(
    said: object, exit_status: int | None, log: str, expected: tuple[Outcome, str]
) -> None:
    outcome, name, message = judge(said, exit_status, log)
    assert (outcome, name) == expected
    assert (message == "") == (outcome is Outcome.OK)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", 2),
        ("run", "another"),
        ("outcome", "fine"),
        ("report", None),
        ("report.times", []),
        ("report.times.total_prefill_us", "1"),
        ("report.work.batches", -1),
        ("report.hash", 7),
        ("report.requests", {}),
        ("report.config.policy", "mixed"),
    ],
)
def test_damaged_evidence_is_named(path: str, value: object) -> None:
    run = Run(Policy.FAIR, (16, 96), 1)
    raw: Any = evidence(run)
    *parents, leaf = path.split(".")
    inner = raw
    for name in parents:
        inner = inner[name]
    inner[leaf] = value
    with pytest.raises(BenchError, match="place.json") as caught:
        parse_result(raw, run, "place.json")
    assert leaf in caught.value.message or "run" in caught.value.message


def test_spreads() -> None:
    assert spread([]) is None
    one = spread([4.0])
    assert one is not None
    assert (one.n, one.median, one.q1, one.high) == (1, 4.0, 4.0, 4.0)
    five = spread([5, 1, 2, 4, 3])
    assert five is not None
    assert (five.median, five.q1, five.q3, five.low, five.high) == (3, 2, 4, 1, 5)


def all_results(prefill: dict[Policy, int]) -> list[Result]:
    """Repetition r adds r ms, the reversed order adds 10 ms."""
    return [
        result(run, 1000 * (prefill[run.policy] + run.repetition + 10 * (run.order[0] > run.order[-1])))
        for run in plan_runs(matrix())
    ]


def test_medians_and_ratios() -> None:
    prefill = {Policy.MIXED: 300, Policy.GREEDY: 150, Policy.FAIR: 100, Policy.SERIAL: 200}
    summary = summarize(matrix(), all_results(prefill), Policy.SERIAL)
    assert summary["ok"] is True
    by_name = {item["policy"]: item for item in summary["policies"]}
    fair = by_name["barrier-fair"]
    assert fair["orders"]["16,96"]["total_prefill_ms"] == {
        "n": 3, "median": 102.0, "q1": 101.5, "q3": 102.5, "low": 101.0, "high": 103.0,
    }  # fmt: skip
    assert fair["orders"]["96,16"]["total_prefill_ms"]["median"] == 112.0
    assert fair["pooled"]["total_prefill_ms"]["median"] == 107.0
    assert fair["pooled"]["total_prefill_ms"]["n"] == 6
    assert fair["pooled"]["ttft_ms"]["n"] == 12
    assert fair["ratio"]["total_prefill_ms"]["pooled"] == round(107 / 207, 4)
    assert fair["ratio"]["total_prefill_ms"]["orders"]["16,96"] == round(102 / 202, 4)
    pairs = fair["ratio"]["total_prefill_ms"]["pairs"]
    assert (pairs["n"], pairs["low"], pairs["high"]) == (6, round(101 / 201, 4), round(113 / 213, 4))
    assert by_name["barrier-serial"]["ratio"]["total_prefill_ms"]["pooled"] == 1.0


def test_the_order_of_results_does_not_matter() -> None:
    results = all_results(dict.fromkeys(Policy, 100))
    texts = {json.dumps(summarize(matrix(), some, Policy.MIXED)) for some in (results, results[::-1])}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("odd", "rule", "ok"),
    [
        (Policy.MIXED, HashRule.ALL, False),
        (Policy.MIXED, HashRule.BARRIER, True),
        (Policy.FAIR, HashRule.BARRIER, False),
        (Policy.FAIR, HashRule.REPORT, True),
    ],
)
def test_different_outputs_are_seen(odd: Policy, rule: HashRule, ok: bool) -> None:
    results = [
        result(run, hash="other" if run.policy is odd and run.order == (16, 96) else "same")
        for run in plan_runs(matrix())
    ]
    summary = summarize(matrix(), results, Policy.SERIAL, rule)
    assert summary["ok"] is ok
    orders = summary["verdict"]["orders"]
    assert orders["16,96"]["equal"] is False
    assert orders["16,96"]["equal_barrier"] is (odd is Policy.MIXED)
    assert orders["96,16"]["equal"] is True


def test_the_report_names_what_is_wrong() -> None:
    """The table has a row per policy and order; what forbids to use the numbers is said in a sentence each."""
    runs = plan_runs(matrix())
    results = [result(run) for run in runs]
    good = summarize(matrix(), results, Policy.SERIAL)
    assert explain(good) == []
    rows = render(good).splitlines()
    assert len(rows) == 3 + 1 + 4 * 3
    assert all("1 [1, 1]" in row for row in rows if "both" in row)
    results = [
        Result(run, Outcome.MEMORY, "context", "no room")
        if run.policy is Policy.GREEDY
        else result(run, hash=str(run.policy is Policy.MIXED))
        for run in runs
    ]
    bad = summarize(matrix(), results, Policy.SERIAL)
    assert [line.split(":")[0] for line in explain(bad)] == [
        "6 of 24 runs",
        "prompts 16,96",
        "prompts 96,16",
    ]
    assert (
        "mixed and the barrier policies sampled different tokens (smallest logit gap 0.5)" in explain(bad)[1]
    )
    assert "-" in render(bad)


def test_different_work_and_missing_runs_are_seen() -> None:
    runs = plan_runs(matrix())
    results = [result(run) for run in runs]
    assert summarize(matrix(), results[1:], Policy.SERIAL)["ok"] is False
    work = {"prompt_tokens": 111, "sampled_tokens": 16, "decoded_generated_tokens": 14, "batches": 11}
    results[3] = result(runs[3], work=work)
    summary = summarize(matrix(), results, Policy.SERIAL)
    assert summary["verdict"]["equal_work"] is False
    assert summary["ok"] is False


def test_memory_that_ran_out_is_a_result() -> None:
    runs = plan_runs(matrix())
    results = [
        Result(run, Outcome.MEMORY, "context", "no room") if run.policy is Policy.MIXED else result(run)
        for run in runs
    ]
    summary = summarize(matrix(), results, Policy.SERIAL)
    assert summary["ok"] is True
    assert summary["runs"]["memory"] == 6
    assert {(item["name"], item["message"]) for item in summary["failures"]} == {("context", "no room")}
    assert summary["policies"][0]["pooled"]["total_prefill_ms"] is None
    assert summary["policies"][0]["ratio"]["total_prefill_ms"]["pooled"] is None
    results[0] = Result(results[0].run, Outcome.FAILED, "signal 11", "boom")
    assert summarize(matrix(), results, Policy.SERIAL)["ok"] is False


def test_plots_are_well_formed_and_show_every_value() -> None:
    import xml.etree.ElementTree as ET

    results = all_results({policy: 100 + 7 * number for number, policy in enumerate(Policy)})
    pictures = plots(matrix(model="a<b&c 1 x"), results)
    assert set(pictures) == {
        "total_prefill.svg",
        "makespan.svg",
        "ttft.svg",
        "barrier_wait.svg",
        "timeline.svg",
    }
    for text in pictures.values():
        ET.fromstring(text)
    assert pictures["total_prefill.svg"].count("<circle") == 24
    assert pictures["ttft.svg"].count("<circle") == 48
    assert plots(matrix(), []) == {}


@pytest.mark.parametrize("top", [0, 0.003, 0.7, 1, 9.99, 37, 100, 123456])
def test_an_axis_is_round_and_holds_its_values(top: float) -> None:
    axis = Axis(top, 100, 500)
    values = [value for value, _ in axis.ticks()]
    assert values[0] == 0
    assert values[-1] >= top
    assert 2 <= len(values) <= 11
    assert axis.x(0) == 100
    assert axis.x(values[-1]) == pytest.approx(500)
