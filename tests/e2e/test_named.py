"""A model behind a name, from the command line's `serve` to the engine: the system's resolver, real engines."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Proxy
from tests.support.ports import held_port
from tests.support.wait import until

pytestmark = pytest.mark.engine


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


@pytest.fixture
def engine(
    engine_binary: Path, zoo: Callable[[str], Path], tmp_path: Path
) -> Iterator[Callable[[int], None]]:
    """Start the patched engine on a port of this machine; it ends with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(port: int) -> None:
        command = [
            str(engine_binary),
            "-m",
            str(zoo("llama-mid")),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        with (tmp_path / "engine.log").open("ab") as log:
            command += ["-c", "4096", "-np", "2", "-t", "1", "--no-warmup", "--phase-policy", "drain"]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))

    yield run
    for process in started:
        process.kill()
        process.wait(30)


def test_a_name_is_served_shown_and_waited_for(
    start: Callable[..., Proxy], engine: Callable[[int], None], port: int
) -> None:
    """A request comes before anything serves behind the name; it waits, is answered, and all of it can be seen."""
    proxy = start({"models": {"far": {"dns": f"localhost:{port}", "description": "elsewhere"}}})
    engine(port)
    status, answer = proxy.post("/v1/completions", {"model": "far", "prompt": "a", "max_tokens": 3})
    assert status == 200 and answer["usage"]["completion_tokens"] == 3
    address = f"127.0.0.1:{port}"
    until("its slots are seen", lambda: proxy.get("/api/models/far")["engines"], 30)
    shown = proxy.get("/api/models/far")
    assert shown["backend"]["kind"] == "dns" and shown["backend"]["policy"] == "drain"
    assert [one["backend"] for one in shown["engines"]] == [address] and len(shown["engine"]["slots"]) == 2
    [books] = shown["admission"]["backends"]
    assert (books["backend"], books["slots"], books["draining"]) == (address, 2, False)
    assert proxy.metric("llama_proxy_mirror_age_seconds", model="far", backend=address) < 30
    assert f'backend="{address}"' in proxy.text("/metrics")
    status, job = proxy.post("/api/models/far/unload", {})
    assert status in (200, 202), job
    until("it is let go of", lambda: proxy.get("/api/models/far")["state"] == "unloaded", 30)
    assert f'backend="{address}"' not in proxy.text("/metrics")
    assert proxy.stop() == 0
