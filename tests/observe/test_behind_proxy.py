"""A model behind the proxy, watched through it: never loaded by being watched, counted without its counters."""

from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.observe.records import ServerState
from proxy.observe.summary import summarize
from tests.e2e.harness import Proxy
from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.prompts import words
from tests.observe.conftest import Observer

pytestmark = pytest.mark.engine


def test_a_model_behind_the_proxy(
    engine_binary: Path, tmp_path: Path, watching: Callable[..., Observer]
) -> None:
    """Not loaded: said so. Loaded by a request: phases, exact generated tokens, prompt tokens with their doubt."""
    model = {"path": str(zoo("llama")), "args": ["-t", "1", "-np", "2", "-c", "4096"]}
    config = {"engine": {"dir": str(engine_binary)}, "models": {"a/b": model, "other": model}}
    with Proxy(config, tmp_path / "proxy") as proxy:
        with watching([f"{proxy.url}/?model=a/b"]) as seen:
            mark = seen.wait_state(ServerState.NOT_LOADED)
            assert "not loaded" in mark.why
            assert proxy.engines() == []
            status, first = proxy.post(
                "/v1/completions", {"model": "a/b", "prompt": words(30), "max_tokens": 5, "ignore_eos": True}
            )
            assert status == 200, first
            assert seen.wait_state(ServerState.UP).policy == "drain"
            seen.wait_samples()
            # what was counted of the first request depends on when the model was seen to be up
            base = seen.account.servers[0].point
            assert base is not None
            tokens = prompts = 0
            for number in range(5):
                body = {"model": "a/b", "prompt": words(40, number), "max_tokens": 7, "ignore_eos": True}
                status, answer = proxy.post("/v1/completions", body)
                assert status == 200, answer
                tokens += answer["usage"]["completion_tokens"]
                prompts += answer["timings"]["prompt_n"]
            seen.wait_samples()
        with watching([proxy.url]) as confused:
            mark = confused.wait_state(ServerState.UNUSABLE)
            assert "'model' is missing (models: a/b, other)" in mark.why
    found = summarize(seen.account)["servers"][0]
    assert found["native"]
    assert found["generated_tokens"] - base.generated == tokens == 35
    least = found["prompt_tokens"] - base.prompt
    assert least <= prompts <= least + found["prompt_tokens_unsure"] - base.unsure
    assert found["prompt_from"] == ["transitions"]
    assert any("unsure" in note and "--metrics" not in note for note in found["notes"])
