"""Members that leave or fail, in every state: the others end as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.conftest import EngineFactory, OracleFactory
from tests.engine.enginekit.check import assert_equal_tokens
from tests.engine.enginekit.http import Exchange
from tests.engine.enginekit.oracle import Reference
from tests.engine.enginekit.phase import Story
from tests.engine.enginekit.prompts import words
from tests.engine.enginekit.server import EXACT, Server, greedy
from tests.engine.enginekit.waiting import eventually

SLOW = "llama-mid"
POLICIES = ("drain", "yield")
LONG = 1300  # words: some seconds of prefill, so that a cancel is seen within it
LONGER = (LONG, 2 * LONG, 4 * LONG, 6 * LONG)  # where that was too short: a leave is seen once a second
LASTING = 12_000  # tokens: of what goes on until the test has seen enough, and is cut then
CONTEXT, ALONE = 65536, 16384  # of four slots, and of the one that gives the reference


def _start(engine: EngineFactory, policy: str, *more: str, slots: int = 4) -> Server:
    args = (*EXACT, "-b", "128", "--phase-yield-ms", "600000", *more)
    return engine(SLOW, policy, args, slots=slots, context=CONTEXT)


def _reference(oracle: OracleFactory, count: int, n_predict: int, first_seed: int) -> Reference:
    prompts = (words(count, seed) for seed in range(first_seed, first_seed + 50))
    return oracle(SLOW, context=ALONE).steady(prompts, 1, n_predict)[0]


def _run(server: Server, reference: Reference, tag: str, **more: object) -> Exchange:
    body = {**reference.body, "stream": True, "return_progress": True, **more}
    return server.start(body, tag=tag)


def _leave(server: Server, exchange: Exchange, tag: str) -> None:
    """Cut the connection and wait until the engine has released the slot."""
    exchange.close()
    eventually(lambda: Story(server.events()).all("release", tag), f"{tag} is released", timeout_s=240)


def _happened(server: Server, event: str, tag: str) -> None:
    """Wait for it by the record, which keeps what a look at the slots would have missed."""
    eventually(lambda: Story(server.events()).all(event, tag), f"{event} of {tag}", timeout_s=240)


def _in_time(attempt: Callable[[int], bool]) -> None:
    """Try with longer and longer prompts until the client left within the prefill; the rest must hold each time."""
    assert any(map(attempt, LONGER)), "left too late each time: this shows nothing"


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_a_waiting_member_leaves(engine: EngineFactory, oracle: OracleFactory, policy: str) -> None:
    """Ready and gone before the opening: the long prompt ends and its answer is right."""
    server = _start(engine, policy)

    def attempt(count: int) -> bool:
        wanted = _reference(oracle, count, 20, 100)
        before = server.events()[-1:]
        long = _run(server, wanted, f"long{count}")
        long.wait_progress()
        short = server.stream(words(5, 1), LASTING, tag=f"short{count}")
        _happened(server, "ready", f"short{count}")
        _leave(server, short, f"short{count}")
        long.ok()
        assert_equal_tokens(long.token_ids, wanted.tokens, "the long answer")
        story = Story(server.events(before[0].seq if before else 0))
        if story.seq("release", f"short{count}") > story.seq("open"):
            return False
        assert not any(e.is_token for e in short.events)
        return True

    _in_time(attempt)


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_the_last_prefilling_member_leaves(
    engine: EngineFactory, oracle: OracleFactory, policy: str
) -> None:
    """Whoever waited for it starts at once, with the right answer."""
    wanted = _reference(oracle, 5, 60, 200)
    server = _start(engine, policy)

    def attempt(count: int) -> bool:
        before = server.events()[-1:]
        long = server.stream(words(count), LASTING, tag=f"long{count}")
        long.wait_progress()
        short = _run(server, wanted, f"short{count}")
        _happened(server, "ready", f"short{count}")
        _leave(server, long, f"long{count}")
        short.ok()
        assert_equal_tokens(short.token_ids, wanted.tokens, "the short answer")
        story = Story(server.events(before[0].seq if before else 0))
        if story.all("ready", f"long{count}"):
            return False
        assert story.seq("release", f"long{count}") < story.seq("open")
        return True

    _in_time(attempt)


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_a_decoding_member_leaves(engine: EngineFactory, oracle: OracleFactory, policy: str) -> None:
    """Its companion's answer is unchanged."""
    wanted = _reference(oracle, 12, 400, 300)
    server = _start(engine, policy)
    pair = server.stream([words(9, 1), words(30, 2)], LASTING, tag="pair")
    stays = _run(server, wanted, "stays")
    pair.wait_token()
    _leave(server, pair, "pair")
    stays.ok()
    assert_equal_tokens(stays.token_ids, wanted.tokens, "the companion's answer")


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_a_queued_request_leaves(engine: EngineFactory, oracle: OracleFactory, policy: str) -> None:
    """Nobody notices, and nothing of its prompt was processed."""
    wanted = _reference(oracle, 12, 800, 400)
    server = _start(engine, policy)
    stays = _run(server, wanted, "stays", n_predict=LASTING)
    stays.wait_token()
    late = server.stream(words(40, 1), 20, tag="late")
    _happened(server, "admit", "late")
    _leave(server, late, "late")
    eventually(lambda: stays.done or len(stays.token_ids) > len(wanted.tokens), "the running answer goes on")
    assert_equal_tokens(stays.token_ids[: len(wanted.tokens)], wanted.tokens, "the running answer")
    _leave(server, stays, "stays")
    story = Story(server.events())
    assert story.first("release", "late").seq < story.first("release", "stays").seq
    assert not story.all("ready", "late")
    slot = story.slot("late")
    assert not any(slot in view.slots for view in server.trace())


