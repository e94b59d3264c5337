"""What admission needs from the world; the composition passes objects that fit."""

from typing import Protocol

from proxy.types import BackendKey


class World(Protocol):
    """Backends, as far as admission may ask something of them. Both calls return at once."""

    def request_load(self, model: str) -> None:
        """Start loading a model unless it is ready or being loaded; the result comes as an event."""

    def poke(self, key: BackendKey) -> None:
        """Take a snapshot of this backend's slots as soon as possible."""
