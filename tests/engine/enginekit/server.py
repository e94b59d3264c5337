"""A llama-server process for one test: started on a free port, always stopped."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.engine.enginekit.http import Answer, Exchange, Json, request
from tests.engine.enginekit.phase import PhaseEvent, parse_events
from tests.engine.enginekit.trace import View, read_trace
from tests.engine.enginekit.waiting import eventually
from tests.support import processes

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0
PR_SET_PDEATHSIG = 1
TRACE_ENV = "LLAMA_PHASE_TRACE"

# With F32 weights the results hardly depend (2e-5 in log-probability) on what else is in the batch.
EXACT = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")


def die_with_parent() -> None:
    """Ask Linux to end this process with the test runner, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


class Server:
    """One engine. Use it as a context manager.

    Without a model it is a router (``args`` say where its models are). ``args`` are appended to the flags every test needs (loopback, one thread, no
    network, metrics). The engine picks its own port, so there is no bind race.
    """

    def __init__(
        self,
        binary: Path,
        model: Path | None,
        args: Sequence[str],
        folder: Path,
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "server.log"
        self.trace_path = folder / "trace.txt"
        self.command = [
            str(binary),
            *(("-m", str(model)) if model else ()),
            *("--host", "127.0.0.1", "--port", "0", "-t", "1"),
            *("--offline", "--metrics", "--slots"),
            *args,
        ]
        self._env = {**os.environ, TRACE_ENV: str(self.trace_path), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._exchanges: list[Exchange] = []
        self.port = 0

    def __enter__(self) -> Self:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                preexec_fn=die_with_parent,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_ready(self) -> None:
        def listening() -> int | None:
            self.assert_alive()
            found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", self.log())
            return int(found[1]) if found else None

        self.port = eventually(listening, "the engine listens", timeout_s=READY_TIMEOUT_S)
        eventually(lambda: self.get("/health").status == 200, "healthy", timeout_s=READY_TIMEOUT_S)

    @property
    def pid(self) -> int:
        """Process id of the running engine."""
        assert self._process is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send the engine a signal."""
        os.kill(self.pid, number)

    def exit_code(self, timeout_s: float) -> int | None:
        """Wait up to ``timeout_s`` for the engine to end; return its exit code, ``None`` when it lives."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> str:
        """Return the engine's log so far."""
        return self.log_path.read_text(errors="replace")

    def assert_alive(self) -> None:
        """Fail with the end of the log when the process has ended."""
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"engine ended with {code}:\n{self.log()[-3000:]}"

    def cut_all(self) -> None:
        """Cut every connection of ours that is still open."""
        for exchange in self._exchanges:
            if not exchange.done:
                exchange.close()
        self._exchanges.clear()

    def stop(self) -> None:
        """End the process: cut our connections, TERM, then KILL; safe to call twice."""
        self.cut_all()
        process = self._process
        if process is None or process.poll() is not None:
            return
        children = processes.below(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
        processes.kill(children)

    def get(self, path: str, *, timeout_s: float = 240.0) -> Answer:
        """GET ``path``."""
        return request(self.port, "GET", path, timeout_s=timeout_s)

    def post(
        self,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 240.0,
    ) -> Answer:
        """POST ``body`` and return the whole answer."""
        return request(self.port, "POST", path, body, headers, timeout_s=timeout_s)

    def start(
        self,
        body: Json,
        *,
        tag: str | None = None,
        path: str = "/completion",
        leave_after: int | None = None,
        **headers: str,
    ) -> Exchange:
        """Post ``body`` on a thread; ``tag`` becomes ``x-request-id``; cut it at the event number ``leave_after``.

        Keyword headers: underscores become dashes.
        """
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if tag is not None:
            sent["x-request-id"] = tag
        exchange = Exchange(self.port, path, body, sent, leave_after=leave_after)
        self._exchanges.append(exchange)
        return exchange

    def stream(
        self,
        prompt: Any,
        n_predict: int,
        *,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Exchange:
        """Start a streaming greedy completion with progress and token ids."""
        named = {name.replace("-", "_"): value for name, value in (headers or {}).items()}
        return self.start(greedy(prompt, n_predict, stream=True, **more), tag=tag, **named)

    def complete(self, prompt: Any, n_predict: int, **more: Any) -> Any:
        """Return the JSON of a greedy completion."""
        return self.post("/completion", greedy(prompt, n_predict, **more)).ok()

    def slots(self) -> list[Json]:
        """Return ``/slots``."""
        found: list[Json] = self.get("/slots").ok()
        return found

    def members(self) -> list[str]:
        """Return each slot's member state."""
        return [str(slot["phase"]["member"]) for slot in self.slots()]

    def phase(self) -> Json:
        """Return the phase fields of the first slot (engine fields are the same in all)."""
        found: Json = self.slots()[0]["phase"]
        return found

    def events(self, since: int = 0) -> list[PhaseEvent]:
        """Return the transitions after sequence number ``since``; fail when some were lost."""
        view = self.get(f"/slots?phase_since={since}").ok()
        events, lost = parse_events(view)
        assert lost == 0, f"{lost} transitions were overrun"
        return events

    def metrics(self) -> dict[str, float]:
        """Return the engine's metrics by name without the ``llamacpp:`` prefix."""
        text = self.get("/metrics").body.decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name.removeprefix("llamacpp:")] = float(value)
        return found

    def trace(self) -> list[View]:
        """Return all decoded views so far, in order."""
        return read_trace(self.trace_path)

    def wait_idle(self, *, timeout_s: float = 240.0) -> None:
        """Wait until no slot is processing and the engine, where it has phases, has left its last one."""

        def idle(slot: Json) -> bool:
            return not slot["is_processing"] and slot.get("phase", {}).get("engine", "idle") == "idle"

        eventually(lambda: all(map(idle, self.slots())), "all slots idle", timeout_s=timeout_s)

    def cpu_seconds(self) -> float:
        """Return the CPU time (user and system) the process has used, in seconds."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def busy_share(self, seconds: float) -> float:
        """Return the share of one core the process uses over the next ``seconds``."""
        before, start = self.cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / (time.monotonic() - start)


def greedy(prompt: Any, n_predict: int, *, stream: bool = False, **more: Any) -> Json:
    """Return the body of a completion at temperature 0 that runs to its length."""
    body: Json = {
        "prompt": prompt,
        "n_predict": n_predict,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    if stream:
        body |= {"stream": True, "return_progress": True}
    return body | more
