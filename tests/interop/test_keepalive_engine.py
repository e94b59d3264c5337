"""The same clients before the real engine: they wait while it is busy, and it falls silent in the middle.

The engine has one slot. Somebody runs on it, its standby waits behind, so the client waits in the proxy and is told
so; then both leave, and it gets a real stream. Once that runs the engine is stopped for some time: comments again.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream, data
from tests.e2e.conftest import EXACT
from tests.e2e.harness import Proxy
from tests.interop.clients import CHAT, WAIT_S
from tests.support.wait import until

pytestmark = [pytest.mark.interop, pytest.mark.engine]

COMMENTS_S = 0.2
SILENCE_S = 5 * COMMENTS_S
TRIES = 4
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Once upon a time there was a small box"}],
    "stream": True,
    # so many that it takes some seconds: it should not be over before the engine is stopped
    "max_tokens": 1000,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def proxy(
    tmp_path_factory: pytest.TempPathFactory, engine_binary: Path, zoo: Callable[[str], Path]
) -> Iterator[Proxy]:
    args = ["-t", "1", "-np", "1", "-c", "8192", *EXACT]
    config = {
        "engine": {"dir": str(engine_binary), "phase_policy": "drain"},
        "admission": {"keepalive_s": COMMENTS_S},
        "models": {"m": {"path": str(zoo("llama-mid")), "args": args}},
    }
    with Proxy(config, tmp_path_factory.mktemp("keepalive")) as made:
        yield made


class Busy:
    """What happens around a client, in a thread of its own: the engine is busy, gets free, falls silent, goes on."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.error: BaseException | None = None
        self.late = False
        """Whether the client's stream was over before the engine was stopped."""
        endless = {**BODY, "max_tokens": 7000}
        runs = RawStream(proxy.url, CHAT, endless)
        assert runs.head() == 200
        while data(runs.event()) is None:
            pass
        self.before = [runs, RawStream(proxy.url, CHAT, endless)]
        until("the standby waits", lambda: self.states() == ["generating", "native_queued"])
        [self.engine] = proxy.engines()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def states(self) -> list[str]:
        return sorted(one["state"] for one in self.proxy.get("/api/requests")["requests"])

    def _last(self) -> dict[str, Any]:
        """The client's own request: it came last."""
        listed = self.proxy.get("/api/requests")["requests"]
        return min(listed, key=lambda one: one["age_s"]) if listed else {}

    def _run(self) -> None:
        try:
            until("the client waits", lambda: "queued" in self.states(), WAIT_S)
            until("it was told so", lambda: sum(self._last()["waits_s"].values()) > SILENCE_S, WAIT_S)
            for stream in self.before:
                stream.close()
            until("its stream runs", lambda: not self.states() or self._last().get("tokens", 0) >= 3, WAIT_S)
            self.engine.suspend()
            try:
                self.late = self._last().get("state") != "generating"
                if not self.late:
                    time.sleep(SILENCE_S)
            finally:
                self.engine.resume()
        except BaseException as error:
            self.error = error

    def over(self) -> None:
        self._thread.join(WAIT_S)
        if self.error is not None:
            raise self.error
        until("nothing is left", lambda: self.states() == [])


@cache
def alone(proxy: Proxy, path: str) -> str:
    """The text of the same request, whole, with nobody beside it."""
    status, answer = proxy.post(path, {**BODY, "stream": False})
    assert status == 200
    text = answer["choices"][0]["message"]["content"] if path == CHAT else answer["content"][0]["text"]
    assert len(text) > 100
    return str(text)


def test_the_comments_are_there(proxy: Proxy) -> None:
    """What the clients below survive: comments before the first event and between two events."""
    for _ in range(TRIES):
        busy = Busy(proxy)
        stream = RawStream(proxy.url, CHAT, BODY, timeout_s=WAIT_S)
        assert stream.head() == 200
        events = stream.rest()
        busy.over()
        if not busy.late:
            break
    assert not busy.late, "it was over each time before the engine was stopped"
    first = next(place for place, event in enumerate(events) if data(event) is not None)
    assert events[0].startswith(b": queued position=1 reason=")
    assert all(event.startswith(b": ") for event in events[:first])
    assert b": generating" in events[first:]
    assert events[-1] == b"data: [DONE]"


async def test_a_client_reads_on(proxy: Proxy, reads: Callable[..., Any], request: Any) -> None:
    path = "/v1/messages" if request.node.callspec.id == "anthropic" else CHAT
    wanted = await asyncio.to_thread(alone, proxy, path)
    for _ in range(TRIES):
        busy = await asyncio.to_thread(Busy, proxy)
        try:
            assert await asyncio.wait_for(reads(proxy.url, BODY), WAIT_S) == wanted
        finally:
            await asyncio.to_thread(busy.over)
        if not busy.late:
            break
    assert not busy.late, "it was over each time before the engine was stopped"
