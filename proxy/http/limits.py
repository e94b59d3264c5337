"""How long an answer may get: what a request asks for, and the operator's default and cap. Pure.

llama-server reads `n_predict`, else `max_completion_tokens`, else `max_tokens` (null is absent, -1 is no
limit); `/v1/responses` puts `max_output_tokens` over `max_tokens`; `/v1/messages` knows `max_tokens` alone, and
takes 4,096 without it. A value that the engine refuses is left for it to refuse.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.sse import Shape

UNLIMITED: Final = -1
REFUSED: Final = 0
"""Stands for what the engine answers with 400: no cap is lower, so the body stays as it is."""
_ENDLESS: Final = 1 << 62
_ANTHROPIC_DEFAULT: Final = 4096
_PLAIN: Final = ("n_predict", "max_completion_tokens", "max_tokens")
_RESPONSES: Final = ("n_predict", "max_completion_tokens", "max_output_tokens")
_LEADING: Final = re.compile(rb"\s*([+-]?)([0-9]{1,30})")


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """`default` for requests that name no limit, `cap` for all; tokens of one answer, None is off."""

    default: int | None = None
    cap: int | None = None

    def settle(self, asked: int | None, shape: Shape | None) -> int | None:
        """Return the limit a request gets; `asked` is `asked_tokens`'. Equal to it: nothing to change."""
        if shape is None or asked == REFUSED:
            return asked
        implied = _ANTHROPIC_DEFAULT if shape is Shape.MESSAGES else None
        wanted = self.default if asked is None and self.default is not None else asked
        if self.cap is None:
            return wanted
        real = implied if wanted is None else wanted
        if real is None or real == UNLIMITED or real > self.cap:
            return self.cap
        return wanted


def lower(*caps: int | None) -> int | None:
    """Return the lowest of several caps, None when all are off."""
    return min((cap for cap in caps if cap is not None), default=None)


def names_of(body: Mapping[str, Any], shape: Shape) -> tuple[str, ...]:
    """Return the fields that may limit an answer, the one that wins first."""
    match shape:
        case Shape.MESSAGES:
            return ("max_tokens",)
        case Shape.RESPONSES:
            # even a null there takes `max_tokens` away
            return _RESPONSES if "max_output_tokens" in body else (*_RESPONSES, "max_tokens")
        case _:
            return _PLAIN


def asked_tokens(body: Mapping[str, Any], shape: Shape | None) -> int | None:
    """Return the limit a JSON body asks for: None for none, `UNLIMITED`, `REFUSED`, or tokens."""
    if shape is None:
        return None
    for name in names_of(body, shape):
        value = body.get(name)
        if value is not None:
            return _number(value)
    return None


def asked_in_form(values: Iterable[bytes]) -> int | None:
    """Return the same of a form's fields `max_tokens`, which the engine reads with `stoul`."""
    found = [_unsigned(value) for value in values]
    if not found:
        return None
    # the engine takes one of several; which one must not matter
    return UNLIMITED if UNLIMITED in found else max(found)


def with_limit(body: dict[str, Any], shape: Shape, tokens: int) -> None:
    """Put a limit into a body: over the field that wins, else as the field of the dialect."""
    given = next((name for name in names_of(body, shape) if body.get(name) is not None), None)
    body[given or ("max_output_tokens" if shape is Shape.RESPONSES else "max_tokens")] = tokens


def _number(value: Any) -> int:
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) else _ENDLESS
    if not isinstance(value, int) or value < UNLIMITED:
        return REFUSED
    return int(value)


def _unsigned(value: bytes) -> int:
    match = _LEADING.match(value)
    if match is None:
        return REFUSED
    # a minus wraps around to a number that no answer reaches
    return UNLIMITED if match[1] == b"-" and int(match[2]) else int(match[2])
