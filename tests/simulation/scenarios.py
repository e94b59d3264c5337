"""What the proxy promises about admission, as runs whose numbers can be asserted or looked at."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from proxy.admission.records import Limits
from proxy.types import Reason
from tests.simulation import stats, workload
from tests.simulation.engine import Speed
from tests.simulation.workload import Ask
from tests.simulation.world import DEFAULT, FIFO, Client, World

CPU = Speed(prompt_token_s=0.006, step_s=0.011, step_slot_s=0.009)
"""Measured: SmolLM2-135M on two CPU cores (about 2,000 prompt tokens in 12 s; 93 tokens/s alone; each further
member costs most of a step again)."""
GPU = Speed(prompt_token_s=0.0007, step_s=0.030, step_slot_s=0.002)
"""Assumed: a 27B model on data-centre GPUs; reading is cheap, answering dominates."""
FAST = Speed(prompt_token_s=0.0001, step_s=0.010, step_slot_s=0.001)
"""Assumed: a small model on such a GPU."""
SPEEDS = {"cpu": CPU, "gpu": GPU, "fast": FAST}

Workload = Callable[[int, float, int], list[Ask]]


def capacity(asks: list[Ask], speed: Speed) -> float:
    """Requests per second that an engine serves in arrival order when all of them wait from the start."""
    world = World(workload.all_at_once(asks), speed, FIFO).run()
    return len(asks) / max(client.done or 0.0 for client in world.clients.values())


# --- fair share -------------------------------------------------------------------------------------

POLITE = ("k1", "k2", "k3", "k4")
SERVED = 40


@dataclass(frozen=True, slots=True)
class Fairness:
    """Jain's index of weighted tokens served while all keys are backlogged, and the polite keys' p95 wait."""

    jain: float
    polite_p95_s: float
    fewest: int


def fairness(seed: int, limits: Limits = DEFAULT, *, flood: int = 10, speed: Speed = GPU) -> Fairness:
    """Four polite keys and one that asks for `flood` times as much, until each was served 40 times."""
    keys = dict.fromkeys(POLITE, SERVED + 5) | {"flood": (SERVED + 5) * flood}
    world = World(workload.backlog(seed, keys), speed, limits, seed=seed)
    until = 0.0
    while min(_done(world, key) for key in keys) < SERVED:
        until += 20.0
        world.run(until)
    waits = []
    for key in POLITE:
        mine = sorted(stats.of_key(world, key), key=lambda client: client.ask.at)
        waits += sorted(client.wait for client in mine)[:SERVED]
    tokens = stats.served(world, until, limits.fair_decode_weight)
    fewest = min(_done(world, key) for key in keys)
    return Fairness(stats.jain(list(tokens.values())), stats.quantile(waits, 0.95), fewest)


def _done(world: World, key: str) -> int:
    return sum(1 for client in stats.of_key(world, key) if client.done is not None)


# --- recall -----------------------------------------------------------------------------------------


def recall(seed: int, limits: Limits = DEFAULT) -> World:
    """During a long generation four requests wait natively; then one of a higher class comes."""
    asks = [
        Ask("long", 0.0, 200, 1_500),
        *(Ask(f"normal{index}", 1.0 + index * 0.1, 300, 40, key=f"n{index}") for index in range(5)),
        Ask("urgent", 10.0, 300, 40, key="u", priority=10),
    ]
    return World(asks, CPU, limits, seed=seed, check=True).run()


def cohort_of(world: World, name: str) -> int:
    """The number of the cohort in which a request was read."""
    numbers = [
        cohort.number
        for engine in world.engines.values()
        for cohort in engine.cohorts
        if any(tag.split(".")[0] == name for tag in cohort.tags)
    ]
    assert len(numbers) == 1, f"{name} was read in {numbers}"
    return numbers[0]


# --- shape ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shaped:
    """Mean seconds to the second token in arrival order and shaped, and the longest hold for shape's sake."""

    plain_s: float
    shaped_s: float
    longest_hold_s: float
    makespan: float

    @property
    def gain(self) -> float:
        """Share of the mean that shaping saves."""
        return 1.0 - self.shaped_s / self.plain_s


def shaping(
    seed: int,
    load: Workload = workload.poisson_conv,
    *,
    speed: Speed = CPU,
    share: float = 0.7,
    count: int = 200,
    max_wait_s: float = 120.0,
) -> Shaped:
    """A workload at a share of the engine's capacity, in arrival order and with shaped cohorts."""
    rate = share * capacity(load(seed, 1.0, count), speed)
    asks = load(seed, rate, count)
    plain = World(asks, speed, FIFO, seed=seed).run()
    shaped = World(asks, speed, replace(FIFO, shape=True, shape_max_wait_s=max_wait_s), seed=seed).run()
    clients = list(shaped.clients.values())
    assert all(client.done is not None for client in clients), "somebody was never served"
    return Shaped(
        stats.mean(client.to_second for client in plain.clients.values()),
        stats.mean(client.to_second for client in clients),
        max(client.held.get(Reason.COHORT_SHAPE, 0.0) for client in clients),
        max(client.done or 0.0 for client in clients)
        / max(client.done or 0.0 for client in plain.clients.values()),
    )


# --- overload ---------------------------------------------------------------------------------------

SLO_S = 30.0
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Overload:
    """Tokens per second inside the objective in the first minute, at 2 x and at 1 x; what became of refused clients."""

    tokens_2x: float
    tokens_1x: float
    refused: int
    queued_at_retry: int

    @property
    def goodput(self) -> float:
        """The first minute at twice the load, beside one at the capacity."""
        return self.tokens_2x / self.tokens_1x

    @property
    def kept(self) -> float:
        """Share of refused clients that were queued when they came back as told."""
        return self.queued_at_retry / max(1, self.refused)


def overload(seed: int, *, speed: Speed = FAST, max_queue: int = 24, ids: bool = True) -> Overload:
    """A minute at twice the capacity, a minute at 0.8 of it; refused clients come back once, as told.

    They are up to 10 % late. `ids`: they say who they are (`x-request-id`).
    """
    rate = capacity(workload.gamma_code(seed, 1.0, 200), speed)
    limits = replace(DEFAULT, max_queue=max_queue)
    twice = workload.loads(seed, rate, ((MINUTE_S, 2.0), (MINUTE_S, 0.8)))
    once = workload.loads(seed, rate, ((MINUTE_S, 1.0),))

    def again(client: Client, chance: object) -> float | None:
        assert hasattr(chance, "uniform")
        return client.refused[-1][1] * chance.uniform(1.0, 1.1) if len(client.refused) == 1 else None

    world = World(twice, speed, limits, retry=again, retry_ids=ids, seed=seed).run()
    beside = World(once, speed, limits, retry=again, retry_ids=ids, seed=seed).run()
    refused = [client for client in world.clients.values() if client.refused]
    queued = sum(1 for client in refused if len(client.refused) == 1)
    return Overload(_goodput(world), _goodput(beside), len(refused), queued)


def _goodput(world: World) -> float:
    good = (
        c for c in world.clients.values() if c.done is not None and c.done <= MINUTE_S and c.wait <= SLO_S
    )
    return sum(client.ask.output for client in good) / MINUTE_S


# --- gathering --------------------------------------------------------------------------------------


def equal_outputs(seed: int, gather_ms: int, count: int = 64) -> list[int]:
    """Sizes of the cohorts of a burst whose answers are equally long: all members end in one step."""
    limits = replace(DEFAULT, gather_ms=gather_ms)
    return stats.cohort_sizes(World(workload.burst(seed, count, output=50), GPU, limits, seed=seed).run())
