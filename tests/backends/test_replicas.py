"""Several real engines behind one name: they join, are lost, leave and come back, each for itself."""

import asyncio
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import pytest

from proxy.admission import TicketSpec
from proxy.backends import names, reach, replicas
from proxy.backends.names import LookupFailedError, Resolver
from proxy.errors import ErrorCode, ProxyError
from proxy.types import Outcome
from tests.backends.conftest import Collect, completion, eventually
from tests.backends.test_control import World
from tests.support.ports import held_port

pytestmark = pytest.mark.engine
SOON_S = 60.0
"""For what takes a second on a machine that does nothing else."""


class Engines:
    """Real llama-servers on addresses of the loopback network that share a port, as those behind a name do."""

    def __init__(self, binary, model, log, port):
        self.port = port
        self.name = f"engines.test:{self.port}"
        self.there: list[int] = []
        self.fails = ""
        self.lookups = 0
        self._command = [str(binary), "-m", str(model), "--port", str(self.port)]
        self._command += ["-c", "32768", "-np", "2", "-t", "1", "--no-warmup"]
        self._log = log
        self._running: dict[int, subprocess.Popen] = {}

    def address(self, number):
        return f"127.0.0.{number}:{self.port}"

    async def lookup(self, name):
        assert name == self.name
        self.lookups += 1
        if self.fails:
            raise LookupFailedError(self.fails)
        return tuple(self.address(number) for number in self.there)

    async def start(self, *numbers, more=("--api-key", "k")):
        """Start these, wait until they serve, and put them behind the name."""
        for number in numbers:
            with self._log.open("ab") as out:
                command = [*self._command, "--host", f"127.0.0.{number}", *more]
                self._running[number] = subprocess.Popen(command, stdout=out, stderr=out)
        for number in numbers:
            await eventually(lambda number=number: self._serves(number), SOON_S)
        self.there += [number for number in numbers if number not in self.there]

    def kill(self, number, how=signal.SIGKILL):
        process = self._running.pop(number)
        process.send_signal(how)
        process.wait(SOON_S)

    def end(self):
        for number in list(self._running):
            self.kill(number)

    def _serves(self, number):
        with suppress(OSError), urllib.request.urlopen(f"http://{self.address(number)}/health", timeout=2):
            return True
        return False


@pytest.fixture
def engines(engine_binary, mid_model, tmp_path, monkeypatch) -> Iterator[Engines]:
    monkeypatch.setattr(replicas, "LOOK_S", 0.1)
    monkeypatch.setattr(replicas, "REST_S", 0.3)
    with held_port("127.0.0.2") as port:
        made = Engines(engine_binary, mid_model, tmp_path / "engines.log", port)
        yield made
        made.end()


@pytest.fixture
def named(fleets, engines):
    """A fleet with one model behind the engines' name."""

    def make(**more):
        model = {"dns": engines.name, "upstream_key": "k", "restart": {"first_s": 0.2}} | more
        return fleets({"m": model}, lookup=engines.lookup)

    return make


class Held(Collect):
    """A client that reads its first part only, until it may go on."""

    def __init__(self):
        super().__init__()
        self.go_on = asyncio.Event()

    async def write(self, data):
        await super().write(data)
        await self.go_on.wait()


def joined(seen):
    """Keys by address of those who serve now."""
    there = {}
    for name, value, _ in seen.calls:
        if name == "ready":
            there[value[0].backend] = value[0]
        elif name == "down" and there.get(value[0].backend) == value[0]:
            del there[value[0].backend]
    return there


async def ask(fleet, key, tokens=3):
    exchange, sink = await fleet.upstream(key).open(completion(tokens)), Collect()
    try:
        await exchange.attach(sink)
    finally:
        exchange.close()
    return sink.body


