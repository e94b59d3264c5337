"""The observer against real engines: what it adds up is what the engines counted themselves."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.backends.client import EngineClient
from proxy.clock import monotonic
from proxy.observe.account import Account
from proxy.observe.ask import Asker
from proxy.observe.records import Event, LogLine, Sample, ServerState
from proxy.observe.sampler import STOCK_INTERVAL_S, Sampler
from proxy.observe.session import begin
from proxy.observe.summary import summarize
from proxy.observe.tally import Tally
from proxy.observe.target import parse_target
from tests.engine.conftest import EngineFactory
from tests.engine.enginekit.load import run_load
from tests.engine.enginekit.models import zoo
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import Server
from tests.observe.conftest import Observer
from tests.support.ports import held_port
from tests.support.wait import until

pytestmark = pytest.mark.engine
ARGS = ("-b", "64")
WITHIN = 0.02
Watching = Callable[..., Observer]


def url(server: Server, model: str = "") -> str:
    return f"http://127.0.0.1:{server.port}" + (f"/?model={model}" if model else "")


def counted(server: Server) -> tuple[int, int]:
    """What the engine has counted: prompt tokens computed, tokens of ended answers. Only whole at rest."""
    server.wait_idle()
    metrics = server.metrics()
    return int(metrics["prompt_tokens_total"]), int(metrics["tokens_predicted_total"])


def together(servers: list[Server]) -> tuple[int, int]:
    each = [counted(server) for server in servers]
    return sum(prompt for prompt, _ in each), sum(generated for _, generated in each)


def close(found: float, wanted: float) -> bool:
    return abs(found - wanted) <= WITHIN * wanted


def mixed_load(server: Server, seed: int, count: int = 8) -> None:
    """Long prompts and short ones, a family, a prompt from the cache, two at a time."""
    running = []
    for number in range(count):
        more = {"n_cmpl": 2} if number % 4 == 1 else {"cache_prompt": number % 2 == 0}
        # every third prompt is one that was there before
        which = 1 if number % 3 == 2 else 10 * seed + number
        body = {
            "prompt": words((30, 200, 400)[number % 3], which),
            "n_predict": (3, 40)[number % 2],
            "ignore_eos": True,
        }
        running.append(server.start(body | more, tag=f"load{seed}.{number}"))
        if len(running) == 2:
            running.pop(0).ok()
    for exchange in running:
        exchange.ok()


def short_load(server: Server, count: int = 100) -> None:
    """Tasks of a few milliseconds, one after the other; half of each prompt is cached."""
    for number in range(count):
        body = {
            "prompt": words(20, number % 5),
            "n_predict": 1 + number % 4,
            "cache_prompt": True,
            "ignore_eos": True,
        }
        server.post("/completion", body).ok()


def cancelled_load(server: Server, count: int = 10) -> None:
    """Clients that leave: amid the prompt, and amid the answer."""
    for number in range(count):
        stream = server.stream(words(300, number), 300, tag=f"gone{number}", timings_per_token=False)
        if number % 2:
            stream.wait(lambda _, all_of=stream: len(all_of.token_ids) >= 12, "twelve tokens")
        else:
            stream.wait_progress()
        stream.close()
        server.wait_idle()


LOADS = {"mixed": (mixed_load, 0.1), "short": (lambda server, _: short_load(server), 0.3), "cancelled": (lambda server, _: cancelled_load(server), 0.4)}  # fmt: skip


def run_on_all(servers: list[Server], load: Callable[[Server, int], None]) -> None:
    failures: list[BaseException] = []

    def one(server: Server, seed: int) -> None:
        try:
            load(server, seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=item) for item in zip(servers, (1, 2), strict=False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
        assert not thread.is_alive()
    assert not failures, failures


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("load", LOADS)
def test_the_combined_rate_is_that_of_the_engines_counters(
    engine: EngineFactory, watching: Watching, load: str, servers: int
) -> None:
    """Prompt and generated tokens per second, within 2 %, for every kind of load; at rest even the very numbers."""
    run, interval = LOADS[load]
    engines = [engine("llama-mid" if load != "short" else "llama", "drain", ARGS) for _ in range(servers)]
    before = together(engines)
    with watching([url(server) for server in engines], interval_s=interval) as seen:
        seen.wait_samples()
        run_on_all(engines, run)
        for server in engines:
            server.wait_idle()
        seen.wait_samples()
    after = together(engines)
    prompt, generated = after[0] - before[0], after[1] - before[1]
    found = summarize(seen.account)["combined"]
    assert prompt > 150
    assert generated > 30
    assert close(found["rate"]["prompt"], prompt / found["wall_s"])
    assert close(found["rate"]["generated"], generated / found["wall_s"])
    assert (found["prompt_tokens"], found["generated_tokens"]) == (prompt, generated)
    assert found["frames"] > 2
    assert servers == 1 or 0 < found["skew_max_s"] <= 0.5
    for account in seen.account.servers:
        assert not account.lost
        assert account.prompt_from == {"counters"}
        assert account.generated_from == {"transitions"}


@pytest.mark.parametrize("policy", ["mixed", "drain", "yield"])
def test_a_random_load_under_every_policy(engine: EngineFactory, watching: Watching, policy: str) -> None:
    """Families, prompt arrays, embeddings, cached prefixes, clients that leave: at rest the numbers are the engine's.

    Without its counters the truth lies within the doubt that is told.
    """
    both = ("--embeddings", "--pooling", "none", "--phase-yield-ms", "15")
    server = engine("llama", policy, (*ARGS, *both), context=16384)
    before = counted(server)
    with (
        watching([url(server)], interval_s=0.25) as seen,
        watching([url(server)], interval_s=0.25, counters=False) as blind,
    ):
        for observer in (seen, blind):
            observer.wait_samples()
        report = run_load(server, 5, 60)
        server.wait_idle()
        for observer in (seen, blind):
            observer.wait_samples()
    after = counted(server)
    prompt, generated = after[0] - before[0], after[1] - before[1]
    assert not report.failures, report.failures
    assert report.outcomes["left"] > 0
    found, doubt = (summarize(observer.account)["servers"][0] for observer in (seen, blind))
    assert (found["prompt_tokens"], found["generated_tokens"]) == (prompt, generated)
    assert doubt["generated_tokens"] == generated
    assert doubt["prompt_tokens"] <= prompt <= doubt["prompt_tokens"] + doubt["prompt_tokens_unsure"]


def test_a_rate_amid_the_work_is_that_of_the_decoded_batches(
    engine: EngineFactory, watching: Watching
) -> None:
    """Between any two samples the prompt tokens are those of the batches the engine traced between them."""
    server = engine("llama-mid", "drain", ARGS)
    with watching([url(server)], interval_s=0.05) as seen:
        seen.wait_samples()
        for part in range(6):
            running = [server.stream(words(300 + 90 * n, n), 30, tag=f"t{part}.{n}") for n in range(3)]
            for exchange in running:
                exchange.ok()
            server.wait_idle()
            seen.wait_samples()
            tally = Tally()
            points = [tally.add(sample) for sample in seen.samples()]
            amid = sum(
                a.busy and b.busy and b.prompt > a.prompt for a, b in zip(points, points[1:], strict=False)
            )
            # on a fast machine few samples fall into the work
            if amid > 3:
                break
    views = [(view.t_us / 1e6, view.prompt) for view in server.trace()]
    assert amid > 3
    for point in points:
        least = sum(count for at, count in views if at < point.asked_s)
        most = sum(count for at, count in views if at <= point.answered_s)
        assert least <= point.prompt <= most


def test_transitions_come_with_our_time(engine: EngineFactory, watching: Watching, tmp_path) -> None:
    """On one machine both clocks are the same: the mapped time is the engine's, within the error that is told.

    Log lines are read on the same clock, after they were written.
    """
    server = engine("llama-mid", "drain", ARGS)
    with watching([url(server)], logs=[server.log_path]) as seen:
        seen.wait_samples()
        server.complete(words(100, 1), 10)
        server.wait_idle()
        seen.wait_samples()

        def logged() -> bool:
            return any("stop processing" in r.line for r in list(seen.records) if isinstance(r, LogLine))

        until("the engine's log tells the end", logged)
    events = [record for record in seen.records if isinstance(record, Event)]
    assert [e.event.event for e in events] == [
        "admit",
        "admit",
        "ready",
        "seal",
        "open",
        "release",
        "idle",
    ] or {e.event.event for e in events} == {"admit", "ready", "seal", "open", "release", "idle"}
    for event in events:
        assert abs(event.at_s - event.event.t_us / 1e6) <= event.error_s + 1e-5
    lines = [record for record in seen.records if isinstance(record, LogLine)]
    release = next(e for e in events if e.event.event == "release")
    assert all(
        line.read_s >= release.at_s - release.error_s for line in lines if "stop processing" in line.line
    )
    phases = summarize(seen.account)["servers"][0]["phases"]
    assert phases["generate"]["intervals"] == 1
    assert phases["generate"]["seconds"] > 0


def test_without_counters_the_doubt_is_told(engine: EngineFactory, watching: Watching) -> None:
    """Short tasks with cached prompts: generated tokens exact, prompt tokens between two numbers."""
    server = engine("llama", "drain", ARGS)
    before = counted(server)
    with watching([url(server)], interval_s=0.5, counters=False) as seen:
        seen.wait_samples()
        short_load(server, 60)
        server.wait_idle()
        seen.wait_samples()
    after = counted(server)
    found = summarize(seen.account)["servers"][0]
    assert found["generated_tokens"] == after[1] - before[1]
    computed = after[0] - before[0]
    assert found["prompt_tokens"] <= computed <= found["prompt_tokens"] + found["prompt_tokens_unsure"]
    assert found["prompt_tokens_unsure"] > 0
    assert found["prompt_from"] == ["transitions"]


async def test_lost_transitions_are_named(engine: EngineFactory) -> None:
    """More transitions than the engine keeps, between two samples: when, how many, and no token invented."""
    server = engine("llama", "drain", ARGS)
    target = parse_target(url(server))
    header = begin([target], [], 0.1)
    account = Account(header)
    before = counted(server)
    client = EngineClient(target.base)
    sampler = Sampler(
        *(0, Asker(target, client, monotonic, 10.0)),
        clock=monotonic, started_s=0.0, interval_s=0.1, counters=True, emit=account.add,
    )  # fmt: skip
    try:
        await sampler._sample()
        for number in range(40):
            await asyncio.to_thread(server.complete, [words(2, number)] * 8, 1)
        after = counted(server)
        await sampler._sample()
    finally:
        await client.close()
    account.close()
    found = summarize(account)["servers"][0]
    assert found["events_lost"] == found["lost"][0]["events"] > 0
    assert found["lost"][0]["begin_s"] < found["lost"][0]["end_s"]
    assert found["generated_tokens"] == after[1] - before[1]
    assert found["prompt_tokens"] == after[0] - before[0]
    assert found["generated_from"] == ["counters"]


def test_a_stock_engine_is_watched_gently_and_said_to_be_one(
    stock: EngineFactory, watching: Watching
) -> None:
    """No phases: counters give the numbers; asked more often, it would not notice clients that left."""
    server = stock("llama-mid", ARGS)
    before = counted(server)
    with watching([url(server)]) as seen:
        seen.wait_samples(1)
        mixed_load(server, 1, 4)
        cancelled_load(server, 2)
        seen.wait_samples(2)
    after = counted(server)
    found = summarize(seen.account)["servers"][0]
    assert not found["native"]
    assert any("no phases" in note for note in found["notes"])
    assert (found["prompt_tokens"], found["generated_tokens"]) == (after[0] - before[0], after[1] - before[1])
    samples = seen.samples()
    asked = [b.asked_s - a.answered_s for a, b in zip(samples, samples[1:], strict=False)]
    assert min(asked) >= STOCK_INTERVAL_S - 0.05


def test_a_restart_is_a_gap_and_a_new_run(engine_binary: Path, tmp_path: Path, watching: Watching) -> None:
    """Said to be gone, found again at the same port, and nothing is counted in between."""
    args = ("-np", "4", "-c", "4096", *ARGS)
    with (
        held_port() as port,
        Server(engine_binary, zoo("llama"), (*args, "--port", str(port)), tmp_path / "1") as first,
        watching([url(first)]) as seen,
    ):
        seen.wait_samples()
        first.complete(words(20), 5)
        seen.wait_samples()
        first.stop()
        seen.wait_state(ServerState.GONE)
        second = Server(engine_binary, zoo("llama"), (*args, "--port", str(port)), tmp_path / "2")
        with second:
            seen.wait_state(ServerState.UP)
            second.complete(words(20), 7)
            second.wait_idle()
            seen.wait_samples()
            found = counted(second)
    runs = sorted({sample.run for sample in seen.samples()})
    assert runs == [1, 2]
    summary = summarize(seen.account)
    gap = summary["gaps"][0]
    assert not gap["tokens_counted"]
    assert "gone" in gap["why"]
    assert summary["servers"][0]["runs"] == 2
    assert summary["servers"][0]["generated_tokens"] == 5 + found[1]
    assert summary["combined"]["broken"]


def test_a_silent_engine_is_waited_for_without_losing_count(
    engine: EngineFactory, watching: Watching
) -> None:
    """A stopped process answers nothing; when it goes on, its tokens are all there, and the silence is named."""
    server = engine("llama-mid", "drain", ARGS)
    before = counted(server)
    with watching([url(server)], timeout_s=0.5) as seen:
        seen.wait_samples()
        stream = server.stream(words(50), 60)
        stream.wait_token()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            seen.wait_state(ServerState.SILENT)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        stream.ok()
        seen.wait_state(ServerState.UP)
        server.wait_idle()
        seen.wait_samples()
    after = counted(server)
    summary = summarize(seen.account)
    assert {sample.run for sample in seen.samples()} == {1}
    assert summary["servers"][0]["generated_tokens"] == after[1] - before[1]
    assert summary["servers"][0]["prompt_tokens"] == after[0] - before[0]
    assert [gap["tokens_counted"] for gap in summary["gaps"]] == [True] * len(summary["gaps"])
    assert any("silent" in gap["why"] for gap in summary["gaps"])


def test_samples_know_their_skew(engine: EngineFactory, watching: Watching) -> None:
    """Each sample has the begin and the end of its request, and the engine's own time lies between them."""
    server = engine("llama", "drain", ARGS)
    with watching([url(server)], interval_s=0.02) as seen:
        seen.wait_samples(20)
    for sample in seen.samples():
        assert isinstance(sample, Sample)
        assert sample.report.engine_us is not None
        assert sample.asked_s - 1e-5 <= sample.report.engine_us / 1e6 <= sample.answered_s + 1e-5
