"""Random clients, engines and operators at once: every answer is well-formed, every request ends once, nothing is left.

`HTTP_CHAOS_SEEDS` says how many seeds are played; a failure names its own.
"""

import asyncio
import json
import os
import random
from collections import Counter

import pytest
from structlog.testing import capture_logs

from proxy.errors import ErrorCode, ProxyError
from proxy.types import AdminState, EnginePhase, MemberState, ModelState, PhasePolicy

from .world import House, house, settings, until

VISITS = 250
SEEDS = int(os.environ.get("HTTP_CHAOS_SEEDS", "3"))
PATHS = ("/v1/chat/completions", "/v1/completions", "/completion", "/v1/messages", "/v1/responses")
DEATHS = (
    "before_head",
    "after_head",
    "mid_event",
    "mid_body",
    "early_end",
    "half_end",
    "error_event",
    "after_all",
)
KEYS = ("k-a", "k-b", "k-c")
LAST_S = 30.0


def configured(rnd: random.Random):
    budgets = {
        "first_token_timeout_s": 0.6,
        "inter_token_timeout_s": 0.6,
        "total_timeout_s": 5,
        "load_timeout_s": 3,
    }
    return settings(
        server={
            "api_keys": [
                {"name": "a", "key": "k-a", "class": "interactive", "max_queue": 20},
                {"name": "b", "key": "k-b", "class": "batch"},
                {"name": "c", "key": "k-c"},
            ],
            "stall_timeout_s": 2,
        },
        admission={
            "keepalive_s": rnd.choice([0, 0.02, 0.05]),
            "max_queue": 30,
            "queue_timeout_s": 4,
            "gate_hold_max_s": 1,
            "cohort_shape": rnd.random() < 0.4,
            "stale_after_s": 0.5,
        },
        models={"demo": {"path": "demo.gguf", "budgets": budgets}},
    )


