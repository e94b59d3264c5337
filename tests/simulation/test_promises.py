"""What admission promises, in simulated time: shares, recall, shape, overload. Seeded, no clocks."""

import statistics
from dataclasses import replace

import pytest

from proxy.types import PhasePolicy
from tests.simulation import scenarios, stats, workload
from tests.simulation.world import DEFAULT, FIFO, World

SEEDS = range(20)
patient = pytest.mark.timeout(3600)
"""Twenty runs take seconds of computing, on a machine that has other work minutes."""


@patient
def test_keys_get_equal_shares_whatever_one_of_them_asks_for():
    """Five backlogged keys, one with ten times the requests: Jain of weighted tokens, and nobody polite waits longer."""
    flooded = [scenarios.fairness(seed) for seed in SEEDS]
    polite = [scenarios.fairness(seed, flood=1) for seed in SEEDS]
    assert min(run.fewest for run in flooded) >= scenarios.SERVED
    assert min(run.jain for run in flooded) >= 0.98
    ratios = [mine.polite_p95_s / theirs.polite_p95_s for mine, theirs in zip(flooded, polite, strict=True)]
    assert max(ratios) <= 1.25
    arrival = [scenarios.fairness(seed, FIFO) for seed in SEEDS[:2]]
    assert max(run.jain for run in arrival) < 0.6, "arrival order would have done as well"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_higher_class_gets_into_the_next_cohort_by_recall(seed):
    """The one that it takes the place of goes with the cohort after."""
    world = scenarios.recall(seed)
    recalled = [client.ask.name for client in world.clients.values() if client.recalls]
    assert len(recalled) == 1
    first = scenarios.cohort_of(world, "long")
    assert scenarios.cohort_of(world, "urgent") == first + 1
    assert scenarios.cohort_of(world, recalled[0]) == first + 2
    assert world.clients[recalled[0]].tags[1].endswith(".1.r1")
    assert world.state.tickets == {}


def test_without_recall_a_higher_class_misses_the_next_cohort():
    world = scenarios.recall(0, replace(DEFAULT, recall=False))
    assert scenarios.cohort_of(world, "urgent") == scenarios.cohort_of(world, "long") + 2


@patient
@pytest.mark.parametrize("load", [workload.poisson_conv, workload.gamma_code], ids=["conv", "code"])
def test_shaped_cohorts_bring_the_second_token_sooner(load):
    """At 70 % load: a fifth less in the median seed, in no seed more; nobody is held beyond the bound."""
    runs = [scenarios.shaping(seed, load, max_wait_s=120.0) for seed in SEEDS]
    assert statistics.median(run.gain for run in runs) >= 0.20
    assert min(run.gain for run in runs) >= 0.0
    assert max(run.longest_hold_s for run in runs) <= 120.0 + 1e-6
    assert max(run.makespan for run in runs) <= 1.05


@patient
def test_shaping_does_not_cost_throughput_when_the_queue_is_long():
    """Beyond the capacity cohorts fill up again: an empty place would delay all who wait."""
    runs = [scenarios.shaping(seed, share=1.3, count=120) for seed in SEEDS[:5]]
    assert max(run.makespan for run in runs) <= 1.05


@patient
def test_overload_is_refused_honestly():
    """Twice the load for a minute: goodput holds, and who comes back when told is let in."""
    runs = [scenarios.overload(seed) for seed in SEEDS]
    assert min(run.refused for run in runs) > 100
    assert min(run.goodput for run in runs) >= 0.9
    assert min(run.kept for run in runs) >= 0.8


def test_gather_hints_keep_cohorts_full_when_all_end_at_once():
    """Equal outputs: every slot ends in one step, and the engine waits for those who are on their way."""
    hinted, plain = scenarios.equal_outputs(1, 20), scenarios.equal_outputs(1, 0)
    assert stats.mean(hinted[1:-1]) >= 3.8
    assert stats.mean(plain[1:-1]) < 3.0, "the hint made no difference"


@pytest.mark.parametrize("policy", [PhasePolicy.DRAIN, PhasePolicy.YIELD])
@pytest.mark.parametrize("backends", [1, 3])
@pytest.mark.parametrize("shape", [False, True])
def test_everybody_is_served_once_and_the_rules_hold_at_each_step(policy, backends, shape):
    asks = workload.poisson_conv(3, 0.3 * backends, 60, keys=5)
    limits = replace(DEFAULT, shape=shape)
    world = World(asks, scenarios.GPU, limits, policy=policy, backends=backends, check=True).run()
    assert all(client.done is not None for client in world.clients.values())
    assert world.state.tickets == {}
    assert all(engine.idle for engine in world.engines.values())
    used = {engine.key for engine in world.engines.values() if engine.cohorts}
    assert len(used) == backends


def test_the_same_seed_is_the_same_run():
    def life():
        world = World(workload.poisson_conv(7, 0.4, 40, keys=3), scenarios.GPU, DEFAULT, seed=7).run()
        return [(c.grants, c.first, c.second, c.done) for c in world.clients.values()]

    assert life() == life()
