"""What a fresh view sets right after a time in the dark is told once."""

import json

import aiohttp

from proxy.app.reconcile import Reconciler
from proxy.clock import monotonic
from proxy.types import MemberState, SlotView, Snapshot, TicketState

from .test_forward import CHAT, chat
from .world import House, house, settings, until

STALE_S = 0.2


def view(h: House, *tags: str) -> Snapshot:
    now = monotonic()
    busy = [SlotView(n, busy=True, tag=tag, member=MemberState.GENERATE) for n, tag in enumerate(tags)]
    idle = [SlotView(n, busy=False) for n in range(len(busy), h.slots)]
    return Snapshot(h.keys["demo"], now, now, (*busy, *idle), native=True)


async def test_a_fresh_view_after_a_dark_time_tells_what_differed():
    configured = settings(admission={"stale_after_s": STALE_S})
    async with house(configured, slots=2) as h, aiohttp.ClientSession(h.base) as client:
        reconciler = Reconciler(h.admission, h.metrics, h.hub, STALE_S)
        running = await client.post(
            CHAT, json=chat(True, tokens=100_000, pace_ms=2), headers={"x-request-id": "one"}
        )
        await running.content.readuntil(b"t2")
        h.mute = True
        [ticket] = h.admission.tickets()
        reconciler.take(view(h, ticket.tag))
        dark_since = monotonic()
        watcher = h.hub.subscribe()

        reconciler.take(view(h, ticket.tag))
        assert await watcher.take(0.01) == b""

        running.close()
        await until(lambda: h.admission.tickets()[0].state is TicketState.CANCELLING)
        await until(lambda: monotonic() > dark_since + 2 * STALE_S)
        [backend] = h.admission.view("demo").backends
        assert backend.mirror == "stale"
        reconciler.take(view(h, "stranger"))
        [event] = [e for e in (await watcher.take(1)).split(b"\n\n") if b"event: reconciled" in e]
        told = json.loads(event.partition(b"data: ")[2])
        assert told["blind_s"] > STALE_S
        assert (told["ended"], told["foreign"], told["moved"]) == (["one"], 1, {})
        assert h.live() == 0
        assert h.sample("mirror_mismatch_total", model="demo", backend="demo-0") == 1

        await until(lambda: monotonic() > dark_since + 4 * STALE_S)
        reconciler.forget(h.keys["demo"])
        reconciler.take(view(h))
        assert await watcher.take(0.01) == b""