def test_contract_a_paused_member_leaves(engine: EngineFactory, oracle: OracleFactory) -> None:
    """The prompt it was paused for is processed to its end, and answered right."""
    args = (*EXACT, "-b", "128", "--phase-yield-ms", "1")
    server = engine(SLOW, "yield", args, context=CONTEXT)

    def attempt(count: int) -> bool:
        wanted = _reference(oracle, count, 20, 100)
        tag = f"paused{count}"
        paused = server.stream(words(9, 1), LASTING, tag=tag)
        paused.wait_token()
        long = _run(server, wanted, f"long{count}")
        _happened(server, "pause", tag)
        _leave(server, paused, tag)
        long.ok()
        assert_equal_tokens(long.token_ids, wanted.tokens, "the long answer")
        story = Story(server.events())
        if story.seq("release", tag) > story.seq("ready", f"long{count}"):
            return False
        assert not story.all("resume", tag)
        return True

    _in_time(attempt)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_contract_a_parent_with_children_leaves(
    engine: EngineFactory, oracle: OracleFactory, policy: str, moment: str
) -> None:
    """All its slots are freed; a companion of the same cohort is answered right."""
    wanted = _reference(oracle, 12, 250, 500)
    server = _start(engine, policy)
    parent = server.stream(words(LONG), LASTING, tag="family", n_cmpl=3)
    parent.wait_progress()
    stays = _run(server, wanted, "stays")
    if moment == "decode":
        parent.wait_token()
    else:
        _happened(server, "ready", "stays")
    parent.close()
    stays.ok()
    assert_equal_tokens(stays.token_ids, wanted.tokens, "the companion's answer")
    server.wait_idle()
    story = Story(server.events())
    assert len(story.all("admit", "family")) >= 3
    assert len(story.all("release", "family")) == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moment", ["ready", "prefill", "generate"])
def test_contract_a_client_without_stream_leaves(
    engine: EngineFactory, oracle: OracleFactory, policy: str, moment: str
) -> None:
    """The same as a stream: its slot is freed, the others go on."""
    wanted = _reference(oracle, 12, 200, 600)
    server = _start(engine, policy)
    long = server.start(greedy(words(LONG), LASTING), tag="long")
    eventually(lambda: any(v.prompt for v in server.trace()), "the long prompt began")
    short = server.start(greedy(words(5, 1), LASTING), tag="short")
    stays = _run(server, wanted, "stays")
    # from the record: a busy machine may look away while they are
    for tag in ("short", "stays"):
        eventually(lambda tag=tag: Story(server.events()).all("ready", tag), f"{tag} is ready", timeout_s=240)
    leaver = {"ready": short, "prefill": long, "generate": long}[moment]
    if moment == "generate":
        stays.wait_token()
    leaver.close()
    stays.ok()
    assert_equal_tokens(stays.token_ids, wanted.tokens, "the companion's answer")
    server.cut_all()
    server.wait_idle()


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_everybody_leaves(engine: EngineFactory, policy: str) -> None:
    """The engine is idle again, and the next request is served as the first."""
    server = _start(engine, policy)
    crowd = [server.stream(words(LONG, seed), 500, tag=f"crowd{seed}") for seed in range(5)]
    crowd[0].wait_progress()
    for exchange in crowd:
        exchange.close()
    server.wait_idle()
    assert server.phase()["engine"] == "idle"
    assert server.complete(words(5), 5)["tokens_predicted"] == 5


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_a_doomed_request_fails_at_once(engine: EngineFactory, policy: str) -> None:
    """A prompt beyond the context is refused while others run, not after they drained."""
    server = _start(engine, policy)
    running = server.stream(words(9, 1), LASTING, tag="running")
    running.wait_token()
    answer = server.post("/completion", greedy(words(LASTING), 5))
    assert answer.status == 400, answer.body
    assert answer.json()["error"]["type"] == "exceed_context_size_error"
    assert not running.done
    assert server.members().count("generate") == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_contract_an_error_in_one_member_spares_the_others(
    engine: EngineFactory, oracle: OracleFactory, policy: str
) -> None:
    """One prompt of an array is too long: that request fails, its neighbours do not."""
    wanted = _reference(oracle, 12, 200, 700)
    server = _start(engine, policy)
    stays = _run(server, wanted, "stays")
    broken = server.start(greedy([words(10, 1), words(LASTING, 2)], 20), tag="broken").finish()
    assert broken.status == 400, broken.describe()
    stays.ok()
    assert_equal_tokens(stays.token_ids, wanted.tokens, "the neighbour's answer")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("grammar", ['root ::= ""', "root ::= [\\x00]"], ids=["empty", "no-token"])
def test_contract_a_failure_at_the_opening_spares_the_others(
    engine: EngineFactory, oracle: OracleFactory, policy: str, grammar: str
) -> None:
    """A first token that cannot be sampled ends its request alone, never the process."""
    wanted = _reference(oracle, 12, 100, 800)
    # the window closes when both slots are taken
    server = _start(engine, policy, "--phase-admit-ms", "20000", slots=2)
    broken = server.start(greedy(words(5), 20, grammar=grammar, ignore_eos=False), tag="broken")
    stays = _run(server, wanted, "stays")
    broken.finish()
    stays.ok()
    assert_equal_tokens(stays.token_ids, wanted.tokens, "the companion's answer")
    story = Story(server.events())
    assert story.cohort("stays") == story.first("release", "broken").cohort
