"""A configuration that changes under load: only changed models drain and restart, the others notice nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.client import RawStream
from tests.e2e.conftest import ROOM, model
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine


def test_only_changed_models_drain_and_restart(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """Three loaded models with a stream each: one stays, one gets other arguments, one goes. All three streams end well."""
    path = zoo("llama-mid")
    proxy = start(
        {
            "models": {
                name: model(path, *ROOM, stop={"drain_s": 300}, aliases=["shared"] if name == "goes" else [])
                for name in ("stays", "changes", "goes")
            }
        }
    )

    def stream(name: str, tokens: int) -> RawStream:
        body = {"model": name, "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        opened = RawStream(proxy.url, "/v1/completions", body, timeout_s=120)
        assert opened.head() == 200 and opened.event()
        return opened

    def shown(name: str) -> dict[str, Any]:
        found: dict[str, Any] = proxy.get(f"/api/models/{name}")
        return found

    entries = proxy.config["models"]
    # the last is still at work when it is asked for again
    streams = {
        name: stream(name, count) for name, count in (("stays", 1000), ("changes", 1000), ("goes", 2500))
    }
    pids = {name: shown(name)["backend"]["pid"] for name in streams}
    entries["changes"]["args"] = ["-t", "1", "-np", "2", "-c", "4096"]
    entries["comes"] = model(zoo("llama"), aliases=["shared"])
    del entries["goes"]
    (proxy.folder / "config.yaml").write_text(yaml.safe_dump(proxy.config))
    status, body = proxy.post("/api/reload", {})
    assert status == 200 and body["added"] == ["comes"] and body["removed"] == ["goes"]
    assert body["changed"] == [{"model": "changes", "fields": ["args"], "restart": True}]
    assert body["restart_needed"] == [] and len(body["jobs"]) == 2
    status, refused = proxy.post("/v1/completions", {"model": "goes", "prompt": "a", "max_tokens": 2})
    assert (status, refused["error"]["code"]) == (503, "model_draining")
    assert "it was removed from the configuration" in refused["error"]["message"]
    status, body = proxy.post("/v1/completions", {"model": "shared", "prompt": "a", "max_tokens": 2})
    assert status == 200 and body["model"] == "comes", "its old bearer only drains"
    assert shown("goes")["aliases"] == []
    for name, open_ in streams.items():
        assert open_.rest()[-1] == b"data: [DONE]", name
    until(
        "it is gone",
        lambda: {one["id"] for one in proxy.get("/api/models")["models"]} == {"stays", "changes", "comes"},
        120,
    )
    until(
        "it is loaded again",
        lambda: shown("changes")["state"] == "ready" and shown("changes")["n_slots"] == 2,
        120,
    )
    assert shown("stays")["backend"]["pid"] == pids["stays"] and shown("stays")["backend"]["generation"] == 1
    alive = {engine.pid for engine in proxy.engines()}
    assert pids["stays"] in alive and pids["goes"] not in alive and pids["changes"] not in alive
    assert proxy.post("/v1/completions", {"model": "goes", "prompt": "a", "max_tokens": 2})[0] == 404
