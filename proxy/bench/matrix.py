"""The matrix of harness runs: one fixed configuration, every policy in every prompt order, shuffled repetitions. Pure."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from proxy.bench.errors import BenchError

FORMAT = 1


class Policy(StrEnum):
    """How the harness fills its batches; its own words."""

    MIXED = "mixed"
    GREEDY = "barrier-greedy"
    FAIR = "barrier-fair"
    SERIAL = "barrier-serial"


class HashRule(StrEnum):
    """Which policies must have sampled the same tokens for a measurement to count."""

    ALL = "all"
    BARRIER = "barrier"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What all runs of a matrix share. ``lengths`` and ``predict`` are tokens, ``ctx`` 0 means what the work needs."""

    lengths: tuple[int, ...]
    predict: int
    slots: int
    batch: int
    ubatch: int
    cache: str = "f16"
    flash_attn: str = "auto"
    kv_unified: bool = False
    threads: int = 1
    gpu_layers: str = "all"
    tensor_split: tuple[float, ...] = ()
    ctx: int = 0
    mtp: bool = False
    mtp_draft: int = 3
    prompt_seed: int = 1
    memory_limit_mib: int = 0
    dry_run: bool = False

    def flags(self) -> list[str]:
        """The harness's flags for this configuration, without policy, order, model and report."""
        flags = [
            *("--predict", str(self.predict), "--slots", str(self.slots)),
            *("--batch", str(self.batch), "--ubatch", str(self.ubatch)),
            *("--cache", self.cache, "--flash-attn", self.flash_attn),
            *("--threads", str(self.threads), "--gpu-layers", self.gpu_layers),
            *("--ctx", str(self.ctx), "--seed", str(self.prompt_seed)),
        ]
        if self.tensor_split:
            flags += ["--tensor-split", ",".join(f"{part:g}" for part in self.tensor_split)]
        if self.kv_unified:
            flags.append("--kv-unified")
        if self.mtp:
            flags += ["--mtp", "--mtp-draft", str(self.mtp_draft)]
        if self.memory_limit_mib:
            flags += ["--memory-limit-mib", str(self.memory_limit_mib)]
        if self.dry_run:
            flags.append("--dry-run")
        return flags


@dataclass(frozen=True, slots=True)
class Matrix:
    """A whole measurement: the configuration, what is varied, and what it is measured on.

    ``model`` and ``engine`` identify the files that were used, so that evidence of two builds is never pooled.
    """

    configuration: Configuration
    policies: tuple[Policy, ...]
    repetitions: int
    shuffle_seed: int
    model: str
    engine: str

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """The prompt lengths as given and reversed; one order where both are the same."""
        given = self.configuration.lengths
        return (given,) if given == given[::-1] else (given, given[::-1])

    def to_json(self) -> dict[str, Any]:
        """The matrix as plain values, for its file and for comparison."""
        values = asdict(self)
        values["configuration"]["lengths"] = list(self.configuration.lengths)
        values["configuration"]["tensor_split"] = list(self.configuration.tensor_split)
        values["policies"] = [str(policy) for policy in self.policies]
        return {"format": FORMAT, **values}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the harness. ``repetition`` counts from 1."""

    policy: Policy
    order: tuple[int, ...]
    repetition: int

    @property
    def key(self) -> str:
        """A file name that says what it is."""
        return f"{self.policy}_{'-'.join(map(str, self.order))}_r{self.repetition}"


def plan_runs(matrix: Matrix) -> tuple[Run, ...]:
    """Every run in the order it is done: repetition after repetition, each shuffled anew.

    A machine that grows slower then slows every policy alike. The same seed gives the same order.
    """
    chance = random.Random(matrix.shuffle_seed)  # noqa: S311 - an order of runs, nothing secret
    runs: list[Run] = []
    for repetition in range(1, matrix.repetitions + 1):
        block = [Run(policy, order, repetition) for policy in matrix.policies for order in matrix.orders]
        chance.shuffle(block)
        runs += block
    return tuple(runs)


def parse_policies(text: str) -> tuple[Policy, ...]:
    """Read ``a,b,c`` or ``all``; the first one is what others are compared with unless another base is named."""
    if text.strip() == "all":
        return tuple(Policy)
    names = [part.strip() for part in text.split(",") if part.strip()]
    if unknown := [name for name in names if name not in set(Policy)]:
        raise BenchError(f"--policies: unknown {', '.join(unknown)}; choose from {', '.join(Policy)}, or all")
    if not names or len(set(names)) != len(names):
        raise BenchError(f"--policies: expected different names separated by commas, got {text!r}")
    return tuple(Policy(name) for name in names)
