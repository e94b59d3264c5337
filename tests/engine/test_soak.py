"""The long runs of `make soak`: seeded, bounded, with a line of progress and the command that repeats them."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import EngineFactory
from tests.engine.enginekit.load import Report, run_load
from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.readers import Readers
from tests.engine.enginekit.server import Server
from tests.engine.enginekit.soak import Bounds, Progress, read_bounds

ROOT = Path(__file__).resolve().parents[2]
ALL_POLICIES = ("mixed", "drain", "yield")
PASS_TIMEOUT_S = 2400
SOAK_TIMEOUT_S = 4 * 3600
CHUNK = 100

COMMON = ("-b", "64", "--phase-yield-ms", "15", "--embeddings", "--pooling", "none")
# model, arguments, adapters: what the chunks of the second storm choose from
KINDS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "speculation": (
        "llama",
        ("-md", "llama-draft", "--spec-type", "draft-simple", "--spec-draft-n-max", "4"),
        0,
    ),
    "adapters": ("llama", ("--lora", "lora-a", "--lora", "lora-b"), 2),
    "recurrent": ("mamba", (), 0),
    "hybrid": ("qwen35-mtp", (), 0),
    "hybrid with its own drafts": ("qwen35-mtp", ("--spec-type", "draft-mtp", "--spec-draft-n-max", "3"), 0),
    "sliding window": ("gemma3-swa", (), 0),
    "one shared cache": ("llama", ("--kv-unified",), 0),
}
FILES = ("llama-draft", "lora-a", "lora-b")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SOAK_TIMEOUT_S)]


@pytest.fixture(scope="session")
def bounds() -> Bounds:
    """Return the size of this soak; it says so, once."""
    found = read_bounds()
    print(f"\nsoak: repeat with `{found.repeat()}`", file=sys.stderr, flush=True)
    return found


def _start(engine: EngineFactory, policy: str, kind: str) -> Server:
    model, args, _ = KINDS[kind]
    named = tuple(str(zoo(arg)) if arg in FILES else arg for arg in args)
    return engine(model, policy, (*COMMON, *named), context=16384)


def _check(report: Report, bounds: Bounds, what: str) -> None:
    found = "\n".join(report.failures[:5])
    assert not report.failures, f"{what}; repeat with `{bounds.repeat()}`:\n{found}"
    assert sum(report.outcomes.values()) == report.sent, f"{what}: {report.outcomes} of {report.sent}"


def _at_rest(server: Server) -> None:
    server.wait_idle()
    assert server.busy_share(1.0) <= 0.02, "the engine does not rest"


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_the_storm(engine: EngineFactory, bounds: Bounds, policy: str) -> None:
    """Thousands of random requests at one engine, all its views read without pause."""
    server = _start(engine, policy, "adapters")
    progress = Progress(f"{policy} seed {bounds.seed}", bounds.requests, "requests")

    def go_on(report: Report) -> bool:
        progress.show(report.sent, f", {report.outcomes['left']} left early")
        return not report.failures and time.monotonic() < bounds.until_s

    with Readers(server, exclusive=policy != "mixed") as readers:
        report = run_load(server, bounds.seed, bounds.requests, adapters=2, go_on=go_on)
    progress.show(report.sent, f", {sum(readers.reads.values())} views read", last=True)
    _check(report, bounds, policy)
    assert readers.problems == []
    _at_rest(server)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_the_storm_over_all_kinds(engine: EngineFactory, bounds: Bounds, policy: str) -> None:
    """The same in chunks that go from engine to engine: drafts, other memories, one shared cache."""
    rng = random.Random(f"{bounds.seed} {policy}")
    kinds = rng.sample(sorted(KINDS), len(KINDS))
    rounds = max(len(kinds), bounds.requests // CHUNK)
    servers: dict[str, Server] = {}
    for number in range(rounds):
        if time.monotonic() >= bounds.until_s:
            break
        kind = kinds[number % len(kinds)]
        if kind not in servers:
            servers[kind] = _start(engine, policy, kind)
        server = servers[kind]
        progress = Progress(f"{policy}, {kind}, chunk {number + 1}/{rounds}", CHUNK, "requests")
        chunk = min(CHUNK, bounds.requests)
        seed = bounds.seed + number
        report = run_load(
            server, seed, chunk, adapters=KINDS[kind][2],
            go_on=lambda so_far: not so_far.failures and time.monotonic() < bounds.until_s,
        )  # fmt: skip
        progress.show(report.sent, last=True)
        _check(report, bounds, f"{policy}, {kind}, chunk {number + 1}")
        _at_rest(server)


@pytest.fixture
def burning_core() -> Iterator[None]:
    """Keep one core busy with something else."""
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        burner.kill()
        burner.wait(10)


@pytest.mark.usefixtures("burning_core")
def test_the_contract_again_and_again(engine_binary: Path, bounds: Bounds) -> None:
    """Timing decides nothing: each run of all `contract` tests passes, while another process burns a core."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-k", "contract", "-m", "engine and not soak", str(Path(__file__).parent)]
    env = os.environ | {"LLAMA_SERVER_BIN": str(engine_binary)}
    progress = Progress("the contract beside a busy core", bounds.passes, "passes")
    for number in range(1, bounds.passes + 1):
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PASS_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"pass {number} with {engine_binary}:\n{done.stdout[-4000:]}"
        progress.show(number, last=True)
        if time.monotonic() >= bounds.until_s:
            break
