"""Observations of real engines: an observer on a thread, loads on others."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from proxy.observe.account import Account
from proxy.observe.records import Header, Mark, Record, Sample
from proxy.observe.session import begin, observe
from proxy.observe.target import parse_target
from tests.engine.conftest import engine, stock
from tests.support.wait import until

__all__ = ["engine", "stock"]


class Observer:
    """A real observation of real servers. Use as a context manager; afterwards its account is closed."""

    def __init__(
        self, urls: Sequence[str], *, interval_s: float = 0.1, logs: Sequence[Path] = (), **more: object
    ) -> None:
        self.targets = [parse_target(url) for url in urls]
        self.header: Header = begin(self.targets, logs, interval_s)
        self.account = Account(self.header)
        self.records: list[Record] = []
        self._logs, self._more = logs, more
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _take(self, record: Record) -> None:
        self.account.add(record)
        self.records.append(record)

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await observe(self.header, self.targets, self._logs, self._take, self._stop, **self._more)
            left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert not left, f"tasks left behind: {left}"

        try:
            asyncio.run(main())
        except BaseException as error:
            self._failed = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the observation did not end"
        if self._failed is not None:
            raise self._failed
        self.account.close()

    def samples(self, server: int = 0) -> list[Sample]:
        return [r for r in list(self.records) if isinstance(r, Sample) and r.server == server]

    def marks(self, server: int = 0) -> list[Mark]:
        return [r for r in list(self.records) if isinstance(r, Mark) and r.server == server]

    def wait_samples(self, more: int = 2, timeout_s: float = 60.0) -> None:
        """Wait until every server was sampled `more` times from now on."""
        wanted = [len(self.samples(server)) + more for server in range(len(self.targets))]
        until(
            "samples of all",
            lambda: (
                self._failed is not None
                or all(len(self.samples(n)) >= count for n, count in enumerate(wanted))
            ),
            timeout_s,
        )

    def wait_state(self, state: str, timeout_s: float = 60.0) -> Mark:
        """Wait until the first server is in this state now."""
        until(f"state {state}", lambda: (m := self.marks()) and m[-1].state == state, timeout_s)
        return self.marks()[-1]


@pytest.fixture
def watching() -> Iterator[Callable[..., Observer]]:
    """Make observers."""
    yield Observer
