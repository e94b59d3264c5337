"""``llama-proxy bench``: measure."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from proxy.bench import (
    BenchError,
    Configuration,
    HashRule,
    Matrix,
    Policy,
    Program,
    Store,
    fingerprint,
    identify_engine,
    parse_policies,
    plots,
    run_matrix,
    summarize,
    write_json,
    write_text,
)
from proxy.cli.bench_report import explain, render
from proxy.cli.engine_shared import json_option, plain_errors
from proxy.cli.progress import ConsoleProgress
from proxy.engine import EngineToolError, ensure_engine, options_from_environment

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
_NOT_OK = 1


@click.group()
def bench() -> None:
    """Measure engines."""


def _as_tool_error(function: Callable[P, None]) -> Callable[P, None]:
    """Show a BenchError the way the engine commands show theirs."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except BenchError as error:
            raise EngineToolError(error.message) from error

    return wrapper


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise BenchError(f"{flag}: expected whole numbers of at least 1, such as 16,96; got {text!r}")
    return values


def _shares(flag: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise BenchError(f"{flag}: expected numbers separated by commas; got {text!r}") from None


@bench.command("engine")
@click.option(
    "--model", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="GGUF file to measure with."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("bench-engine"),
    show_default=True,
    help="Directory of evidence, summary and plots; an interrupted measurement goes on from there.",
)
@click.option(
    "--policies", default="all", show_default=True, help=f"Some of {', '.join(Policy)}, separated by commas."
)
@click.option(
    "--base",
    type=click.Choice([str(policy) for policy in Policy]),
    help="Policy that ratios are over; default: barrier-serial, or the first one.",
)
@click.option(
    "--lengths",
    default="16,96",
    show_default=True,
    help="Prompt lengths in tokens; measured in this order and reversed.",
)
@click.option("--predict", type=click.IntRange(1), default=8, show_default=True, help="Tokens per request.")
@click.option(
    "--repetitions",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Runs of each policy and order.",
)
@click.option("--slots", type=click.IntRange(1), help="Sequences at once; default: one per prompt.")
@click.option(
    "--batch", type=click.IntRange(1), default=2048, show_default=True, help="Tokens per decode call."
)
@click.option(
    "--ubatch", type=click.IntRange(1), help="Tokens per computation; default: 512, at most --batch."
)
@click.option(
    "--cache",
    type=click.Choice(["f16", "f32", "q8_0"]),
    default="f16",
    show_default=True,
    help="KV cache, keys and values.",
)
@click.option("--flash-attn", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True)
@click.option("--kv-unified", is_flag=True, help="One cache for all sequences instead of one each.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
@click.option("--gpu-layers", default="all", show_default=True, help="Layers on GPUs: a number or 'all'.")
@click.option("--tensor-split", default="", help="Parts of the model per GPU, such as 3,1.")
@click.option(
    "--ctx",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Context of all sequences; 0: what is needed.",
)
@click.option("--mtp", is_flag=True, help="Run the model's MTP head over the prompts, as the server does.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Chooses the prompts' words and the order of runs.",
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0.001),
    default=600.0,
    show_default=True,
    help="A longer run is stopped.",
)
@click.option(
    "--memory-limit-mib",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Most address space of a run; 0: no limit.",
)
@click.option(
    "--hashes",
    type=click.Choice([str(rule) for rule in HashRule]),
    default=str(HashRule.ALL),
    show_default=True,
    help="Whose outputs must be equal: all policies', the barrier policies', or report only.",
)
@click.option("--retry", is_flag=True, help="Do runs again that did not end well.")
@click.option(
    "--dry-run", is_flag=True, help="Schedules and invariants only: no model, times are token counts."
)
@click.option(
    "--harness",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="llama-phase-harness to use; default: that of the built engine, built where missing.",
)
@json_option
@plain_errors
@_as_tool_error
def engine_matrix(
    model: Path | None,
    out: Path,
    policies: str,
    base: str | None,
    hashes: str,
    timeout_s: float,
    repetitions: int,
    seed: int,
    retry: bool,
    harness: Path | None,
    as_json: bool,
    **setup: Any,
) -> None:
    """Compare scheduling policies on libllama, without HTTP.

    Every policy, every prompt order, shuffled repetitions, one process each. Loading and tokenizing are not timed. Exit
    code 1 when runs failed or policies did not do the same; memory that ran out is a result.
    """
    chosen = parse_policies(policies)
    compared = Policy(base) if base else (Policy.SERIAL if Policy.SERIAL in chosen else chosen[0])
    if compared not in chosen:
        raise BenchError(f"--base: {compared} is not among --policies {','.join(chosen)}")
    configuration = _configuration(seed=seed, **setup)
    if model is None and not configuration.dry_run:
        raise BenchError("--model is missing: a GGUF file, or --dry-run for the schedules alone")
    with ConsoleProgress() as progress:
        path = harness.absolute() if harness else _built_harness(progress)
        matrix = Matrix(
            configuration,
            chosen,
            repetitions,
            seed,
            fingerprint(model) if model else "none",
            identify_engine(path),
        )
        program = Program(path, model.absolute() if model else None, timeout_s)
        results = run_matrix(program, matrix, Store(out), progress, retry=retry)
    summary = summarize(matrix, results, compared, HashRule(hashes))
    _write(out, summary, plots(matrix, results))
    click.echo(json.dumps(summary) if as_json else render(summary))
    for line in explain(summary):
        click.echo(line, err=True)
    if not summary["ok"]:
        sys.exit(_NOT_OK)


def _configuration(*, seed: int, **setup: Any) -> Configuration:
    lengths = _numbers("--lengths", setup.pop("lengths"))
    batch = setup["batch"]
    values = setup | {
        "lengths": lengths,
        "slots": setup["slots"] or len(lengths),
        "ubatch": setup["ubatch"] or min(512, batch),
        "tensor_split": _shares("--tensor-split", setup["tensor_split"]),
        "prompt_seed": seed,
    }
    return Configuration(**values)


def _built_harness(progress: ConsoleProgress) -> Path:
    built = ensure_engine(dataclasses.replace(options_from_environment(), harness=True), progress)
    if built.harness is None:
        raise EngineToolError(f"{built.dir} has no harness; run: llama-proxy engine build --harness")
    return built.harness


def _write(out: Path, summary: dict[str, Any], pictures: dict[str, str]) -> None:
    write_json(out / "summary.json", summary)
    write_text(out / "summary.txt", render(summary) + "\n")
    if pictures:
        (out / "plots").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        write_text(out / "plots" / name, picture)
