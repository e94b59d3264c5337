"""What each limit counts, and ending a block from outside."""

import asyncio
from dataclasses import replace

import pytest

from proxy.errors import ErrorCode, ProxyError
from proxy.http.budgets import STEP_CAP_S, SWEEP_S, Meter, Seen, Stall, Sweeper, expired
from proxy.http.cut import Cut
from proxy.settings import Budgets
from proxy.types import TicketState

BASE = Seen(
    now=100.0,
    began=100.0,
    opened=0.0,
    first=0.0,
    last=0.0,
    stream=True,
    state=TicketState.QUEUED,
    mirrored=True,
    blocked=False,
)


def limits(**given):
    return Budgets(**{"load_timeout_s": None, "inter_token_timeout_s": None, **given})


def run(meter: Meter, seen: Seen, seconds: float) -> tuple[ErrorCode | None, Seen]:
    """Step through `seconds` at the sweep's pace; return the first code."""
    for _ in range(round(seconds / SWEEP_S)):
        seen = replace(seen, now=seen.now + SWEEP_S)
        code = meter.step(seen)
        if code is not None:
            return code, seen
    return None, seen


def test_all_off_never_expires():
    meter = Meter(limits(), BASE.now)
    code, _ = run(meter, replace(BASE, opened=100.0, first=100.0, last=100.0), 10_000)
    assert code is None


def test_total_counts_everything():
    code, seen = run(Meter(limits(total_timeout_s=10), BASE.now), BASE, 60)
    assert code is ErrorCode.TOTAL_TIMEOUT
    assert 10 < seen.now - BASE.began <= 10 + SWEEP_S


def test_first_token_counts_prefill_alone_where_member_states_are_known():
    meter = Meter(limits(first_token_timeout_s=5), BASE.now)
    seen = replace(BASE, opened=100.0)
    for state in (TicketState.GRANTED, TicketState.NATIVE_QUEUED, TicketState.READY):
        code, seen = run(meter, replace(seen, state=state), 60)
        assert code is None
    code, seen = run(meter, replace(seen, state=TicketState.PREFILL), 4)
    assert code is None
    code, seen = run(meter, replace(seen, state=TicketState.READY), 60)
    assert code is None
    code, seen = run(meter, replace(seen, state=TicketState.PREFILL), 4)
    assert code is ErrorCode.FIRST_TOKEN_TIMEOUT


def test_first_token_counts_from_sending_on_where_they_are_not():
    seen = replace(BASE, mirrored=False, state=TicketState.GRANTED)
    meter = Meter(limits(first_token_timeout_s=5), BASE.now)
    code, seen = run(meter, seen, 60)
    assert code is None
    code, _ = run(meter, replace(seen, opened=seen.now), 6)
    assert code is ErrorCode.FIRST_TOKEN_TIMEOUT
    meter = Meter(limits(first_token_timeout_s=5), BASE.now)
    code, _ = run(meter, replace(BASE, mirrored=False, stream=False, opened=100.0), 600)
    assert code is None


@pytest.mark.parametrize("excuse", [{"state": TicketState.PAUSED}, {"blocked": True}])
def test_inter_token_counts_the_engines_silence_only(excuse):
    meter = Meter(limits(inter_token_timeout_s=5), BASE.now)
    seen = replace(BASE, opened=100.0, first=100.0, last=100.0, state=TicketState.GENERATING)
    code, seen = run(meter, seen, 4)
    assert code is None
    code, seen = run(meter, replace(seen, **excuse), 600)
    assert code is None
    code, seen = run(meter, replace(seen, state=TicketState.GENERATING, blocked=False), 2)
    assert code is ErrorCode.INTER_TOKEN_TIMEOUT


def test_a_stall_is_a_client_that_takes_nothing():
    stall, now = Stall(5, 0.0), 0.0

    def over(sent, unread, steps):
        nonlocal now
        for _ in range(steps):
            now += SWEEP_S
            if stall.step(now, sent, unread):
                return True
        return False

    assert not over(1000, 0, 100)
    assert not over(2000, 900, 16)  # took 100
    assert not over(3000, 1800, 16)  # took 100 more, though more waits for it
    assert not over(4000, 2800, 3)  # took nothing
    assert over(4000, 2800, 3)
    off = Stall(None, 0.0)
    assert not any(off.step(SWEEP_S * n, 1000, 1000) for n in range(10_000))


def test_each_token_starts_the_silence_anew():
    meter = Meter(limits(inter_token_timeout_s=5), BASE.now)
    seen = replace(BASE, opened=100.0, first=100.0, last=100.0, state=TicketState.GENERATING)
    for _ in range(10):
        code, seen = run(meter, seen, 4.5)
        assert code is None
        seen = replace(seen, last=seen.now)


def test_a_stalled_loop_is_nobodys_silence():
    meter = Meter(limits(inter_token_timeout_s=5), BASE.now)
    seen = replace(BASE, opened=100.0, first=100.0, last=100.0, state=TicketState.GENERATING)
    assert meter.step(replace(seen, now=160.0)) is None
    code, later = run(meter, replace(seen, now=160.0), 60)
    assert code is ErrorCode.INTER_TOKEN_TIMEOUT
    assert later.now > 160 + 5 - STEP_CAP_S


def test_the_message_names_the_setting():
    error = expired(ErrorCode.FIRST_TOKEN_TIMEOUT, limits(first_token_timeout_s=2.5))
    assert error.status == 504
    assert "2.5 s (budgets.first_token_timeout_s)" in error.message


async def test_the_sweeper_sleeps_while_there_is_nothing_to_watch():
    now = 0.0
    sweeper = Sweeper(lambda: now, 0.01)

    class Watched:
        seen = 0

        def sweep(self, at):
            self.seen += 1

    watched = Watched()
    leave = sweeper.add(watched)
    async with asyncio.timeout(20):
        while watched.seen < 3:
            await asyncio.sleep(0.005)
    leave()
    await asyncio.sleep(0.05)
    assert sweeper._timer is None
    count = watched.seen
    await asyncio.sleep(0.05)
    assert watched.seen == count
    sweeper.close()


ERROR = ProxyError(ErrorCode.MODEL_UNLOADED, "unloaded")


async def test_a_cut_ends_a_waiting_block_with_its_error():
    cut = Cut()
    asyncio.get_running_loop().call_soon(cut.fire, ERROR)
    with pytest.raises(ProxyError) as caught:
        async with cut:
            await asyncio.sleep(60)
    assert caught.value is ERROR
    assert asyncio.current_task().cancelling() == 0


async def test_a_cut_before_the_block_and_one_after_it():
    cut = Cut()
    cut.fire(ERROR)
    with pytest.raises(ProxyError):
        async with cut:
            pytest.fail("the block must not run")
    late = Cut()
    async with late:
        pass
    late.fire(ERROR)
    await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0


async def test_the_cause_wins_over_what_the_block_made_of_it():
    cut = Cut()

    async def work():
        async with cut:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise ConnectionResetError from None

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    cut.fire(ERROR)
    with pytest.raises(ProxyError):
        await task


@pytest.mark.parametrize("order", ["cut first", "client first"])
async def test_a_client_that_leaves_at_the_same_moment_wins(order):
    cut = Cut()

    async def work():
        async with cut:
            await asyncio.sleep(60)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    if order == "cut first":
        cut.fire(ERROR)
        task.cancel()
    else:
        task.cancel()
        cut.fire(ERROR)
    await asyncio.wait({task})
    assert task.cancelled()
