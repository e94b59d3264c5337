"""Seeded workloads: who asks for what, and when. Times in simulated seconds, lengths in tokens.

The length distributions are lognormal fits to the Azure 2023 inference traces, conversation and code; they
are cut where those traces end (14,050 and 7,437 prompt tokens, 1,000 generated ones and 2,000).
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths: of the logarithm, mean and standard deviation."""

    prompt_mu: float
    prompt_sigma: float
    output_mu: float
    output_sigma: float
    prompt_max: int
    output_max: int

    def draw(self, chance: random.Random) -> tuple[int, int]:
        """Return prompt and output tokens of one request."""
        prompt = round(chance.lognormvariate(self.prompt_mu, self.prompt_sigma))
        output = round(chance.lognormvariate(self.output_mu, self.output_sigma))
        return min(self.prompt_max, max(1, prompt)), min(self.output_max, max(1, output))


CONVERSATION = Lengths(6.633, 0.985, 5.019, 0.859, 14_050, 1_000)
CODE = Lengths(6.999, 1.360, 2.788, 0.847, 7_437, 2_000)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload."""

    name: str
    at: float
    prompt: int
    output: int
    key: str = "k"
    priority: int = 0
    bytes_per_token: float = 4.0

    @property
    def prompt_bytes(self) -> int:
        """Bytes of its prompt: what the proxy sees."""
        return max(1, round(self.prompt * self.bytes_per_token))


def _ask(chance: random.Random, lengths: Lengths, index: int, at: float, key: str = "k") -> Ask:
    prompt, output = lengths.draw(chance)
    # texts differ in how well a vocabulary fits them, so byte counts are only an estimate
    return Ask(
        f"{key}-{index:05}", at, prompt, output, key, bytes_per_token=4.2 * math.exp(chance.gauss(0, 0.15))
    )


def poisson_conv(seed: int, rate: float, count: int, keys: int = 1) -> list[Ask]:
    """Conversation lengths, Poisson arrivals of `rate` per second."""
    chance = random.Random(f"conv-{seed}")
    at = 0.0
    asks = []
    for index in range(count):
        at += chance.expovariate(rate)
        asks.append(_ask(chance, CONVERSATION, index, at, f"k{index % keys}"))
    return asks


def gamma_code(seed: int, rate: float, count: int, keys: int = 1) -> list[Ask]:
    """Code lengths, bursty arrivals: gamma-distributed gaps with a coefficient of variation of 2."""
    chance = random.Random(f"code-{seed}")
    at = 0.0
    asks = []
    for index in range(count):
        at += chance.gammavariate(0.25, 4.0 / rate)
        asks.append(_ask(chance, CODE, index, at, f"k{index % keys}"))
    return asks


def burst(seed: int, count: int, output: int | None = None) -> list[Ask]:
    """All at once; `output` makes all answers equally long."""
    chance = random.Random(f"burst-{seed}")
    asks = [_ask(chance, CONVERSATION, index, index * 1e-4) for index in range(count)]
    return asks if output is None else [replace(ask, output=output) for ask in asks]


def all_at_once(asks: list[Ask]) -> list[Ask]:
    """The same requests, in the same order, without their times: what a capacity is measured with."""
    return [replace(ask, at=index * 1e-4) for index, ask in enumerate(asks)]


def late_long(seed: int, shorts: int = 3, prompt: int = 2_100, after: float = 5.0) -> list[Ask]:
    """A few short streams at work, and one long prompt that comes late."""
    chance = random.Random(f"late-{seed}")
    asks = [Ask(f"short-{i}", i * 1e-4, 40 + chance.randrange(40), 800) for i in range(shorts)]
    return [*asks, Ask("long", after, prompt, 60)]


def backlog(
    seed: int, keys: dict[str, int], spread: float = 1.0, lengths: Lengths = CONVERSATION
) -> list[Ask]:
    """Every key asks for its number of requests at once (`spread` seconds): all are backlogged.

    The i-th request of each key has the same lengths, so that all bring the same mix. A key with ten
    times the requests is the flood.
    """
    asks = []
    for key, count in keys.items():
        chance = random.Random(f"backlog-{seed}")
        arrival = random.Random(f"backlog-{seed}-{key}")
        order = sorted(arrival.random() * spread for _ in range(count))
        asks += [_ask(chance, lengths, index, at, key) for index, at in enumerate(order)]
    return sorted(asks, key=lambda ask: ask.at)


def loads(
    seed: int, capacity: float, phases: tuple[tuple[float, float], ...], lengths: Lengths = CODE
) -> list[Ask]:
    """Poisson arrivals, phase after phase: (seconds, multiple of the capacity in requests per second)."""
    chance = random.Random(f"loads-{seed}")
    asks: list[Ask] = []
    start = 0.0
    for seconds, load in phases:
        at = start
        while (at := at + chance.expovariate(load * capacity)) < start + seconds:
            asks.append(_ask(chance, lengths, len(asks), at))
        start += seconds
    return asks


WORKLOADS: dict[str, Callable[[int, float, int], list[Ask]]] = {
    "poisson-conv": poisson_conv,
    "gamma-code": gamma_code,
}
