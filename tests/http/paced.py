"""A paced engine: llama-server's wire shapes at a chosen pace, over a raw socket.

It stands for the world outside the proxy, with behaviour no real engine shows on demand: exact pace,
one event per write, death in the middle of an event. Each request says in its body (`"paced": {...}`)
what it wants.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

BEHAVIOUR: dict[str, Any] = {
    "tokens": 5,
    "pace_ms": 0,
    "prefill_ms": 0,
    "status": 200,
    # before_head, after_head, mid_event, mid_body, early_end, half_end, error_event, error_event then lost, after_all
    "die": "",
    "die_after": 2,
    "pause_after": 0,
    "pause_ms": 0,
    # prefill, pause, each: stands there (before the head, at `pause_after`, behind each event) until `go` is released
    "hold": "",
    "pad": 0,
    "ends": "\n\n",
}


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    sent: bytearray = field(default_factory=bytearray)
    """The payload bytes of the answer, without chunk framing."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the proxy closed the connection before the answer was complete."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def tag(self) -> str:
        return (self.header("x-request-id") or [""])[0]


class PacedEngine:
    """Serve until stopped. `requests` is what arrived; `active` the tags now at work."""

    def __init__(self) -> None:
        self.requests: list[Seen] = []
        self.active: dict[str, Seen] = {}
        self.changed = asyncio.Event()
        self.connections = 0
        self.drop_next_reused = False
        self.go = asyncio.Semaphore(0)
        """Released by a test: lets one request that asked to be held go on."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def base(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def seen(self, count: int = 1, within: float = 20.0) -> Seen:
        """Wait for the `count`-th request."""
        async with asyncio.timeout(within):
            while len(self.requests) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.requests[count - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        served = 0
        try:
            while (seen := await _read(reader)) is not None:
                if served and self.drop_next_reused:
                    self.drop_next_reused = False
                    writer.transport.abort()
                    return
                self.requests.append(seen)
                self.active[seen.tag] = seen
                self.changed.set()
                work = asyncio.ensure_future(self._answer(seen, writer))
                watch = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
                    if not work.done() or isinstance(work.exception(), ConnectionError):
                        seen.gone.set()
                        return
                    watch.cancel()
                    await asyncio.wait({watch})
                    if not work.result():
                        return
                finally:
                    work.cancel()
                    watch.cancel()
                    await asyncio.gather(work, watch, return_exceptions=True)
                    self.active.pop(seen.tag, None)
                served += 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            # close, not abort: what was written may still be on its way
            writer.close()
            self._tasks.discard(task)

    async def _answer(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection goes on."""
        try:
            body = json.loads(seen.body) if seen.body[:1] == b"{" else {}
        except ValueError:
            body = {}
        want = {**BEHAVIOUR, **body.get("paced", {})}
        path = seen.target.partition("?")[0]
        await asyncio.sleep(want["prefill_ms"] / 1000)
        if want["hold"] == "prefill":
            await self.go.acquire()
        if want["die"] == "before_head":
            writer.transport.abort()
            return False
        if want["status"] != 200:
            error = {"error": {"code": want["status"], "message": "the engine's own words", "type": "x"}}
            return await _plain(seen, writer, want, error)
        if not body.get("stream"):
            return await _plain(seen, writer, want, whole(path, body, want["tokens"], want["pad"]))
        writer.write(
            b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
            b"Access-Control-Allow-Origin: http://evil.example\r\n"
            b"Keep-Alive: timeout=5, max=100\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        await writer.drain()
        if want["die"] == "after_head":
            writer.transport.abort()
            return False
        for number, event in enumerate(events(path, body, want["tokens"], want["pad"], want["ends"])):
            if want["die"] == "mid_event" and number == want["die_after"]:
                await _chunk(seen, writer, event[: len(event) // 2])
                await asyncio.sleep(0.02)
                writer.transport.abort()
                return False
            if want["die"] in {"early_end", "half_end"} and number == want["die_after"]:
                if want["die"] == "half_end":
                    await _chunk(seen, writer, event[: len(event) // 2])
                break
            if want["die"].startswith("error_event") and number == want["die_after"]:
                name = "event: error\n" if path.endswith("/messages") else ""
                words = '{"error":{"code":500,"message":"out of memory","type":"server_error"}}'
                await _chunk(seen, writer, f"{name}data: {words}\n\n".encode())
                break
            await _chunk(seen, writer, event)
            if want["pause_after"] and number == want["pause_after"]:
                await asyncio.sleep(want["pause_ms"] / 1000)
                if want["hold"] == "pause":
                    await self.go.acquire()
            if want["hold"] == "each":
                await self.go.acquire()
            if want["pace_ms"]:
                await asyncio.sleep(want["pace_ms"] / 1000)
        if want["die"] in {"after_all", "error_event then lost"}:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


async def _read(reader: asyncio.StreamReader) -> Seen | None:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = raw.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines if line)]
    seen = Seen(method, target, headers, b"")
    length = int((seen.header("content-length") or ["0"])[0])
    if seen.header("transfer-encoding"):
        while size := int((await reader.readline()).strip(), 16):
            seen.body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
    elif length:
        seen.body = await reader.readexactly(length)
    return seen


async def _chunk(seen: Seen, writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()
    seen.sent += data


async def _plain(seen: Seen, writer: asyncio.StreamWriter, want: dict[str, Any], value: Any) -> bool:
    data = json.dumps(value, separators=(",", ":")).encode()
    writer.write(
        f"HTTP/1.1 {want['status']} X\r\nServer: llama.cpp\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Connection: keep-alive, X-Private\r\nX-Private: secret\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    )
    if want["die"] == "mid_body":
        writer.write(data[: len(data) // 2])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
        return False
    writer.write(data)
    await writer.drain()
    seen.sent += data
    return True


TIMINGS = {"cache_n": 3, "prompt_n": 7, "prompt_ms": 1.5, "predicted_n": 5, "predicted_ms": 9.0}


def whole(path: str, body: dict[str, Any], tokens: int, pad: int) -> Any:
    """Return a whole answer as llama-server gives it."""
    usage = {
        "completion_tokens": tokens,
        "prompt_tokens": 10,
        "total_tokens": tokens + 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    text = "".join(f" t{number}" for number in range(tokens)) + "x" * pad
    if path.endswith("/messages"):
        return {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "model": "engine-name",
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {"cache_read_input_tokens": 3, "input_tokens": 7, "output_tokens": tokens},
        }
    if path.endswith("/embeddings"):
        inputs = body["input"] if isinstance(body.get("input"), list) else [body.get("input")]
        data = [
            {"object": "embedding", "index": index, "embedding": [0.5, 0.25]} for index in range(len(inputs))
        ]
        return {
            "model": "engine-name",
            "object": "list",
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
            "data": data,
        }
    if path.endswith("/chat/completions"):
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
        }
        if body.get("tool_choice") == "required":
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            choice["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
        kind = "chat.completion"
    elif path.endswith("/v1/completions"):
        choice, kind = (
            {"index": 0, "finish_reason": "stop", "text": text, "logprobs": None},
            "text_completion",
        )
    else:
        return {"echo": path, "target_body": body, "timings": TIMINGS}
    choices = [{**choice, "index": index} for index in range(body.get("n", 1))]
    return {
        "choices": choices,
        "created": 1,
        "model": "engine-name",
        "object": kind,
        "id": "cmpl-1",
        "usage": usage,
        "timings": TIMINGS,
    }


def events(path: str, body: dict[str, Any], tokens: int, pad: int, ends: str) -> Iterator[bytes]:
    """Yield the events of a streamed answer."""
    return (event.replace("\n\n", ends).encode() for event in _events(path, body, tokens, "x" * pad))


def _events(path: str, body: dict[str, Any], tokens: int, pad: str) -> Iterator[str]:
    def data(value: Any, name: str = "") -> str:
        head = f"event: {name}\n" if name else ""
        return head + "data: " + json.dumps(value, separators=(",", ":")) + "\n\n"

    if path.endswith("/messages"):
        start = {
            "type": "message_start",
            "message": {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": "engine-name",
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"cache_read_input_tokens": 3, "input_tokens": 7, "output_tokens": 0},
            },
        }
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        yield data(start, "message_start")
        yield data(block, "content_block_start")
        for number in range(tokens):
            delta = {"type": "text_delta", "text": f" t{number}{pad}"}
            yield data({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")
        yield data({"type": "content_block_stop", "index": 0}, "content_block_stop")
        ending = {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": tokens},
        }
        yield data(ending, "message_delta")
        yield data({"type": "message_stop"}, "message_stop")
        return
    if path.endswith("/responses"):
        name = "response.output_text.delta"
        for number in range(tokens):
            yield data({"type": name, "item_id": "m", "delta": f" t{number}{pad}"}, name)
        usage = {
            "input_tokens": 10,
            "output_tokens": tokens,
            "total_tokens": 10 + tokens,
            "input_tokens_details": {"cached_tokens": 3},
        }
        done = {"type": "response.completed", "response": {"id": "r", "usage": usage}, "timings": TIMINGS}
        yield data(done, "response.completed")
        return
    base = {"created": 1, "id": "chatcmpl-1", "model": "engine-name", "object": "chat.completion.chunk"}

    def choice(delta: Any, finish: str | None = None) -> str:
        return data({"choices": [{"finish_reason": finish, "index": 0, "delta": delta}], **base})

    if path == "/completion":
        for number in range(tokens):
            yield data({"index": 0, "content": f" t{number}{pad}", "stop": False})
        yield data(
            {"index": 0, "content": "", "stop": True, "prompt": "secret prompt" + pad, "timings": TIMINGS}
        )
        return
    if path == "/v1/completions":
        for number in range(tokens):
            yield data({"choices": [{"text": f" t{number}{pad}", "index": 0, "finish_reason": None}], **base})
        yield data(
            {"choices": [{"text": "", "index": 0, "finish_reason": "stop"}], **base, "timings": TIMINGS}
        )
        yield "data: [DONE]\n\n"
        return
    yield choice({"role": "assistant", "content": None})
    for number in range(tokens):
        yield choice({"content": f" t{number}{pad}"})
    ending = {"choices": [{"finish_reason": "stop", "index": 0, "delta": {}}], **base, "timings": TIMINGS}
    yield data(ending)
    yield "data: [DONE]\n\n"
