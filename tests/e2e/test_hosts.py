"""A model on a host that sleeps, seen by clients and operators: waiting while it is woken, a clear error when it is not."""

import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream
from tests.e2e.conftest import model
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine


@pytest.fixture
def asleep() -> Iterator[socket.socket]:
    """A port that is taken and answers nobody until it listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken


def command(*lines: str) -> str:
    return shlex.join([sys.executable, "-c", "\n".join(lines)])


def config(path: Path, asleep: socket.socket, line: str, **wake: Any) -> dict[str, Any]:
    probe = f"127.0.0.1:{asleep.getsockname()[1]}"
    return {
        "hosts": {"gpu1": {"wake": {"command": line, "probe": probe, **wake}}},
        "models": {"m": model(path, host="gpu1"), "here": model(path)},
    }


def test_requests_wait_while_their_host_is_woken(
    start: Callable[..., Proxy], zoo: Callable[[str], Path], asleep: socket.socket, tmp_path: Path
) -> None:
    """A stream gets comments, `/api/models` says what is waited for, other models serve; then the answer comes."""
    woken = tmp_path / "woken"
    line = command(f"open({str(woken)!r}, 'a').write('x')")
    admission = {"keepalive_s": 0.2}
    proxy = start({**config(zoo("llama"), asleep, line), "admission": admission})
    body = {"model": "m", "prompt": "a", "max_tokens": 3}
    stream = RawStream(proxy.url, "/v1/completions", {**body, "stream": True}, timeout_s=60)
    assert stream.head() == 200
    until("the command ran", woken.exists)
    shown = until("it is explained", lambda: (one := proxy.get("/api/models/m"))["why"] and one)
    assert shown["backend"]["stage"] == "waking" and shown["state"] == "starting"
    assert "host gpu1 is being woken" in shown["why"]["words"] and shown["why"]["reason"] == "model_loading"
    assert shown["host"]["state"] == "waking" and proxy.get("/api/models/here")["host"] is None
    assert proxy.post("/v1/completions", {**body, "model": "here"})[0] == 200
    assert proxy.metric("llama_proxy_host_awake", host="gpu1") == 0
    asleep.listen()
    assert stream.rest()[-1] == b"data: [DONE]"
    assert woken.read_text() == "x" and proxy.get("/api/models/m")["host"]["state"] == "awake"
    assert proxy.metric("llama_proxy_host_awake", host="gpu1") == 1


def test_everybody_is_told_that_the_host_does_not_wake(
    start: Callable[..., Proxy], zoo: Callable[[str], Path], asleep: socket.socket
) -> None:
    """Streaming or not, of both dialects: 502 (or an error event) with the code, the host and the command's own words."""
    proxy = start(config(zoo("llama"), asleep, command("import sys", "sys.exit('error: no such outlet')")))
    answers: list[tuple[int, dict[str, Any]]] = []

    def ask(number: int) -> None:
        path = ("/v1/completions", "/v1/messages")[number % 2]
        body = {
            "model": "m", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4,
            "stream": number > 1,
        }  # fmt: skip
        answers.append(proxy.post(path, body, timeout_s=60))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 4
    for status, body in answers:
        assert status == 502
        message = body["error"]["message"]
        assert "host 'gpu1' was not woken" in message and "no such outlet" in message
    assert {body["error"].get("code") for _, body in answers} >= {"wake_failed"}
    host = proxy.get("/api/models/m")["host"]
    assert host["state"] == "asleep" and "no such outlet" in host["last_error"]
    assert proxy.metric("llama_proxy_host_hook_failures_total", host="gpu1", hook="wake") >= 1
    assert proxy.metric("llama_proxy_requests_inflight") == 0
