"""Bodies in memory: what is being received counts against `admission.max_queued_bytes`, as what waits does."""

from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from proxy.admission.retry import Turnover
from proxy.clock import Clock
from proxy.errors import ErrorCode, ProxyError

_BESIDE: Final = 8
"""Uploads that are assumed to go on side by side, for the time a refused one is told to come back."""


class Uploads:
    """The bytes of all bodies at hand. `waiting` tells the bytes of those in the queue, at some cost."""

    def __init__(self, limit: int | None, waiting: Callable[[], int], clock: Clock) -> None:
        self._limit = limit
        self._waiting = waiting
        self._clock = clock
        self._turnover = Turnover()
        self._count = 0
        self.receiving = 0
        """Bytes of bodies that are not with admission yet."""
        self.held = 0
        """Bytes of all bodies that nobody let go of: never less than what is received and waits."""

    def begin(self) -> "Upload":
        """Return the account of one body; to be used as a context manager."""
        return Upload(self)

    def check(self) -> None:
        """Raise 429 when the bodies received and waiting are over the limit; cheap while they are far from it."""
        if self._limit is None or self.held <= self._limit:
            return
        if self.receiving + self._waiting() <= self._limit:
            return
        raise ProxyError(
            ErrorCode.QUEUE_FULL,
            f"the bodies being received and waiting reached admission.max_queued_bytes ({self._limit})",
            retry_after_s=self._turnover.retry_after_s(self._clock(), self._count, _BESIDE),
            headers={"Connection": "close"},
        )

    def entered(self) -> float:
        """Count a body that begins; returns the time."""
        self._count += 1
        return self._clock()

    def left(self, since: float) -> None:
        """Count a body that is not received any more."""
        self._count -= 1
        self._turnover.served(self._clock() - since, 1)


class Upload:
    """One body: `add` while it comes, `handed` when admission has it, `let_go` when nobody keeps it."""

    __slots__ = ("_all", "_receiving", "_since", "size")

    def __init__(self, uploads: Uploads) -> None:
        self._all = uploads
        self._since = uploads.entered()
        self._receiving = True
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.handed()
        self.let_go()

    def add(self, count: int) -> None:
        """Take `count` bytes; raises 429 when that is too much for the proxy as a whole."""
        self.size += count
        self._all.held += count
        self._all.receiving += count
        self._all.check()

    def handed(self) -> None:
        """The request waits in admission's queue now, which counts its body. Idempotent."""
        if self._receiving:
            self._receiving = False
            self._all.receiving -= self.size
            self._all.left(self._since)

    def let_go(self) -> None:
        """Nobody keeps the bytes any more. Idempotent."""
        self._all.held -= self.size
        self.size = 0