async def test_every_engine_behind_the_name_serves(named, engines):
    await engines.start(2, 3)
    fleet, seen = named()
    info = await asyncio.wait_for(fleet.load("m"), SOON_S)
    assert info.slots == 2 and fleet.status("m").kind == "dns" and fleet.status("m").state == "ready"
    await eventually(lambda: len(joined(seen)) == 2, SOON_S)
    assert set(joined(seen)) == {engines.address(2), engines.address(3)}
    for key in joined(seen).values():
        assert b'"stop":true' in await asyncio.wait_for(ask(fleet, key), SOON_S)
    await eventually(lambda: len(fleet.snapshots("m")) == 2, SOON_S)
    assert {s.key for s in fleet.snapshots("m")} == set(joined(seen).values())
    await engines.start(4)
    await eventually(lambda: len(joined(seen)) == 3, SOON_S)
    keys = joined(seen)
    assert len({key.generation for key in keys.values()}) == 3
    running = [asyncio.create_task(ask(fleet, key, 20000)) for key in keys.values()]
    await eventually(lambda: fleet.status("m").exchanges == 3, SOON_S)
    report = await asyncio.wait_for(fleet.unload("m", force=True), SOON_S)
    assert report.clean and not joined(seen) and fleet.snapshots("m") == ()
    assert {type(failed).__name__ for failed in await asyncio.gather(*running, return_exceptions=True)} == {
        "UpstreamDied"
    }
    # and again: nobody is taken for an older one
    await asyncio.wait_for(fleet.load("m"), SOON_S)
    await eventually(lambda: len(joined(seen)) == 3, SOON_S)
    assert all(joined(seen)[address].generation > key.generation for address, key in keys.items())


async def test_one_that_is_lost_takes_only_its_own_requests(named, engines):
    await engines.start(2, 3)
    fleet, seen = named()
    await asyncio.wait_for(fleet.load("m"), SOON_S)
    await eventually(lambda: len(joined(seen)) == 2, SOON_S)
    before = joined(seen)
    other = asyncio.create_task(ask(fleet, before[engines.address(2)], 2000))
    engines.kill(3)
    await eventually(lambda: engines.address(3) not in joined(seen), SOON_S)
    [(key, error)] = seen.of("down")
    assert key == before[engines.address(3)] and f"at {engines.address(3)}" in error.message
    assert fleet.status("m").state == "ready"
    assert b'"stop":true' in await asyncio.wait_for(other, SOON_S)
    await engines.start(3)
    again = await eventually(lambda: joined(seen).get(engines.address(3)), SOON_S)
    assert again.generation > key.generation
    assert b'"stop":true' in await asyncio.wait_for(ask(fleet, again), SOON_S)


async def test_the_last_that_is_lost_takes_the_model_until_one_serves_again(named, engines):
    await engines.start(2)
    fleet, seen = named()
    await asyncio.wait_for(fleet.load("m"), SOON_S)
    engines.kill(2)
    await eventually(lambda: ("m", "ready", "failed", "crash") in seen.of("state"), SOON_S)
    assert not joined(seen)
    await engines.start(2)
    await eventually(lambda: fleet.status("m").state == "ready", SOON_S)
    assert b'"stop":true' in await asyncio.wait_for(ask(fleet, joined(seen)[engines.address(2)]), SOON_S)


async def test_one_that_leaves_the_name_finishes_what_it_has(engines, worlds_of_names):
    """With the real admission: nobody is sent there any more, its answer is whole, and then it is let go of."""
    await engines.start(2, 3)
    world = worlds_of_names()
    await asyncio.wait_for(world.fleet.load("m"), SOON_S)
    await eventually(lambda: len(joined(world)) == 2, SOON_S)
    long = [world.client(f"long{number}", n_predict=600) for number in range(2)]
    for one in long:
        one.sink = Held()
    await eventually(lambda: all(one.sink.parts for one in long), SOON_S)
    leaving = joined(world)[engines.address(3)]
    engines.there.remove(3)
    await eventually(lambda: (leaving, True) in world.of("draining"), SOON_S)
    late = [world.client(f"late{number}", n_predict=3) for number in range(6)]
    await asyncio.gather(*(one.task for one in late))
    assert [one.outcome for one in late] == ["completed"] * 6
    assert leaving in joined(world).values() and not any(one.task.done() for one in long)
    granted = [view for view in world.admission.view("m").backends if view.draining]
    assert [view.key for view in granted] == [leaving] and granted[0].charged == 1
    for one in long:
        one.sink.go_on.set()
    await asyncio.wait_for(asyncio.gather(*(one.task for one in long)), SOON_S)
    assert [one.outcome for one in long] == ["completed"] * 2
    assert all(b'"stop":true' in one.sink.body for one in long)
    await eventually(lambda: leaving not in joined(world).values(), SOON_S)
    assert [view.key.backend for view in world.admission.view("m").backends] == [engines.address(2)]
    await eventually(lambda: f'backend="{leaving.backend}"' not in world.metrics.render().decode(), SOON_S)
    # it is wanted again while it serves
    engines.there.append(3)
    await eventually(lambda: len(joined(world)) == 2, SOON_S)


