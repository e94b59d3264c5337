"""Ending a request's work from outside with an error: force-unload, operator, crash, budget."""

import asyncio
from types import TracebackType
from typing import Self

from proxy.errors import ProxyError


class Cut:
    """A block that `fire` ends with a `ProxyError`, wherever it waits.

    Works as `asyncio.timeout` does, so the task's own cancellation (its client left) stays apart: when
    both happen, the cancellation wins.
    """

    __slots__ = ("_cancelling", "_error", "_task")

    def __init__(self) -> None:
        self._error: ProxyError | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0

    def fire(self, error: ProxyError) -> None:
        """End the block with `error`. The first one counts; no effect once the block is left."""
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()

    def on_ended(self, ended: asyncio.Future[ProxyError]) -> None:
        """Take the error of a ticket that was ended from elsewhere (a done callback)."""
        if not ended.cancelled():
            self.fire(ended.result().copy())

    async def __aenter__(self) -> Self:
        if self._error is not None:
            raise self._error
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a Cut needs a task to end")
        self._task = task
        self._cancelling = task.cancelling()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if task is None or self._error is None:
            return
        left = task.uncancel()
        if kind is asyncio.CancelledError and left > self._cancelling:
            return
        # whatever the block made of it (the torn socket often fails first), the cause is ours
        raise self._error from error
