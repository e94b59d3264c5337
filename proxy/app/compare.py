"""What another configuration would change in a running proxy. Pure.

Models and the bounds of admission are changed while the proxy runs, everything else at its next start. A model is
restarted when what shapes its process, or the way to it, has changed; its other fields apply as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from proxy.settings import Model, Settings

_SHAPING: Final = frozenset(
    {"path", "cmd", "url", "dns", "cwd", "args", "env", "engine", "upstream_key", "host", "slot_cache", "on_proxy_exit"}
    | {"phase_policy", "phase_yield_ms", "phase_admit_ms"}
)  # fmt: skip
_AT_START: Final = ("server", "engine", "memory", "hosts")
_ADMISSION_AT_START: Final = frozenset({"keepalive_s", "max_queued_bytes", "classes"})
"""Read once by the HTTP surface."""


@dataclass(frozen=True, slots=True)
class Changed:
    """One model: which of its fields changed, and whether it is restarted for that."""

    model: str
    fields: tuple[str, ...]
    restart: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """All of it. `admission` are fields that apply at once, `at_start` those that need a restart of the proxy."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[Changed, ...] = ()
    admission: tuple[str, ...] = ()
    at_start: tuple[str, ...] = field(default=())

    @property
    def none(self) -> bool:
        """Whether the two are the same."""
        return not (self.added or self.removed or self.changed or self.admission or self.at_start)


def compare(now: Settings, new: Settings) -> Difference:
    """Return what would change. Never shows a value: it may be a key."""
    admission = _fields(now.admission, new.admission)
    return Difference(
        added=tuple(name for name in new.models if name not in now.models),
        removed=tuple(name for name in now.models if name not in new.models),
        changed=tuple(_models(now, new)),
        admission=tuple(f"admission.{name}" for name in admission if name not in _ADMISSION_AT_START),
        at_start=(
            *(
                f"{section}.{name}"
                for section in _AT_START
                for name in _fields(getattr(now, section), getattr(new, section))
            ),
            *(f"admission.{name}" for name in admission if name in _ADMISSION_AT_START),
        ),
    )


def applied(now: Settings, new: Settings) -> Settings:
    """Return the settings that hold after the change: what needs a start stays as it is."""
    kept = {name: getattr(now.admission, name) for name in _ADMISSION_AT_START}
    return now.model_copy(update={"models": new.models, "admission": new.admission.model_copy(update=kept)})


def _models(now: Settings, new: Settings) -> Iterator[Changed]:
    for name, model in new.models.items():
        before = now.models.get(name)
        if before is not None and (fields := _fields(before, model)):
            yield Changed(name, tuple(fields), restart=not _SHAPING.isdisjoint(fields))


def _fields(now: Any, new: Any) -> list[str]:
    if isinstance(now, Model) or hasattr(type(now), "model_fields"):
        return [name for name in type(now).model_fields if getattr(now, name) != getattr(new, name)]
    return sorted(name for name in {*now, *new} if now.get(name) != new.get(name))