async def test_one_that_leaves_waits_for_who_still_writes_to_a_client(engines, worlds_of_names):
    """The engine is done, the client is slow: its ticket is not ended as that of an engine that went."""
    await engines.start(2, 3)
    world = worlds_of_names()
    await asyncio.wait_for(world.fleet.load("m"), SOON_S)
    await eventually(lambda: len(joined(world)) == 2, SOON_S)
    spec = TicketSpec(
        id="slow", model="m", key="k", priority=0, priority_name="normal", tasks=1,
        stream=True, body_bytes=10, endpoint="/completion",
    )  # fmt: skip
    ticket = world.admission.submit(spec)
    grant = await asyncio.wait_for(ticket.granted(), SOON_S)
    assert b'"stop":true' in await asyncio.wait_for(ask(world.fleet, grant.key), SOON_S)
    engines.there.remove(int(grant.key.backend.split(":")[0].rsplit(".", 1)[1]))
    await eventually(lambda: (grant.key, True) in world.of("draining"), SOON_S)
    count = engines.lookups
    await eventually(lambda: engines.lookups > count + 10, SOON_S)
    assert grant.key in joined(world).values() and not ticket.ended.done()
    ticket.release(Outcome.COMPLETED)
    await eventually(lambda: grant.key not in joined(world).values(), SOON_S)


async def test_who_waits_when_the_last_is_lost_is_told(engines, worlds_of_names, monkeypatch):
    """Its load is asked for again; when nothing serves any more, it ends with that error."""
    monkeypatch.setattr(reach, "REACH_S", 0.5)
    await engines.start(2)
    world = worlds_of_names(restart={"first_s": 0})
    await asyncio.wait_for(world.fleet.load("m"), SOON_S)
    running = [world.client(f"r{number}", n_predict=30000) for number in range(2)]
    await eventually(lambda: all(one.sink.parts for one in running), SOON_S)
    waiting = world.client("waits")
    await eventually(lambda: world.admission.view("m").queued == 1, SOON_S)
    engines.kill(2)
    await asyncio.wait_for(asyncio.gather(waiting.task, *(one.task for one in running)), SOON_S)
    assert [one.outcome for one in running] == ["upstream_error"] * 2
    assert waiting.outcome == "model_load_failed" and "does not answer" in waiting.message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--api-key", "another"), "/props answered 401"),
        (("--api-key", "k", "--no-slots"), "/slots answered 501"),
    ],
    ids=["another key", "no slots"],
)
async def test_one_that_is_no_good_spoils_nothing(named, engines, more, words, capsys):
    """Alone it fails the load with the reason; beside a good one it is left out, which is said once."""
    await engines.start(3, more=more)
    fleet, seen = named()
    with pytest.raises(ProxyError, match=words):
        await asyncio.wait_for(fleet.load("m"), SOON_S)
    await engines.start(2)
    await asyncio.wait_for(fleet.load("m"), SOON_S)
    count = engines.lookups
    await eventually(lambda: engines.lookups > count + 5, SOON_S)
    assert set(joined(seen)) == {engines.address(2)}
    assert capsys.readouterr().out.count("replica refused") == 1


async def test_one_that_is_lost_again_and_again_comes_back_later_and_later(named, engines):
    await engines.start(2, 3)
    fleet, seen = named(restart={"first_s": 600, "max_s": 600})
    await asyncio.wait_for(fleet.load("m"), SOON_S)
    for _ in range(2):
        await eventually(lambda: len(joined(seen)) == 2, SOON_S)
        engines.kill(3)
        await eventually(lambda: len(joined(seen)) == 1, SOON_S)
        await engines.start(3)
    count = engines.lookups
    await eventually(lambda: engines.lookups > count + 10, SOON_S)
    assert len(joined(seen)) == 1, "the second loss in a row is waited for"


