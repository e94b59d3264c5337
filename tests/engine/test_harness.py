"""The scheduling harness on real models: equal outputs under every policy, MTP, planted faults, memory that runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.bench import Policy
from tests.engine.enginekit.models import extra_model, zoo

RUN_TIMEOUT_S = 120
BARRIER = [policy for policy in Policy if policy is not Policy.MIXED]
# F32 throughout and no flash attention: what shares a batch moves logits by 1e-5 at most, far less than SAFE_GAP.
SAFE_GAP = 1e-3
EXACT = ("--ubatch", "4", "--flash-attn", "off", "--cache", "f32")

Harness = Callable[..., tuple[subprocess.CompletedProcess[str], dict[str, Any]]]


@pytest.fixture(scope="session")
def harness_binary() -> Path:
    """llama-phase-harness: `LLAMA_PHASE_HARNESS`, else the one in the user's cache."""
    if named := os.environ.get("LLAMA_PHASE_HARNESS"):
        return Path(named)
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "engine", "path", "--harness"],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip("no harness: run `llama-proxy engine build --harness` or set LLAMA_PHASE_HARNESS")
    return Path(done.stdout.strip())


@pytest.fixture
def harness(harness_binary: Path, tmp_path: Path) -> Harness:
    """Run the harness on a model; returns the ended process and its report."""

    def run(model: Path, *flags: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        done = subprocess.run(
            [str(harness_binary), "--model", str(model), "--threads", "1", "--json", str(report), *flags],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        return done, json.loads(report.read_text()) if report.exists() else {}

    return run


def reports(
    harness: Harness, model: Path, *flags: str, policies: list[Policy] | None = None
) -> list[dict[str, Any]]:
    found = []
    for policy in policies or list(Policy):
        done, report = harness(model, "--policy", policy, *flags)
        assert done.returncode == 0, done.stderr
        found.append(report)
    return found


@pytest.mark.parametrize("lengths", ["16,96", "96,16", "5,40,77"])
def test_policies_differ_in_when_and_not_in_what(harness: Harness, lengths: str) -> None:
    """Same tokens however prompts shared their batches, and none of them by the luck of a near tie."""
    found = reports(harness, zoo("llama"), "--lengths", lengths, "--predict", "16", "--batch", "32", *EXACT)
    assert len({report["hash"] for report in found}) == 1
    assert all(request["smallest_gap"] > SAFE_GAP for report in found for request in report["requests"])
    assert len({report["work"]["prompt_tokens"] for report in found}) == 1
    for report in found:
        assert report["ok"] is True
        assert report["engine"]["n_outputs_max"] == len(lengths.split(","))
        tokens = [request["tokens"] for request in report["requests"]]
        assert all(len(each) == 16 and len(set(each)) > 3 for each in tokens)


def test_a_prompt_is_the_same_in_any_place(harness: Harness) -> None:
    """Reversed orders hold the same requests: each prompt's tokens depend on seed and length alone."""
    one, other = (
        harness(zoo("llama"), "--lengths", order, "--predict", "8", "--batch", "32", *EXACT)[1]
        for order in ("16,96", "96,16")
    )
    hashes = [[request["hash"] for request in report["requests"]] for report in (one, other)]
    assert hashes[0] == hashes[1][::-1]
    assert hashes[0][0] != hashes[0][1]
    _, seeded = harness(
        zoo("llama"), "--lengths", "16,96", "--predict", "8", "--batch", "32", *EXACT, "--seed", "2"
    )
    assert seeded["hash"] != one["hash"]


def test_cohorts_reuse_slots(harness: Harness) -> None:
    """More requests than slots: what an earlier occupant left behind changes nothing."""
    flags = ("--predict", "6", "--batch", "32", *EXACT)
    _, alone = harness(zoo("llama"), "--lengths", "30,8,50", *flags)
    found = reports(harness, zoo("llama"), "--lengths", "30,8,50", "--slots", "2", *flags)
    assert {report["hash"] for report in found} == {alone["hash"]}


@pytest.mark.parametrize("model", ["qwen35-mtp", "step35-mtp"])
def test_the_draft_head_sees_every_prompt_token(harness: Harness, model: str) -> None:
    """MTP heads of two kinds: outputs and the drafts at the opening are equal across policies and orders."""
    flags = (
        "--predict",
        "8",
        "--batch",
        "64",
        "--ubatch",
        "16",
        "--mtp",
        "--cache",
        "f32",
        "--flash-attn",
        "off",
    )
    outputs = set()
    for lengths in ("16,96", "96,16"):
        for report in reports(harness, zoo(model), "--lengths", lengths, *flags):
            by_length = sorted(report["requests"], key=lambda request: request["length"])
            outputs.add(tuple((each["hash"], tuple(each["drafted"])) for each in by_length))
            assert all(each["drafted"] for each in by_length)
            # a row for the last token of each sequence and one per drafted token, as the server has it
            assert report["engine"]["n_outputs_max"] == 2 * (1 + 3)
    assert len(outputs) == 1


def test_a_model_without_a_draft_head_is_refused(harness: Harness) -> None:
    done, report = harness(zoo("llama"), "--lengths", "8", "--mtp")
    assert done.returncode == 1
    assert "no MTP head" in done.stderr
    assert report["failure"]["name"] == "--mtp"


@pytest.mark.parametrize("policy", BARRIER)
@pytest.mark.parametrize(
    ("fault", "invariant"), [("early", "no-early-first-token"), ("mixed", "no-mixed-batch")]
)
def test_a_planted_fault_fails_loudly(harness: Harness, policy: Policy, fault: str, invariant: str) -> None:
    done, report = harness(
        zoo("llama"), "--policy", policy, "--lengths", "16,96", "--batch", "32", "--plant", fault
    )
    assert done.returncode == 3
    assert f"invariant {invariant} violated" in done.stderr
    assert report["failure"]["name"] == invariant


def test_memory_that_runs_out_is_named(harness: Harness) -> None:
    flags = ("--lengths", "16,96", "--ctx", "4000000", "--memory-limit-mib", "300")
    done, report = harness(zoo("llama"), *flags)
    assert done.returncode == 4
    assert (report["failure"]["kind"], report["failure"]["name"]) == ("memory", "context")
    assert "4000000" in report["failure"]["message"]


def test_a_model_that_cannot_be_loaded_is_named(harness: Harness, tmp_path: Path) -> None:
    absent = tmp_path / "absent.gguf"
    done, report = harness(absent, "--lengths", "8")
    assert done.returncode == 1
    assert str(absent) in done.stderr
    assert report["failure"]["kind"] == "model"


def test_a_small_matrix_on_a_real_model(harness_binary: Path, tmp_path: Path) -> None:
    """Policies, both orders, repetitions: all invariants hold, outputs are equal, evidence and summary are there."""
    model = extra_model("stories260K.gguf") or zoo("llama")
    out = tmp_path / "out"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "proxy", "bench", "engine", "--json", "--out", str(out)),
            *("--harness", str(harness_binary), "--model", str(model)),
            *(
                "--lengths",
                "16,96",
                "--predict",
                "8",
                "--batch",
                "32",
                "--ubatch",
                "16",
                "--repetitions",
                "2",
            ),
        ],
        capture_output=True,
        text=True,
        timeout=2 * RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["runs"]["ok"] == 16
    verdict = summary["verdict"]
    assert (verdict["invariants"], verdict["equal_work"], verdict["equal_hashes"]) == (True, True, True)
    for policy in summary["policies"]:
        assert policy["pooled"]["total_prefill_ms"]["median"] > 0
        assert policy["ratio"]["total_prefill_ms"]["pooled"] > 0
    assert (out / "plots" / "timeline.svg").exists()
    assert len(list((out / "runs").glob("*.log"))) == 16
