"""The harness's own contract, without a model: schedules, invariants, planted faults, flags, reports."""

import subprocess
from pathlib import Path

import pytest

from proxy.bench import Policy
from tests.bench.conftest import Harness

BARRIER = [policy for policy in Policy if policy is not Policy.MIXED]
UNEQUAL = ("--lengths", "16,96", "--batch", "32", "--predict", "8")


def prompt_and_generated(batch: dict) -> tuple[int, int]:
    kinds = [(part["kind"], part["tokens"]) for part in batch["seqs"]]
    return tuple(sum(n for kind, n in kinds if kind == wanted) for wanted in ("prompt", "generated"))


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("lengths", ["16,96", "96,16", "5,40,7,33", "1", "30,30,30"])
def test_the_trace_shows_what_the_policy_promises(dry: Harness, policy: Policy, lengths: str) -> None:
    """Read from the trace alone: who shared a batch with whom, and when first tokens came."""
    done, report = dry("--policy", policy, "--lengths", lengths, "--batch", "16", "--predict", "5")
    assert done.returncode == 0, done.stderr
    wanted = [int(part) for part in lengths.split(",")]
    trace = report["trace"]
    decoded = [0] * len(wanted)
    for batch in trace:
        prompt, generated = prompt_and_generated(batch)
        assert (batch["prompt_tokens"], batch["generated_tokens"]) == (prompt, generated)
        assert prompt + generated <= 16
        assert batch["policy"] == policy
        if policy is not Policy.MIXED:
            assert not (prompt and generated)
            assert batch["phase"] == ("prefill" if prompt else "generate")
        if policy is Policy.SERIAL and prompt:
            assert len(batch["seqs"]) == 1
        for part in batch["seqs"]:
            assert part["pos"] == decoded[part["request"]]
            decoded[part["request"]] += part["tokens"]
    assert decoded == [length + 5 - 1 for length in wanted]
    last_prompt_end = max(batch["t_end_us"] for batch in trace if batch["prompt_tokens"])
    for request in report["requests"]:
        assert len(request["tokens"]) == 5
        if policy is not Policy.MIXED:
            assert request["t_first_token_us"] == last_prompt_end
    assert report["work"]["prompt_tokens"] == sum(wanted)
    assert report["work"]["sampled_tokens"] == 5 * len(wanted)
    assert report["invariants"]["batches"] == len(trace)


def test_work_and_outputs_are_equal_across_policies(dry: Harness) -> None:
    reports = [dry("--policy", policy, *UNEQUAL)[1] for policy in Policy]
    assert len({report["hash"] for report in reports}) == 1
    works = [{k: v for k, v in report["work"].items() if k != "batches"} for report in reports]
    assert all(work == works[0] for work in works)


@pytest.mark.parametrize("policy", BARRIER)
@pytest.mark.parametrize(
    ("fault", "invariant"), [("early", "no-early-first-token"), ("mixed", "no-mixed-batch")]
)
def test_a_planted_fault_fails_loudly(dry: Harness, policy: Policy, fault: str, invariant: str) -> None:
    """An early first token, and a mixed batch, end the run with the invariant's name, and the evidence is kept."""
    done, report = dry("--policy", policy, *UNEQUAL, "--plant", fault)
    assert done.returncode == 3
    assert f"invariant {invariant} violated" in done.stderr
    assert report["ok"] is False
    assert (report["failure"]["kind"], report["failure"]["name"]) == ("invariant", invariant)
    assert report["trace"]


def test_cohorts_follow_each_other(dry: Harness) -> None:
    """With fewer slots than requests a cohort drains before the next one begins."""
    done, report = dry("--policy", "barrier-fair", "--lengths", "20,9,14,3,6", "--slots", "2", "--batch", "8")
    assert done.returncode == 0, done.stderr
    assert [request["cohort"] for request in report["requests"]] == [1, 1, 2, 2, 3]
    cohorts = [batch["cohort"] for batch in report["trace"]]
    assert cohorts == sorted(cohorts)
    ends = [request["t_end_us"] for request in report["requests"]]
    assert report["requests"][2]["t_admit_us"] >= max(ends[:2])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--lengths", "16,x"), "--lengths"),
        (("--lengths", ""), "--lengths"),
        (("--lengths", "0"), "--lengths"),
        ((), "--lengths"),
        (("--lengths", "4", "--policy", "drain"), "--policy"),
        (("--lengths", "4", "--predict", "0"), "--predict"),
        (("--lengths", "4,4,4", "--batch", "2"), "--batch"),
        (("--lengths", "4", "--batch", "8", "--ubatch", "9"), "--ubatch"),
        (("--lengths", "4", "--cache", "q4_0"), "--cache"),
        (("--lengths", "4", "--cache", "q8_0", "--flash-attn", "off"), "--cache"),
        (("--lengths", "400,4", "--ctx", "512"), "--ctx"),
        (("--lengths", "400,200", "--ctx", "512", "--kv-unified"), "--ctx"),
        (("--lengths", "4", "--tensor-split", "1,-1"), "--tensor-split"),
        (("--lengths", "4", "--gpu-layers", "most"), "--gpu-layers"),
        (("--lengths", "4,4,4", "--slots", "2", "--mtp"), "--mtp"),
        (("--lengths", "4", "--plant", "early"), "--plant"),
        (("--lengths", "4", "--threads"), "--threads"),
        (("--lengths", "4", "--verbose=1"), "--verbose"),
        (("--lengths", "4", "--speed", "9"), "--speed"),
    ],
)
def test_a_bad_flag_is_named(dry: Harness, flags: tuple[str, ...], named: str) -> None:
    done, report = dry(*flags)
    assert done.returncode == 2
    assert named in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert report == {}


def test_a_model_is_asked_for(dry_harness: Path) -> None:
    done = subprocess.run(
        [str(dry_harness), "--lengths", "4"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "--model" in done.stderr


def test_a_report_that_cannot_be_written_is_an_error(dry: Harness, tmp_path: Path) -> None:
    done, _ = dry("--lengths", "4", "--json", str(tmp_path / "absent" / "report.json"))
    assert done.returncode == 1
    assert "--json" in done.stderr
