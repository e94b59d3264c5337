"""A box that one request holds: the proxy names it, for what waits inside the engine as well as for what waits here."""

import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import RawStream
from tests.e2e.conftest import model
from tests.e2e.harness import Proxy
from tests.support.wait import until

pytestmark = pytest.mark.engine


def test_the_request_that_holds_the_box_is_named(
    start: Callable[..., Proxy], zoo: Callable[[str], Path]
) -> None:
    """Two slots: a long answer runs, one request waits in the other, one stands by, one waits here. Cancelling as told moves all."""
    proxy = start({"models": {"m": model(zoo("llama-mid"), "-np", "2", "-c", "32768")}})

    def ask(name: str, tokens: int) -> RawStream:
        body = {"model": "m", "prompt": name, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        return RawStream(
            proxy.url, "/v1/completions", body, timeout_s=60, headers={"x-request-id": f"r-{name}"}
        )

    def why() -> dict[str, Any] | None:
        shown: dict[str, Any] | None = proxy.get("/api/models/m")["why"]
        return shown

    def states() -> dict[str, str]:
        return {one["request_id"]: one["state"] for one in proxy.get("/api/requests")["requests"]}

    holds = ask("holds", 20_000)
    assert holds.head() == 200 and holds.event()
    assert why() is None, "nobody waits"
    inside = ask("inside", 3)
    until("the other slot waits in the engine", lambda: states().get("r-inside") == "native_queued")
    shown = until("it is explained", why)
    assert shown["reason"] == "cohort_sealed" and "the engine generates" in shown["words"]
    standby = ask("standby", 3)
    until("one stands by", lambda: states().get("r-standby") == "granted")
    here = ask("here", 3)
    until("one waits here", lambda: states().get("r-here") == "queued")
    shown = until(
        "the one that waits here is the head",
        lambda: (found := why()) and found["head"]["state"] == "queued" and found,
    )
    holder = next(one for one in proxy.get("/api/requests")["requests"] if one["request_id"] == "r-holds")
    assert shown["holder"]["id"] == holder["id"] and shown["holder"]["tokens"] > 0
    assert shown["next"] == f"llama-proxy cancel {holder['id']}" and holder["id"] in shown["words"]
    order = urllib.request.Request(f"{proxy.url}/api/requests/{holder['id']}", method="DELETE")
    with urllib.request.urlopen(order, timeout=10):
        pass
    for stream in (inside, standby, here):
        assert stream.head() == 200 and stream.rest()[-1] == b"data: [DONE]"
    until("nobody waits", lambda: why() is None)
