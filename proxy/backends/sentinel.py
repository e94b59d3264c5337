"""Watches one ready backend and says once when it is lost: it ended, closed its port, or is wedged.

A remote engine is lost when it does not answer; it is not ours to judge further. One that serves and shows no slots
(`--no-slots`) is not lost: admission goes by its own books then.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from proxy import logs
from proxy.backends.client import ProbeError
from proxy.backends.process import EngineProcess, describe_exit
from proxy.backends.views import Kind
from proxy.backends.watchdog import Rules, Watchdog, Wedged
from proxy.clock import Clock
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.types import BackendKey, Cause, Snapshot

REMOTE_LOST_POLLS: Final = 3
DEAF_POLLS: Final = 2
"""Failed polls in a row, the last one refused, after which a living process counts as lost."""

_log = logs.get("backends")
Lost = Callable[[BackendKey, Cause, ProxyError], None]


class Sentinel:
    """One generation's watch. `process` is None for a remote engine; `rules` None switches the watchdog off."""

    def __init__(
        self,
        key: BackendKey,
        process: EngineProcess | None,
        rules: Rules | None,
        *,
        metrics: Metrics,
        clock: Clock,
        lost: Lost,
    ) -> None:
        """`lost` is told at most once, with the cause and the error for everybody who had a request there."""
        self._key: Final = key
        self._process = process
        self._metrics = metrics
        self._clock = clock
        self._lost: Lost | None = lost
        self._dog = Watchdog(rules, clock()) if rules is not None and process is not None else None
        self._excused = 0
        self._unanswered = 0

    def dismiss(self) -> None:
        """Say nothing any more: the backend is being stopped on purpose."""
        self._lost = None

    def go_by(self, rules: Rules | None) -> None:
        """Judge by other rules from now on."""
        if rules is None or self._process is None:
            self._dog = None
        elif self._dog is None:
            self._dog = Watchdog(rules, self._clock())
        else:
            self._dog.go_by(rules)

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """Take no silence amiss meanwhile: an engine that writes a slot to disk answers nothing until it is written.

        What is done inside has a deadline of its own.
        """
        self._excused += 1
        try:
            yield
        finally:
            self._excused -= 1
            if self._dog is not None:
                self._dog.refused()

    async def watch_exit(self) -> None:
        """Wait for the end of the process; an expected one is the stop's business."""
        if self._process is None:
            return
        code = await self._process.exited()
        words = self._process.tail.words()
        text = f"the engine of model {self._key.model!r} {describe_exit(code)} unexpectedly"
        self._tell(Cause.CRASH, ErrorCode.UPSTREAM_ERROR, f"{text}{': ' + words if words else ''}")

    def seen(self, snapshot: Snapshot) -> None:
        """Take an answer of `/slots`."""
        self._unanswered = 0
        if self._dog is not None and (found := self._dog.seen(snapshot)) is not None:
            self._wedged(found)

    def failed(self, count: int, error: ProbeError, asked_at: float) -> None:
        """Take a poll without a usable answer, the `count`-th in a row."""
        model = self._key.model
        if self._process is None:
            self._unanswered = 0 if error.answered else self._unanswered + 1
            if self._unanswered >= REMOTE_LOST_POLLS:
                at = "" if self._key.backend == Kind.REMOTE else f" at {self._key.backend}"
                text = f"the remote engine of model {model!r}{at} does not answer any more: {error}"
                self._tell(Cause.CRASH, ErrorCode.UPSTREAM_ERROR, text)
            return
        if error.refused and count >= DEAF_POLLS:
            # llama-server told to stop closes its port, answers nothing and waits for its clients to leave: for us
            text = f"the engine of model {model!r} closed its port although nobody here stopped it (was it sent a signal?)"
            self._tell(Cause.CRASH, ErrorCode.UPSTREAM_ERROR, text)
            return
        if self._dog is None:
            return
        if self._excused or not error.timed_out:
            self._dog.refused()
        elif self._process.code is None and (found := self._dog.silent(asked_at, self._clock())) is not None:
            self._wedged(found)

    def _wedged(self, found: Wedged) -> None:
        words = self._process.tail.words() if self._process else ""
        text = f"the engine of model {self._key.model!r} makes no progress: {found.words}"
        if words:
            text += f"; its last words: {words}"
        self._tell(Cause.WEDGE, ErrorCode.UPSTREAM_WEDGED, text)

    def _tell(self, cause: Cause, code: ErrorCode, text: str) -> None:
        tell, self._lost = self._lost, None
        if tell is None:
            return
        model = self._key.model
        (self._metrics.wedges if cause is Cause.WEDGE else self._metrics.crashes).labels(model).inc()
        _log.error("engine lost", model=model, generation=self._key.generation, cause=cause.value, error=text)
        tell(self._key, cause, ProxyError(code, text))
