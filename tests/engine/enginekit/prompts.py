"""Prompts of a wanted length, all different and all the same on each run."""

from __future__ import annotations

import random

WORDS = [
    "river",
    "mill",
    "boat",
    "children",
    "bank",
    "spring",
    "salt",
    "wood",
    "letters",
    "rain",
    "bridge",
    "stories",
    "fox",
    "lamp",
    "girl",
    "wind",
    "evening",
    "light",
    "water",
    "gold",
    "birds",
    "home",
    "doors",
    "dark",
    "stone",
    "time",
    "road",
    "people",
    "name",
    "end",
]


def words(count: int, seed: int = 0) -> str:
    """Return ``count`` words; different seeds share no beginning."""
    rng = random.Random(seed * 7919 + 17)
    return " ".join([f"{seed}:"] + [rng.choice(WORDS) for _ in range(count)])