class Visit:
    """One client with a temper of its own."""

    def __init__(self, h: House, rnd: random.Random) -> None:
        self.h = h
        self.path = rnd.choice(PATHS)
        self.dies = rnd.choice(DEATHS) if rnd.random() < 0.3 else ""
        paced = {
            "tokens": rnd.choice([1, 3, 10, 40]),
            "pace_ms": rnd.choice([0, 0, 2, 10]),
            "prefill_ms": rnd.choice([0, 0, 5, 50, 200]),
            "die": self.dies,
            "die_after": rnd.choice([0, 1, 2]),
            "pad": rnd.choice([0, 0, 0, 100, 20_000]),
            "ends": rnd.choice(["\n\n", "\r\n\r\n", "\r\r"]),
            "status": rnd.choice([200] * 9 + [400, 500, 503]),
        }
        text = "hi" * rnd.choice([1, 100])
        self.body = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "prompt": text,
            "stream": rnd.random() < 0.6,
            "paced": paced,
        }
        if rnd.random() < 0.1:
            self.body["n"] = rnd.choice([2, 3, 5])
        self.fields = [f"Authorization: Bearer {rnd.choice(KEYS)}"]
        if rnd.random() < 0.4:
            self.fields.append(f"x-request-id: again{rnd.randrange(6)}")
        if rnd.random() < 0.3:
            self.fields.append("x-keepalive: off")
        self.stays_s = rnd.choice([0, 0.01, 0.05, 0.3] + 5 * [LAST_S])
        self.naps = rnd.random() < 0.1

    async def pay(self) -> str:
        """Ask, read, perhaps leave; return how it ended."""
        data = json.dumps(self.body).encode()
        head = [f"POST {self.path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head += [*self.fields, f"Content-Length: {len(data)}", "Connection: close", "", ""]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.h.port, limit=8192)
        answer = bytearray()
        try:
            writer.write("\r\n".join(head).encode() + data)
            async with asyncio.timeout(self.stays_s):
                while part := await reader.read(4096):
                    answer += part
                    if self.naps:
                        await asyncio.sleep(0.01)
        except TimeoutError:
            assert self.stays_s < LAST_S, f"no end of {self.body}: {bytes(answer[-300:])!r}"
            return "left"
        except ConnectionError:
            return "torn"
        finally:
            writer.transport.abort()
        return self.judged(bytes(answer))

    def judged(self, answer: bytes) -> str:
        """Check a whole answer; return what it is."""
        head, found, rest = answer.partition(b"\r\n\r\n")
        status = head[9:12].decode()
        if not found or b"chunked" not in head.lower():
            return status
        body = unchunked(rest)
        if body is None:
            return "torn"
        if b"text/event-stream" not in head:
            return status
        text = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        assert text.endswith(b"\n\n"), f"half an event: {text[-300:]!r}"
        payloads = [
            line[6:]
            for event in text.split(b"\n\n")
            for line in event.split(b"\n")
            if line.startswith(b"data: ")
        ]
        done = payloads.count(b"[DONE]")
        values = [json.loads(payload) for payload in payloads if payload != b"[DONE]"]
        errors = [value for value in values if "error" in value]
        assert len(errors) + done <= 1, f"two ends: {text[-600:]!r}"
        if self.path in {"/v1/chat/completions", "/v1/completions"}:
            assert len(errors) + done == 1, f"no end: {text[-300:]!r}"
        return "error event" if errors else "whole"


def unchunked(rest: bytes) -> bytes | None:
    """The body of a chunked answer; None for one that is cut. Nothing may follow its end."""
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not size:
            return None
        length = int(size, 16)
        if length == 0:
            assert rest == b"\r\n", f"something follows the end: {rest[:300]!r}"
            return body
        body += rest[:length]
        rest = rest[length + 2 :]


class Trouble:
    """Operators, crashes, and an engine that shows what it likes."""

    def __init__(self, h: House, rnd: random.Random) -> None:
        self.h, self.rnd = h, rnd

    async def make(self) -> None:
        while True:
            await asyncio.sleep(self.rnd.random() * 0.15)
            await self.once()
            self.h.admission.refresh_metrics()
            assert self.h.admission.broken_rules() == []

    async def once(self) -> None:
        h, rnd = self.h, self.rnd
        tickets = h.admission.tickets()
        match rnd.randrange(20):
            case 0 | 1 | 2 | 3 | 4 | 5 if tickets:
                by_hand = ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "by hand")
                h.admission.cancel(rnd.choice(tickets).id, by_hand)
            case 6 | 7:
                h.members = {ticket.id: rnd.choice(list(MemberState)) for ticket in tickets}
                h.member = rnd.choice(list(MemberState))
                h.showing = rnd.choice([None, *EnginePhase])
            case 8:
                h.mute = not h.mute
            case 9:
                await self.engine_dies()
            case 10:
                h.admission.end_model("demo", ProxyError(ErrorCode.MODEL_UNLOADED, "by force"))
                await self.gone("it was unloaded")
            case 11 | 12:
                h.admission.set_gate("demo", AdminState.BLOCKED, "pause", rnd.choice(["hold", "reject"]))
            case _:
                h.admission.set_gate("demo", AdminState.ENABLED)

    async def engine_dies(self) -> None:
        key = self.h.keys.get("demo")
        if key is None:
            return
        error = ProxyError(ErrorCode.UPSTREAM_ERROR, "it died")
        if self.rnd.random() < 0.5:
            self.h.admission.backend_down(key, error)
            await self.gone("it was killed")
        else:
            await self.gone("it was killed")
            self.h.admission.backend_down(key, error)

    async def gone(self, why: str) -> None:
        key = self.h.keys.pop("demo", None)
        self.h.states["demo"] = ModelState.UNLOADED
        if key is not None:
            await self.h.clients[key].close(why)


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_whatever_meets_whatever(seed: int):
    rnd = random.Random(seed)
    policy = rnd.choice([PhasePolicy.DRAIN, PhasePolicy.YIELD, PhasePolicy.MIXED, PhasePolicy.UNKNOWN])
    lost: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: lost.append(str(context)))

    async def visit() -> str:
        await asyncio.sleep(rnd.random() * VISITS * 0.012)
        return await Visit(h, rnd).pay()

    with capture_logs() as logged:
        async with house(configured(rnd), slots=2, native=rnd.random() < 0.85, policy=policy) as h:
            trouble = asyncio.ensure_future(Trouble(h, rnd).make())
            ends = Counter(await asyncio.gather(*(visit() for _ in range(VISITS))))
            trouble.cancel()
            await asyncio.wait({trouble})
            assert trouble.cancelled(), trouble.exception()
            h.mute, h.members, h.member = False, {}, MemberState.GENERATE
            h.admission.set_gate("demo", AdminState.ENABLED)
            await until(lambda: h.live() == 0, LAST_S)
            await until(lambda: sum(h.outcomes().values()) == VISITS, LAST_S)
            assert h.admission.broken_rules() == []
            assert h.admission.busy() == 0
            await until(lambda: h.admission.view("demo").charged == 0, LAST_S)
            assert [client.exchanges for client in h.clients.values()] == [0] * len(h.clients)
    print(policy.value, dict(ends), h.outcomes())
    assert lost == []
    assert [line for line in logged if line["log_level"] in {"error", "critical"}] == []
    assert ends["whole"] + ends["200"] > 0
