"""Look at admission in simulated time: `python -m tests.simulation shape --seeds 20 --speed gpu`."""

import statistics
from collections.abc import Callable
from dataclasses import replace

import click
from rich.console import Console
from rich.table import Table

from tests.simulation import scenarios, workload
from tests.simulation.world import DEFAULT, FIFO

_SEEDS = click.option("--seeds", default=5, show_default=True, help="How many seeded runs.")
_SPEED = click.option(
    "--speed",
    type=click.Choice(list(scenarios.SPEEDS)),
    default="cpu",
    show_default=True,
    help="Which engine: measured on a small CPU, or assumed for data-centre GPUs.",
)


@click.group(help=__doc__)
def main() -> None:
    """Group of scenarios."""


def _show(title: str, columns: dict[str, list[float]]) -> None:
    table = Table("", "least", "median", "greatest", title=title)
    for name, values in columns.items():
        row = (min(values), statistics.median(values), max(values))
        table.add_row(name, *(f"{value:.3f}" for value in row))
    Console().print(table)


@main.command()
@_SEEDS
@_SPEED
@click.option("--flood", default=10, show_default=True, help="How much more the fifth key asks for.")
def fairness(seeds: int, speed: str, flood: int) -> None:
    """Five backlogged keys, one of them greedy: shares and waits, beside arrival order."""
    engine = scenarios.SPEEDS[speed]
    for name, limits in (("fair share", DEFAULT), ("arrival order", FIFO)):
        runs = [scenarios.fairness(seed, limits, flood=flood, speed=engine) for seed in range(seeds)]
        _show(
            f"{name}, fifth key {flood}x",
            {
                "Jain of weighted tokens": [run.jain for run in runs],
                "polite p95 wait s": [run.polite_p95_s for run in runs],
            },
        )


@main.command()
@_SEEDS
@_SPEED
@click.option(
    "--load", type=click.Choice(list(workload.WORKLOADS)), default="poisson-conv", show_default=True
)
@click.option("--share", default=0.7, show_default=True, help="Of the engine's capacity in arrival order.")
@click.option("--count", default=200, show_default=True, help="Requests per run.")
@click.option("--max-wait", default=120.0, show_default=True, help="cohort_shape_max_wait_s.")
def shape(seeds: int, speed: str, load: str, share: float, count: int, max_wait: float) -> None:
    """Shaped cohorts beside arrival order: seconds to the second token."""
    make: Callable[[int, float, int], list[workload.Ask]] = workload.WORKLOADS[load]
    engine = scenarios.SPEEDS[speed]
    runs = [
        scenarios.shaping(seed, make, speed=engine, share=share, count=count, max_wait_s=max_wait)
        for seed in range(seeds)
    ]
    _show(
        f"{load} at {share:.0%} of the capacity, {speed}",
        {
            "arrival order, mean s": [run.plain_s for run in runs],
            "shaped, mean s": [run.shaped_s for run in runs],
            "gain": [run.gain for run in runs],
            "longest hold s": [run.longest_hold_s for run in runs],
            "makespan, relative": [run.makespan for run in runs],
        },
    )


@main.command()
@_SEEDS
@click.option("--ids/--no-ids", default=True, show_default=True, help="Refused clients say who they are.")
def overload(seeds: int, ids: bool) -> None:
    """A minute at twice the capacity, then one at 0.8 of it; refused clients come back as told."""
    runs = [scenarios.overload(seed, ids=ids) for seed in range(seeds)]
    _show(
        "overload",
        {
            "goodput beside 1x": [run.goodput for run in runs],
            "refused": [float(run.refused) for run in runs],
            "queued when back": [run.kept for run in runs],
        },
    )


@main.command()
@_SEEDS
def recall(seeds: int) -> None:
    """The cohort of an urgent latecomer behind a long answer's, with and without recall."""
    columns = {}
    for name, limits in (("with recall", DEFAULT), ("without", replace(DEFAULT, recall=False))):
        runs = [scenarios.recall(seed, limits) for seed in range(seeds)]
        columns[name] = [
            float(scenarios.cohort_of(run, "urgent") - scenarios.cohort_of(run, "long")) for run in runs
        ]
    _show("cohorts later", columns)


@main.command()
@_SEEDS
def gather(seeds: int) -> None:
    """Cohort sizes of 64 requests with equal outputs, with and without the gather hint."""
    columns = {}
    for name, hint in (("20 ms", 20), ("none", 0)):
        runs = [scenarios.equal_outputs(seed, hint) for seed in range(seeds)]
        columns[name] = [statistics.fmean(sizes[1:-1]) for sizes in runs]
    _show("mean cohort size", columns)


if __name__ == "__main__":
    main()
