"""Operators' orders over HTTP against the real proxy and the real engine: every request has one end, nothing is left."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.client import RawStream, data
from tests.e2e.conftest import EXACT, ROOM, model
from tests.e2e.harness import Proxy
from tests.support import processes
from tests.support.wait import until

pytestmark = pytest.mark.engine

GRACE_S = 30.0
"""So long that no stall of the machine is anything beside it."""
BOUND_S = GRACE_S + 2.0
UNLOAD = "/api/models/m/unload"
COMPLETION = "/v1/completions"
LONG = {"model": "m", "prompt": "a", "max_tokens": 6000, "ignore_eos": True, "temperature": 0}
SHORT = {"model": "m", "prompt": "a", "max_tokens": 3, "temperature": 0}


class Client(threading.Thread):
    """One request on its own connection, from its first byte to its one end."""

    def __init__(self, proxy: Proxy, body: dict[str, Any], name: str, timeout_s: float = 120.0) -> None:
        super().__init__(name=name, daemon=True)
        self.stream = bool(body.get("stream"))
        self.status = 0
        self.error: dict[str, Any] = {}
        self.events: list[bytes] = []
        self.body: Any = None
        self.failure = ""
        self.first = threading.Event()
        headers = {"x-request-id": name}
        self.wire = RawStream(proxy.url, COMPLETION, body, timeout_s=timeout_s, headers=headers)
        self.start()

    def run(self) -> None:
        try:
            self.status = self.wire.head()
            if self.wire.headers["content-type"].startswith("text/event-stream"):
                while event := self.wire.event():
                    self.events.append(event)
                    self.first.set()
                self.error = (data(self.events[-1]) or {}).get("error", {}) if self.events else {}
            else:
                self.body = json.loads(self.wire.whole())
                self.error = self.body.get("error", {})
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def end(self, within_s: float = 60.0) -> "Client":
        self.join(within_s)
        assert not self.is_alive() and not self.failure, (self.name, self.failure)
        return self

    def unloaded(self) -> None:
        """Assert that it got one 503, or one error event as its last one."""
        self.end()
        assert self.error["code"] == "model_unloaded", (self.name, self.status, self.error)
        told = [event for event in self.events if b'"error"' in event]
        assert self.status == 503 if not self.events else len(told) == 1
        assert b"[DONE]" not in b"".join(self.events)


def config(path: Path, *args: str, **more: Any) -> dict[str, Any]:
    return model(path, *args, **{"stop": {"grace_s": GRACE_S}, "restart": {"first_s": 0}, **more})


def waiting(proxy: Proxy, name: str = "m") -> tuple[int, int]:
    admission = proxy.get(f"/api/models/{name}")["admission"]
    return admission["running"], admission["queued"]


def busy(proxy: Proxy) -> int:
    """Slots of the engine that work, as it says itself."""
    seen = proxy.get("/api/models/m")["engine"]
    return sum(slot["busy"] for slot in seen["slots"]) if seen else 0


def force(proxy: Proxy, **order: Any) -> dict[str, Any]:
    """Order a force-unload; assert its bound, and that nothing of the model is left when it is answered."""
    pid = proxy.get("/api/models/m")["backend"]["pid"]
    family = [pid] if pid else []
    # one that was just killed may be gone by now
    family += [p.pid for p in processes.below(pid)] if pid else []
    began = time.monotonic()
    status, answer = proxy.post(UNLOAD, {"force": True, **order})
    assert time.monotonic() - began < BOUND_S
    assert status == 200, answer
    assert (answer["ok"], answer["status"], answer["force"]) == (True, "unloaded", True), answer
    assert answer["job"]["state"] == "done" and answer["left"] == answer["unsettled"] == []
    assert not [pid for pid in family if psutil.pid_exists(pid)]
    return answer


def nothing_left(proxy: Proxy) -> None:
    """Ledger, queue and gauges are zero."""
    admission = proxy.get("/api/models/m")["admission"]
    numbers = ("queued", "running", "cancelling", "charged", "queued_bytes")
    assert [admission[name] for name in numbers] == [0] * 5 and admission["backends"] == []
    for name in ("requests_inflight", "queue_size", "queue_bytes"):
        assert proxy.metric(f"llama_proxy_{name}", model="m") == 0
    status, report = proxy.post("/api/models/m/reconcile", {})
    assert status == 200 and report["clean"], report


def contents(events: list[bytes]) -> str:
    return "".join(
        data(event)["choices"][0]["text"] for event in events if data(event) and "choices" in data(event)
    )


@pytest.mark.parametrize(("standby", "running"), [(False, 4), (True, 5)])
def test_force_ends_forty_requests_and_disturbs_nobody_else(
    start: Callable[..., Proxy], zoo: Callable[[str], Path], standby: bool, running: int
) -> None:
    """4 running and 36 waiting, 10 of them streaming; another model streams on, byte for byte as if alone.

    With a standby one of those that wait does so in the engine, for the next cohort.
    """
    path = zoo("llama-mid")
    proxy = start(
        {
            "admission": {"native_standby": standby},
            "models": {"m": config(path, *EXACT, *ROOM), "other": config(path, *EXACT)},
        }
    )
    alone_body = {**LONG, "model": "other", "max_tokens": 400, "stream": True}
    alone = Client(proxy, alone_body, "alone").end()
    assert len(alone.events) > 100
    clients = [Client(proxy, {**LONG, "stream": n % 4 == 0}, f"r{n}") for n in range(40)]
    until("4 run and 36 wait", lambda: waiting(proxy) == (running, 40 - running) and busy(proxy) == 4, 60)
    others = [Client(proxy, alone_body, f"o{n}") for n in range(2)]
    for other in others:
        assert other.first.wait(60)

    cancelled = {"queued": 40 - running, "running": running}
    status, would = proxy.post(UNLOAD, {"force": True, "dry_run": True})
    assert status == 200 and would["cancelled"] == cancelled
    assert set(would["requests"]["queued"] + would["requests"]["running"]) == {c.name for c in clients}
    assert waiting(proxy) == (running, 40 - running)

    answer = force(proxy, then="block", mode="reject", reason="new weights")
    assert answer["cancelled"] == cancelled
    assert set(answer["job"]["cut"]) == {client.name for client in clients}
    assert answer["job"]["by"] == {"key": "", "address": "127.0.0.1"}
    for client in clients:
        client.unloaded()
        assert "new weights" in client.error["message"]
    assert sum(client.stream for client in clients) == 10
    nothing_left(proxy)
    assert proxy.metric("llama_proxy_forced_cancels_total", model="m") == 40
    for other in others:
        assert contents(other.end(120).events) == contents(alone.events)

    status, refused = proxy.post(COMPLETION, SHORT)
    assert (status, refused["error"]["code"]) == (503, "gate_blocked") and "new weights" in refused["error"][
        "message"
    ]
    described = proxy.get("/api/models/m")
    assert described["state"] == "unloaded" and described["gate"]["reason"] == "new weights"
    generation = described["backend"]["generation"]
    force(proxy, then="open")
    status, _ = proxy.post(COMPLETION, SHORT)
    assert status == 200 and proxy.get("/api/models/m")["backend"]["generation"] > generation


def test_force_in_every_state(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    """Not loaded, loading, draining, stopped, dead, twice at once: a success in time, and one end for every request."""
    proxy = start({"models": {"m": config(zoo("llama-mid"), *ROOM)}})

    def engine() -> int:
        found = proxy.get("/api/models/m")["backend"]["pid"]
        return int(found) if found else 0

    assert force(proxy)["was"] == "unloaded"

    # while it loads
    waits = Client(proxy, {**LONG, "stream": True}, "loading")
    until("a process", engine, 30)
    force(proxy)
    waits.unloaded()
    nothing_left(proxy)

    # while it drains
    running = Client(proxy, {**LONG, "stream": True}, "draining")
    assert running.first.wait(60)
    status, drain = proxy.post(UNLOAD, {"deadline_s": 600})
    assert (status, drain["status"], drain["job"]["state"]) == (202, "unloading", "running")
    waits = Client(proxy, SHORT, "behind the drain")
    until("it waits for the drain", lambda: waiting(proxy) == (1, 1), 30)
    assert force(proxy)["cancelled"] == {"queued": 1, "running": 1}
    running.unloaded()
    waits.unloaded()
    ended = proxy.get(f"/api/jobs/{drain['job']['id']}?wait=10")
    assert ended["state"] == "cancelled" and "force" in ended["error"]
    nothing_left(proxy)

    # on an engine that is stopped
    running = Client(proxy, {**LONG, "stream": True}, "stopped")
    assert running.first.wait(60)
    stopped = engine()
    os.kill(stopped, signal.SIGSTOP)
    until("all of it is stopped", lambda: processes.status(stopped) == "stopped")
    assert force(proxy)["signals"] == ["SIGKILL"]
    running.unloaded()
    nothing_left(proxy)

    # on one that is dead: its requests end with what killed it, or with the unload, whichever comes first
    running = Client(proxy, {**LONG, "stream": True}, "dead")
    assert running.first.wait(60)
    os.kill(engine(), signal.SIGKILL)
    force(proxy)
    assert running.end().error["code"] in {"model_unloaded", "upstream_error"}
    nothing_left(proxy)

    # twice at once is one, and block wins
    running = Client(proxy, {**LONG, "stream": True}, "twice")
    assert running.first.wait(60)
    with ThreadPoolExecutor(2) as pool:
        answers = list(
            pool.map(
                lambda then: proxy.post(UNLOAD, {"force": True, "then": then, "mode": "reject"}),
                ("open", "block"),
            )
        )
    assert [status for status, _ in answers] == [200, 200]
    running.unloaded()
    assert all(answer["ok"] for _, answer in answers)
    assert proxy.get("/api/models/m")["gate"]["state"] == "blocked"
    nothing_left(proxy)
    force(proxy)
    assert proxy.get("/api/models/m")["gate"]["state"] == "open"
    assert proxy.engines() == []


def test_a_drain_names_what_it_cuts_at_the_deadline(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """What is short finishes, what comes meanwhile waits and is served afresh, what is too long is named."""
    proxy = start({"models": {"m": config(zoo("llama-mid"), *ROOM)}})
    long = Client(proxy, {**LONG, "stream": True}, "long")
    assert long.first.wait(60)
    status, answer = proxy.post(UNLOAD, {"deadline_s": 2, "reason": "maintenance"})
    assert (status, answer["status"]) == (202, "unloading")
    held = Client(proxy, SHORT, "held")
    job = proxy.get(f"/api/jobs/{answer['job']['id']}?wait=60", timeout_s=70)
    assert (job["state"], job["kind"], job["cut"]) == ("done", "unload", ["long"])
    long.unloaded()
    assert "maintenance" in long.error["message"]
    assert held.end().status == 200
    status, refusing = proxy.post(
        UNLOAD, {"deadline_s": 30, "then": "block", "mode": "reject", "reason": "closed"}
    )
    job = proxy.get(f"/api/jobs/{refusing['job']['id']}?wait=60", timeout_s=70)
    assert job["state"] == "done" and job["cut"] == []
    status, refused = proxy.post(COMPLETION, SHORT)
    assert (status, refused["error"]["code"]) == (503, "gate_blocked") and "closed" in refused["error"][
        "message"
    ]


def test_a_gate_holds_over_an_unload_a_load_and_a_restart(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """Held requests are served when it opens, told so when the proxy goes; a full queue changes no reject."""
    proxy = start({"models": {"m": config(zoo("llama"), max_queue=1)}, "admission": {"gate_hold_max_s": 300}})
    assert proxy.post("/api/models/m/load?wait=60", {}, timeout_s=70)[1]["status"] == "ready"
    gate = {"state": "blocked", "reason": "repairs", "mode": "hold"}
    assert proxy.post("/api/models/m/gate", gate)[0] == 200
    held = Client(proxy, SHORT, "held")
    until("it is held", lambda: waiting(proxy) == (0, 1), 30)
    assert proxy.post("/api/models/m/unload?wait=60", {}, timeout_s=70)[1]["status"] == "unloaded"
    assert proxy.get("/api/models/m")["state"] == "unloaded" and held.is_alive()
    status, loaded = proxy.post("/api/models/m/load?wait=60", {}, timeout_s=70)
    assert (status, loaded["status"]) == (200, "ready") and held.is_alive()
    [waits] = proxy.get("/api/requests")["requests"]
    assert waits["reason"] == "gate_blocked"
    # the queue is full by now
    assert proxy.post("/api/models/m/gate", {**gate, "mode": "reject"})[0] == 200
    status, refused = proxy.post(COMPLETION, SHORT)
    assert (status, refused["error"]["code"]) == (503, "gate_blocked") and "repairs" in refused["error"][
        "message"
    ]
    held.end()

    assert proxy.post("/api/models/m/gate", gate)[0] == 200
    held = Client(proxy, SHORT, "held at the end")
    until("it is held", lambda: waiting(proxy) == (0, 1), 30)
    assert proxy.stop(timeout_s=60) == 0
    assert held.end().error["code"] == "shutting_down"
    proxy.start()
    described = proxy.get("/api/models/m")["gate"]
    assert (described["state"], described["reason"], described["mode"]) == ("blocked", "repairs", "hold")
    held = Client(proxy, SHORT, "held again")
    until("it is held", lambda: waiting(proxy) == (0, 1), 30)
    assert proxy.engines() == []
    assert proxy.post("/api/gate", {"state": "open"})[0] == 200
    assert held.end().status == 200


def test_a_lease_holds_back_the_unload_of_an_idle_model(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """A held lease keeps the model past its TTL; released, the model goes, with a job that says why."""
    proxy = start({"models": {"m": config(zoo("llama"), ttl_s=1)}})
    status, lease = proxy.post("/api/leases", {"ttl_s": 600, "reason": "demo at noon"})
    assert status == 201
    assert proxy.post(COMPLETION, SHORT)[0] == 200
    idle_since = time.monotonic()
    until("the TTL has passed twice", lambda: time.monotonic() - idle_since > 2.5, 10)
    assert proxy.get("/api/models/m")["state"] == "ready"
    assert [one["reason"] for one in proxy.get("/api/leases")["leases"]] == ["demo at noon"]
    assert proxy.metric("llama_proxy_leases_held") == 1
    import urllib.request

    request = urllib.request.Request(f"{proxy.url}/api/leases/{lease['id']}", method="DELETE")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert json.loads(answer.read())["status"] == "released"
    until("it is unloaded", lambda: proxy.get("/api/models/m")["state"] == "unloaded", 30)
    causes = {job["cause"] for job in proxy.get("/api/jobs?model=m")["jobs"] if job["kind"] == "unload"}
    assert causes == {"ttl"}


def test_who_waits_for_room_says_so(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    """A request whose model waits for a busy one's memory shows that, is served when there is room, and the job tells."""
    entry = config(zoo("llama-mid"), *ROOM, vram_bytes=60)
    memory = {"vram_bytes": 100, "min_residency_s": 0, "swap_patience_s": 300}
    proxy = start({"models": {"m": entry, "other": entry}, "memory": memory})
    busy_one = Client(proxy, {**LONG, "stream": True}, "busy")
    assert busy_one.first.wait(60)
    waits = Client(proxy, {**SHORT, "model": "other"}, "waits")

    def reason() -> Any:
        return [one["reason"] for one in proxy.get("/api/requests?model=other")["requests"]]

    until("it waits for room", lambda: reason() == ["swap_wait"], 30)
    assert "m" in proxy.get("/api/models/other")["backend"]["waits_for"]
    [job] = proxy.get("/api/jobs?model=other")["jobs"]
    assert (job["kind"], job["cause"], job["progress"]["stage"]) == ("load", "request", "memory")
    force(proxy)
    busy_one.unloaded()
    assert waits.end().status == 200


def test_the_log_is_followed_over_generations(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """Who follows sees one process end and the next one speak, and is told nothing twice."""
    import urllib.request

    proxy = start({"models": {"m": config(zoo("llama"))}})
    with urllib.request.urlopen(f"{proxy.url}/api/models/m/logs?follow=1&lines=0", timeout=60) as log:
        for _ in range(2):
            assert proxy.post("/api/models/m/load?wait=60", {}, timeout_s=70)[1]["status"] == "ready"
            while b"listening on" not in log.readline():
                pass
            force(proxy)
        last = proxy.text("/api/models/m/logs?lines=1")
        assert last.count("\n") == 1