async def test_one_that_comes_back_while_it_leaves_just_stays(named, engines, monkeypatch):
    monkeypatch.setattr(replicas, "REST_S", 600.0)
    await engines.start(2, 3)
    fleet, seen = named()
    await asyncio.wait_for(fleet.load("m"), SOON_S)
    await eventually(lambda: len(joined(seen)) == 2, SOON_S)
    key = joined(seen)[engines.address(3)]
    engines.there.remove(3)
    await eventually(lambda: seen.of("draining") == [(key, True)], SOON_S)
    engines.there.append(3)
    await eventually(lambda: seen.of("draining") == [(key, True), (key, False)], SOON_S)
    assert joined(seen)[engines.address(3)] == key and not seen.of("down")


async def test_a_name_that_cannot_be_looked_up_changes_nothing(named, engines):
    await engines.start(2)
    fleet, seen = named()
    await asyncio.wait_for(fleet.load("m"), SOON_S)
    engines.fails = "Temporary failure in name resolution"
    count = engines.lookups
    await eventually(lambda: engines.lookups > count + 3, SOON_S)
    [key] = joined(seen).values()
    assert b'"stop":true' in await asyncio.wait_for(ask(fleet, key), SOON_S)
    assert not seen.of("draining") and not seen.of("down")


async def test_what_is_wrong_with_a_name_is_said(named, engines, monkeypatch):
    monkeypatch.setattr(reach, "REACH_S", 0.5)
    fleet, _ = named()
    for there, fails, words in (
        ([2], "", f"{engines.address(2)} does not answer"),
        ([], "", f"{engines.name} has no address"),
        ([], "engines.test: Name or service not known", "Name or service not known"),
    ):
        engines.there, engines.fails = there, fails
        with pytest.raises(ProxyError) as wrong:
            await asyncio.wait_for(fleet.load("m"), SOON_S)
        assert wrong.value.code is ErrorCode.MODEL_LOAD_FAILED
        assert words in wrong.value.message and "correct dns" in wrong.value.message


async def test_requests_are_spread_over_the_engines(engines, worlds_of_names):
    """Twelve at once on two engines with two slots each: both work, none gets more than its slots."""
    await engines.start(2, 3)
    world = worlds_of_names()
    await asyncio.wait_for(world.fleet.load("m"), SOON_S)
    await eventually(lambda: len(joined(world)) == 2, SOON_S)
    clients = [world.client(f"c{number}", n_predict=100) for number in range(12)]
    most, served = {}, set()
    while not all(one.task.done() for one in clients):
        for view in world.admission.view("m").backends:
            most[view.key.backend] = max(most.get(view.key.backend, 0), view.charged)
            served.add(view.key.backend)
        await asyncio.sleep(0.005)
    assert [one.outcome for one in clients] == ["completed"] * 12
    assert most == {engines.address(2): 2, engines.address(3): 2}
    assert world.admission.broken_rules() == []


@pytest.fixture
async def worlds_of_names(engines):
    made = []

    def make(**more):
        model = {"dns": engines.name, "upstream_key": "k"} | more
        made.append(World({"m": model}, None, lookup=engines.lookup))
        return made[-1]

    yield make
    for world in made:
        world.admission.shutdown(ProxyError(ErrorCode.SHUTTING_DOWN, "over"), cut=True)
        await world.fleet.stop(6)
        world.admission.close()
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


async def test_the_systems_resolver(monkeypatch):
    look_up = Resolver()
    assert await look_up("localhost:80") == ("127.0.0.1:80",)
    assert await look_up("[::1]:81") == ("[::1]:81",)
    with pytest.raises(LookupFailedError, match=r"nobody\.invalid(: | within )"):
        await look_up("nobody.invalid:80")
    with pytest.raises(LookupFailedError, match="x" * 64):
        await look_up("x" * 64 + ".test:80")


async def test_a_resolver_that_hangs_is_asked_once(monkeypatch):
    monkeypatch.setattr(names, "LOOKUP_TIMEOUT_S", 0.05)
    hangs, asked = threading.Event(), []

    def slow(host, port, **_):
        asked.append(host)
        assert hangs.wait(SOON_S)
        return [(socket.AF_INET, None, None, None, ("192.0.2.7", port))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    look_up = Resolver()
    for _ in range(3):
        with pytest.raises(LookupFailedError, match="no answer about far within"):
            await look_up("far:80")
    monkeypatch.setattr(names, "LOOKUP_TIMEOUT_S", SOON_S)
    hangs.set()
    assert await look_up("far:80") == ("192.0.2.7:80",) and len(asked) <= 2
