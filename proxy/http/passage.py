"""`/upstream/{model}/{path}`: which paths of an engine can be reached through us. Pure.

Exact matches only, on the raw path: what is encoded, doubled or climbs (`..`) matches nothing.
"""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

PREFIX: Final = "/upstream/"

_OPERATOR: Final = (
    ("GET", re.compile(r"/health")),
    ("GET", re.compile(r"/props")),
    ("POST", re.compile(r"/props")),
    ("GET", re.compile(r"/slots")),
    ("POST", re.compile(r"/slots/[0-9]{1,4}")),
    ("GET", re.compile(r"/lora-adapters")),
    ("POST", re.compile(r"/lora-adapters")),
)
"""Besides inference; `/metrics` is left out because reading it resets its gauges."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A model's name and the engine's own target."""

    model: str
    path: str
    query: str

    @property
    def target(self) -> str:
        """The engine's path with its query."""
        return f"{self.path}?{self.query}" if self.query else self.path


def split(raw_path: str) -> Passed | None:
    """Take a raw target apart; None when it has no model or no path.

    Only the model's name is decoded: it may hold an encoded slash.
    """
    path, _, query = raw_path.partition("?")
    if not path.startswith(PREFIX):
        return None
    name, slash, rest = path[len(PREFIX) :].partition("/")
    if not name or not slash:
        return None
    return Passed(unquote(name), "/" + rest, query)


def operator_may(method: str, path: str) -> bool:
    """Whether an operator may send this to an engine."""
    verb = "GET" if method == "HEAD" else method
    return any(verb == allowed and pattern.fullmatch(path) for allowed, pattern in _OPERATOR)
