"""What is kept of a finished request: metrics, and one canonical log line."""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any, Final

from proxy import logs
from proxy.admission import outcome_of
from proxy.errors import ErrorCode
from proxy.http.call import Call
from proxy.metrics import Metrics
from proxy.types import Outcome

FLUSH_S: Final = 0.2
FLUSH_LINES: Final = 200
CLIENT_GONE: Final = "client_gone"
"""Code of a request whose client left before its response ended."""
BEFORE_HEAD: Final = "before_head"
MID_BODY: Final = "mid_body"
_PHASES: Final = ("receiving", "queued", "granted", "generating")


class Accounts:
    """Counts finished requests and writes their lines, a few times a second instead of once each."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = logs.get("http")
        self._lines: list[tuple[int, dict[str, Any]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def finish(self, call: Call, now: float) -> None:
        """Take the books of one request. Call exactly once, when its response has ended."""
        if call.outcome is Outcome.REJECTED:
            self._metrics.rejected.labels(call.model, call.code).inc()
        if call.endpoint:
            self._count(call, now)
        level = _level(call)
        if self._log.is_enabled_for(level):
            self._lines.append((level, _line(call, now)))
            if len(self._lines) >= FLUSH_LINES:
                self.flush()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def declare(self, models: Iterable[str]) -> None:
        """Start the counters of failures at 0: a series that appears with its first event hides it from `rate()`."""
        m = self._metrics
        refusals = [code for code in ErrorCode if outcome_of(code) is Outcome.REJECTED]
        for model in models:
            for phase in _PHASES:
                m.client_disconnects.labels(model, phase)
            for kind in (BEFORE_HEAD, MID_BODY):
                m.upstream_errors.labels(model, kind)
            for code in refusals:
                m.rejected.labels(model, code.value)

    def flush(self) -> None:
        """Write what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lines, self._lines = self._lines, []
        for level, line in lines:
            self._log.log(level, "request", **line)

    def _count(self, call: Call, now: float) -> None:
        m, model = self._metrics, call.model
        priority = call.caller.priority if call.caller is not None else ""
        outcome = call.outcome or Outcome.COMPLETED
        status = str(call.status)
        m.requests.labels(call.endpoint, model, priority, status, outcome.value).inc()
        m.duration.labels(call.endpoint, model, status).observe(now - call.arrived)
        if call.code == CLIENT_GONE:
            m.client_disconnects.labels(model, _phase(call)).inc()
        if not call.chunks:
            self._count_tokens(call)
            return
        m.ttft.labels(model, priority).observe(call.first - call.body_done)
        if call.second:
            m.ttst.labels(model, priority).observe(call.second - call.body_done)
            m.max_gap.labels(model).observe(call.max_gap)
        generated = self._count_tokens(call)
        if generated > 1:
            m.tpot.labels(model).observe((call.last - call.first) / (generated - 1))

    def _count_tokens(self, call: Call) -> int:
        m, usage = self._metrics, call.usage
        key = call.caller.label if call.caller is not None else ""
        # a stream that was cut never told its count: one chunk is about one token
        generated = (usage.generated if usage is not None else None) or (call.chunks if call.stream else 0)
        if generated:
            m.generated_tokens.labels(call.model, key).inc(generated)
        if usage is not None:
            for counter, value in (
                (m.prompt_tokens, usage.prompt),
                (m.cached_prompt_tokens, usage.cached),
                (m.draft_tokens, usage.drafted),
                (m.draft_accepted, usage.accepted),
            ):
                if value:
                    counter.labels(call.model, key).inc(value)
        return generated


def _phase(call: Call) -> str:
    """Return where a request was when its client left."""
    if call.first:
        return "generating"
    if call.opened:
        return "granted"
    return "queued" if call.submitted else "receiving"


def _level(call: Call) -> int:
    if call.status >= 500 and call.status != 503:
        return logging.WARNING
    return logging.INFO if call.endpoint or call.status in {401, 403} else logging.DEBUG


def _line(call: Call, now: float) -> dict[str, Any]:
    line: dict[str, Any] = {
        "at": time.time(),
        "id": call.id.shown,
        "method": call.method,
        "path": call.endpoint or call.path,
        "status": call.status,
        "outcome": call.outcome.value if call.outcome is not None else None,
        "code": call.code,
        "duration_ms": _ms(now - call.arrived),
    }
    if call.caller is not None:
        line["key"] = call.caller.key
    if not call.endpoint:
        return line
    line.update(model=call.model, stream=call.stream, tasks=call.tasks, body_bytes=call.body_bytes)
    if call.ticket not in {"", call.id.shown}:
        line["ticket"] = call.ticket
    if call.backend:
        line.update(backend=call.backend, generation=call.generation, cohort=call.cohort)
    if call.recalls:
        line["recalls"] = call.recalls
    if call.reason:
        line["reason"] = call.reason
    if call.lived_s:
        line["states_ms"] = {state.value: _ms(seconds) for state, seconds in call.lived_s.items()}
    if call.submitted:
        line["queue_ms"] = _ms((call.granted or now) - call.submitted)
    if call.opened:
        line["engine_ms"] = _ms((call.first or now) - call.opened)
    if call.chunks:
        line.update(
            ttft_ms=_ms(call.first - call.body_done),
            generate_ms=_ms(call.last - call.first),
            max_gap_ms=_ms(call.max_gap),
            chunks=call.chunks,
        )
    if call.usage is not None:
        line.update(
            prompt_tokens=call.usage.prompt,
            cached_tokens=call.usage.cached,
            generated_tokens=call.usage.generated,
        )
    return line


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
