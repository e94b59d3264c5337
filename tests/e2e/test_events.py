"""`/api/events` of the real proxy: a model's load, its engine's phases and a request's life, in order."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.e2e.conftest import model
from tests.e2e.harness import Proxy

pytestmark = pytest.mark.engine


def events(stream: IO[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, data) until the stream ends."""
    name = ""
    for line in stream:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def test_a_watcher_sees_load_phases_and_end(start: Callable[..., Proxy], zoo: Callable[[str], Path]) -> None:
    """Everything that happened between two snapshots was told; the stream ends with the proxy, and says so."""
    proxy = start({"models": {"m": model(zoo("llama"))}})
    with urllib.request.urlopen(proxy.url + "/api/events", timeout=60) as stream:
        told = events(stream)
        name, snapshot = next(told)
        assert (name, snapshot["requests"]) == ("snapshot", [])
        assert [one["state"] for one in snapshot["models"]] == ["unloaded"]
        ask = {"model": "m", "prompt": "a", "max_tokens": 50, "ignore_eos": True}
        assert proxy.post("/v1/completions", ask, headers={"x-request-id": "one"})[0] == 200
        seen: list[tuple[str, dict[str, Any]]] = []
        # a request that is over between two comparisons is told by its outcome alone
        while ("idle", "outcome") not in {(a[1].get("phase"), b[0]) for a in seen for b in seen}:
            seen.append(next(told))
        assert [data["state"] for kind, data in seen if kind == "model"] == ["starting", "loading", "ready"]
        assert {data["id"] for kind, data in seen if kind == "request"} <= {"one"}
        [outcome] = [data for kind, data in seen if kind == "outcome"]
        assert (outcome["id"], outcome["outcome"]) == ("one", "completed")
        assert outcome["waits_s"]["model_loading"] > 0
        assert proxy.process is not None
        proxy.process.terminate()
        rest = list(told)
    assert rest[-1][0] == "end"
    assert "shutting down" in rest[-1][1]["reason"]
    assert proxy.process.wait(30) == 0
