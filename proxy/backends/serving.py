"""What a model is served by while it is ready: one engine (`live.py`) or several behind one name (`replicas.py`)."""

from contextlib import AbstractContextManager
from typing import Protocol

from proxy.backends.bringup import Recipe, Running
from proxy.backends.client import EngineClient
from proxy.backends.process import StopReport
from proxy.errors import ProxyError
from proxy.types import BackendKey, Snapshot


class Serving(Protocol):
    """The ready generation of a model. Its engines are told of by the voice it was made with, as they come and go."""

    @property
    def key(self) -> BackendKey:
        """The model's generation; a request is granted to an engine, which has a key of its own where there are several."""
        ...

    @property
    def recipe(self) -> Recipe:
        """What it was started from."""
        ...

    def refit(self, recipe: Recipe) -> None:
        """Go on by another recipe, which differs in nothing that shapes the process or the way to it."""
        ...

    @property
    def running(self) -> Running:
        """The engine, or the first of them."""
        ...

    @property
    def kept(self) -> bool:
        """Whether the process may outlive the proxy: it was started so, and the next one can find it."""
        ...

    @property
    def exchanges(self) -> int:
        """Requests that are with the engines."""
        ...

    @property
    def quiet_since(self) -> float:
        """When the last exchange ended."""
        ...

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The newest snapshot of each engine that has one."""
        ...

    def begin(self) -> None:
        """Say that it serves, and begin to watch it."""
        ...

    def client(self, key: BackendKey) -> EngineClient | None:
        """Return the way to an engine; None for one that is not there (any more)."""
        ...

    def poke(self, key: BackendKey | None = None) -> None:
        """Poll an engine's slots now (None: every engine's)."""
        ...

    async def watch_exit(self) -> None:
        """Wait for the end of the process, where there is one; an unexpected one is a loss."""
        ...

    def excused(self) -> AbstractContextManager[None]:
        """Take no silence amiss meanwhile."""
        ...

    def dismiss(self) -> None:
        """Say nothing of losses any more: it is being stopped on purpose."""
        ...

    def farewell(self, error: ProxyError) -> None:
        """Say that it is gone or about to be; `error` is for everybody who has a request there."""
        ...

    def renounce(self) -> None:
        """Note that the process is being ended, should the proxy die now. Takes effect before it returns."""
        ...

    async def let_go(self, error: ProxyError) -> None:
        """Stop polling, give requests a moment to write their error, then close every connection."""
        ...

    async def clear(self, error: ProxyError) -> StopReport | None:
        """Clear away what is left of one that was lost."""
        ...

    async def detach(self) -> None:
        """Let the process run on for the next proxy."""
        ...
