"""The official SDKs, unchanged but for `base_url`, against the proxy with the real engine."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import model
from tests.e2e.harness import Proxy

pytestmark = [pytest.mark.engine, pytest.mark.interop]

HELLO = [{"role": "user", "content": "Once upon a time there was a small box"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


@pytest.fixture
def client(shared: Proxy) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def sdk() -> Iterator[Callable[..., Any]]:
    """Make SDK clients that are closed with the test."""
    with contextlib.ExitStack() as stack:

        def make(kind: type[Any], url: str, key: str = "none") -> Any:
            return stack.enter_context(kind(base_url=url, api_key=key, max_retries=0, timeout=60))

        yield make


def test_models_are_listed(client: openai.OpenAI) -> None:
    """Every model and alias can be listed and fetched by name."""
    names = {m.id for m in client.models.list()}
    assert {"tiny", "mid", "embed"} <= names
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_chat_stream_and_not_say_the_same(client: openai.OpenAI) -> None:
    """Same seed, temperature 0: the streamed pieces join to the whole answer; usage agrees."""
    ask = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0, "seed": 7}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    pieces, usage = [], None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(whole.choices[0].message.content) > 10
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens == 24


def test_completions(client: openai.OpenAI) -> None:
    """The older endpoint, by alias, with an array of prompts."""
    done = client.completions.create(
        model="default", prompt=["one", "two", "three"], max_tokens=5, temperature=0
    )
    assert len(done.choices) == 3
    alone = client.completions.create(model="tiny", prompt="two", max_tokens=5, temperature=0)
    assert alone.choices[0].text in [c.text for c in done.choices]
    chunks = client.completions.create(model="tiny", prompt="two", max_tokens=5, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == alone.choices[0].text


def test_tool_choice_required_is_schema_valid(start: Callable[..., Proxy], demo_model: Path) -> None:
    """A forced tool call comes back with arguments that fit the schema."""
    template = str(Path(__file__).parent / "data" / "tools.jinja")
    args = ["-t", "1", "-np", "1", "-c", "4096", "--chat-template-file", template]
    proxy = start({"models": {"m": {"path": str(demo_model), "args": args}}})
    # two examples, because so small a model only calls a tool where it has seen it done
    shown: list[dict[str, object]] = []
    for city, days in (("Rome", 2), ("Paris", 1), ("Rome", 1)):
        call = {
            "id": f"call_{city}_{days}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": city, "days": days})},
        }
        shown += [
            {"role": "user", "content": f"Weather in {city}, {days} days?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    ask: dict[str, Any] = {
        "model": "m", "messages": [*shown, {"role": "user", "content": "Weather in Paris, 2 days?"}],
        "tools": [WEATHER], "tool_choice": "required", "max_tokens": 128, "temperature": 0,
    }  # fmt: skip
    with openai.OpenAI(base_url=proxy.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        done = client.chat.completions.create(**ask)
        pieces = [
            piece.function
            for chunk in client.chat.completions.create(**ask, stream=True)
            for choice in chunk.choices
            for piece in choice.delta.tool_calls or []
        ]
    assert done.choices[0].message.tool_calls, done.choices[0].message.content
    call = done.choices[0].message.tool_calls[0].function
    assert "".join(piece.name or "" for piece in pieces) == call.name == "get_weather"
    assert "".join(piece.arguments or "" for piece in pieces) == call.arguments
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] in (1, 2)


def test_two_choices(client: openai.OpenAI) -> None:
    """`n=2` gives two choices, streamed too."""
    done = client.chat.completions.create(model="tiny", messages=HELLO, n=2, max_tokens=8, seed=3)
    assert len(done.choices) == 2
    chunks = client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, max_tokens=8, seed=3, stream=True
    )
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_embeddings(client: openai.OpenAI) -> None:
    """An embedding model answers a list in order."""
    done = client.embeddings.create(model="embed", input=["a box", "a fox", "a box"], encoding_format="float")
    assert [d.index for d in done.data] == [0, 1, 2]
    assert done.data[0].embedding == pytest.approx(done.data[2].embedding, abs=1e-4)
    assert done.data[0].embedding != pytest.approx(done.data[1].embedding, abs=1e-4)


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    """An unknown name raises NotFoundError with our code."""
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="nobody", messages=HELLO)
    assert error.value.code == "model_not_found"
    assert error.value.response.headers["x-request-id"]


def test_bad_requests_are_400(client: openai.OpenAI, shared: Proxy) -> None:
    """Bad JSON is refused by us, a bad field by the engine; both raise BadRequestError."""
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages="not a list")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/chat/completions", content=b'{"model": "tiny",', cast_to=object)
    assert error.value.code == "invalid_json"
    assert shared.metric("llama_proxy_requests_inflight") == 0


def test_too_large_is_413(client: openai.OpenAI) -> None:
    """A body over the limit is refused before it queues."""
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model="tiny", prompt="x" * 1_100_000)
    assert (error.value.status_code, error.value.code) == (413, "request_too_large")


def test_full_queue_is_429(
    start: Callable[..., Proxy], zoo: Callable[[str], Path], sdk: Callable[..., Any]
) -> None:
    """One slot, a queue of one: the third request is told when to come back."""
    proxy = start({"models": {"m": {"path": str(zoo("llama-mid")), "args": ["-t", "1", "-np", "1", "-c", "8192"], "max_queue": 1}},
                   "engine": {"phase_policy": "mixed"}})  # fmt: skip
    client = sdk(openai.OpenAI, proxy.url + "/v1")
    running = client.completions.create(
        model="m", prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(running))
    waiting = []
    try:
        with pytest.raises(openai.RateLimitError) as error:
            for _ in range(3):  # one is queued; a later one finds the queue full
                waiting.append(_post_and_leave_open(proxy))
                client.completions.create(model="m", prompt="c", max_tokens=1, timeout=5)
        assert error.value.code == "queue_full"
        assert 1 <= float(error.value.response.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="m", prompt="c", max_tokens=1, stream=True, timeout=5)
        with pytest.raises(anthropic.RateLimitError) as other:
            sdk(anthropic.Anthropic, proxy.url).messages.create(model="m", max_tokens=1, messages=HELLO)
        assert other.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        assert 1 <= float(other.value.response.headers["retry-after"]) <= 60
    finally:
        running.close()
        for sock in waiting:
            sock.close()


def _post_and_leave_open(proxy: Proxy):  # type: ignore[no-untyped-def]
    """Send a request over a raw socket and wait until the proxy counts it as queued."""
    import socket
    from urllib.parse import urlsplit

    from tests.support.wait import until

    at = urlsplit(proxy.url)
    sock = socket.create_connection((at.hostname, at.port), timeout=10)
    body = json.dumps({"model": "m", "prompt": "b", "max_tokens": 1}).encode()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    until("the request is queued", lambda: proxy.metric("llama_proxy_queue_size", model="m") >= 1)
    return sock


def test_keys(start: Callable[..., Proxy], zoo: Callable[[str], Path], sdk: Callable[..., Any]) -> None:
    """A wrong key is an AuthenticationError in both SDKs; a right one works; a key may be limited to models."""
    proxy = start({
        "models": {"tiny": model(zoo("llama")), "other": model(zoo("llama"))},
        "server": {"api_keys": [{"name": "alice", "key": "right", "models": ["tiny"]}], "admin_keys": [{"name": "ops", "key": "adm"}]},
    })  # fmt: skip
    good = sdk(openai.OpenAI, proxy.url + "/v1", "right")
    assert good.completions.create(model="tiny", prompt="a", max_tokens=2).choices
    with pytest.raises(openai.PermissionDeniedError):
        good.completions.create(model="other", prompt="a", max_tokens=2)
    with pytest.raises(openai.AuthenticationError) as error:
        sdk(openai.OpenAI, proxy.url + "/v1", "wrong").models.list()
    assert error.value.code == "invalid_api_key"
    with pytest.raises(anthropic.AuthenticationError):
        sdk(anthropic.Anthropic, proxy.url, "wrong").messages.create(
            model="tiny", max_tokens=4, messages=[{"role": "user", "content": "hi"}]
        )


def test_anthropic_messages(shared: Proxy, sdk: Callable[..., Any]) -> None:
    """Messages, streamed and not, and the error shape of its dialect."""
    client = sdk(anthropic.Anthropic, shared.url)
    ask = {"model": "tiny", "max_tokens": 16, "messages": HELLO, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**ask)  # type: ignore[call-overload]
    text = "".join(block.text for block in whole.content if block.type == "text")
    with client.messages.stream(**ask) as stream:  # type: ignore[arg-type]
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == text
    assert len(text) > 5
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens > 5  # type: ignore[arg-type]
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(**{**ask, "model": "nobody"})  # type: ignore[call-overload]
    assert error.value.body["type"] == "error"  # type: ignore[index]
    assert error.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ask, "model": "nobody"}, stream=True)  # type: ignore[call-overload]
    with pytest.raises(anthropic.BadRequestError) as error:
        client.post("/v1/messages", content=b'{"model": "tiny",', cast_to=object)
    assert error.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    large = [{"role": "user", "content": "x" * 1_100_000}]
    with pytest.raises(anthropic.APIStatusError) as error:
        client.messages.create(model="tiny", max_tokens=4, messages=large)  # type: ignore[arg-type]
    assert (error.value.status_code, error.value.body["error"]["type"]) == (413, "request_too_large")  # type: ignore[index]
