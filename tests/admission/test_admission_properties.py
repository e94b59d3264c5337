"""Random histories against rules that may never break, with a model of their own.

`ADMISSION_EXAMPLES` sets the number of histories.
"""

import os

import pytest
from admission_kit import backend, spec
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.admission.core import step
from proxy.admission.events import (
    ArmTimer,
    Arrived,
    BackendDown,
    BackendReady,
    Cancelled,
    Configured,
    Ended,
    Finished,
    FirstByte,
    GateSet,
    Granted,
    Load,
    LoadFailed,
    ModelEnded,
    Released,
    Seen,
    ShutDown,
    Tick,
)
from proxy.admission.records import Limits, Mirror, ModelLimits
from proxy.admission.state import State
from proxy.admission.views import broken_rules, model_view, ticket_views
from proxy.errors import ErrorCode, ProxyError
from proxy.types import (
    AdminState,
    EngineInfo,
    MemberState,
    Outcome,
    PhasePolicy,
    SlotView,
    Snapshot,
    TicketState,
)

MODELS = ("m", "o")
SLOTS = {"m": 4, "o": 2}
PATIENCE = 5.0
LIMITS = Limits(
    max_queue=12,
    max_queued_bytes=500,
    queue_timeout_s=40.0,
    gate_hold_max_s=30.0,
    wide_patience_s=PATIENCE,
    stale_after_s=3.0,
    models={model: ModelLimits(load_timeout_s=50.0) for model in MODELS},
)

models = st.sampled_from(MODELS)
tasks = st.sampled_from((1, 1, 1, 1, 1, 0, 2, 3, 4, 9))


class Histories(RuleBasedStateMachine):
    """Arrivals, endings, crashes, gates, honest and lying snapshots, and time, in any order."""

    def __init__(self):
        super().__init__()
        self.now = 50.0
        self.state = State()
        self.counter = 0
        self.specs = {}
        self.outcomes = {}
        self.grants = {}
        self.ended = set()
        self.generation = dict.fromkeys(MODELS, 0)
        self.up = dict.fromkeys(MODELS, False)
        self.policy = {}
        self.armed = None
        self.past_tags = []
        self.cancelled = {}
        self.shown_keys = set()
        self.post(Configured(LIMITS))

    @initialize(policy=st.sampled_from(list(PhasePolicy)), up=st.sampled_from((MODELS, MODELS, ("m",), ())))
    def choose(self, policy, up):
        self.policy = dict.fromkeys(MODELS, policy)
        for model in up:
            self.ready(model, stale=False)

    # --- driving ----------------------------------------------------------------------------------

    def post(self, event):
        arrived_before = dict(self.order())
        cancelling = {name: at for name, at in self.cancelled.items() if name in self.state.tickets}
        effects = step(self.state, event, self.now)
        for name, at in cancelling.items():
            if name not in self.state.tickets:
                self.check_evidence(name, at, event)
        for effect in effects:
            match effect:
                case Granted(ticket, grant):
                    assert ticket not in self.grants, "granted twice"
                    assert ticket not in self.outcomes, "granted after its end"
                    assert grant.key.generation == self.generation[grant.key.model], "granted to the dead"
                    self.grants[ticket] = grant
                    self.past_tags.append(grant.tag)
                    self.check_order(ticket, arrived_before)
                case Ended(ticket):
                    assert ticket not in self.ended, "ended twice"
                    self.ended.add(ticket)
                case Finished(ending):
                    assert ending.id not in self.outcomes, "two outcomes"
                    self.outcomes[ending.id] = ending.outcome
                case ArmTimer(at):
                    assert at is None or at > self.now, "a timer in the past would spin"
                    self.armed = at
                case Load(model):
                    assert not self.up[model], "load of a ready model"
                case _:
                    pass
        return effects

    def check_evidence(self, name, cancelled_at, event):
        """A cancelling grant leaves the books on evidence, or with its engine; never by age."""
        match event:
            case Seen(snapshot):
                assert snapshot.asked_at > cancelled_at or self.never_seen(name)
                if snapshot.native and not self.never_seen(name):
                    assert self.grants[name].tag not in {slot.tag for slot in snapshot.slots if slot.busy}
            case BackendDown() | BackendReady() | ModelEnded():
                pass
            case _:
                assert self.never_seen(name), f"{name} was dropped by {event}"

    def never_seen(self, name):
        return self.grants[name].key not in self.shown_keys

    def order(self):
        """Rank of each waiting ticket: priority, then arrival."""
        waiting = [entry for entry in self.state.tickets.values() if entry.state is TicketState.QUEUED]
        return {e.spec.id: (-e.spec.priority, e.number) for e in waiting}

    def cost(self, ticket):
        one = self.specs[ticket]
        slots = SLOTS[one.model]
        return 0 if one.n > slots else min(one.tasks, slots)

    def check_order(self, ticket, before):
        """Nobody overtakes: whoever still waits with a better rank is a wide ticket within its patience."""
        if self.cost(ticket) == 0:
            return
        mine = self.state.tickets[ticket]
        rank = (-mine.spec.priority, mine.number)
        for other, other_rank in self.order().items():
            entry = self.state.tickets[other]
            if entry.spec.model != mine.spec.model or other_rank > rank:
                continue
            assert entry.spec.tasks > SLOTS[entry.spec.model] >= entry.spec.n, f"{ticket} overtook {other}"
            waited = 0.0 if entry.wide_since is None else self.now - entry.wide_since
            assert waited < PATIENCE, f"{ticket} overtook {other}, whose patience is over"

    def known(self, index):
        assume(self.specs)
        names = list(self.specs)
        return names[index % len(names)]

    # --- what may happen --------------------------------------------------------------------------

    @rule(
        model=models,
        tasks=tasks,
        n=st.sampled_from((1, 1, 1, 2, 5)),
        priority=st.sampled_from((0, 0, 0, 10, -10)),
        size=st.sampled_from((1, 10, 90)),
        cap=st.sampled_from((None, None, 2)),
        may_load=st.sampled_from((True, True, True, False)),
    )
    def arrive(self, model, tasks, n, priority, size, cap, may_load):
        self.counter += 1
        name = f"t{self.counter}"
        if n > 1:
            tasks = max(tasks, 1) * n
        more = {"body_bytes": size, "max_queue": cap, "may_load": may_load, "n": n}
        self.specs[name] = spec(name, tasks, priority, model=model, key=f"k{cap}", **more)
        self.post(Arrived(self.specs[name]))

    @rule(index=st.integers(0, 200), upstream_open=st.booleans(), outcome=st.sampled_from(list(Outcome)))
    def release(self, index, upstream_open, outcome):
        """Anybody's release, at any time, again and again."""
        self.let_go(self.known(index), upstream_open, outcome)

    @rule(pick=st.integers(0, 30), upstream_open=st.booleans())
    def finish(self, pick, upstream_open):
        """The release of a ticket that holds capacity."""
        running = [name for name, entry in self.state.tickets.items() if entry.grant is not None]
        assume(running)
        outcome = Outcome.CANCELLED if upstream_open else Outcome.COMPLETED
        self.let_go(running[pick % len(running)], upstream_open, outcome)

    def let_go(self, name, upstream_open, outcome):
        over = name not in self.state.tickets
        before = [model_view(self.state, model, self.now).charged for model in MODELS]
        self.post(Released(name, outcome, upstream_open=upstream_open))
        left = self.state.tickets.get(name)
        if left is not None and upstream_open:
            assert left.state is TicketState.CANCELLING
            self.cancelled.setdefault(name, self.now)
        if over:
            assert before == [model_view(self.state, model, self.now).charged for model in MODELS]

    @rule(index=st.integers(0, 200))
    def first_byte(self, index):
        self.post(FirstByte(self.known(index)))

    @rule(
        kind=st.sampled_from(
            ("cancel", "ready", "down", "failed", "gate", "gate", "open", "open", "end", "stop")
        ),
        luck=st.integers(0, 3),
        model=models,
        index=st.integers(0, 200),
        admin=st.sampled_from(list(AdminState)),
        mode=st.sampled_from(("hold", "reject")),
        stale=st.booleans(),
    )
    def trouble(self, kind, luck, model, index, admin, mode, stale):
        """What operators and crashes do; one rule, so that most of a history is ordinary service."""
        match kind:
            case "cancel":
                self.post(Cancelled(self.known(index), ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "x")))
            case "ready":
                self.ready(model, stale=stale)
            case "down":
                self.up[model] = self.up[model] and stale
                key = backend(self.generation[model] - int(stale), model=model)
                self.post(BackendDown(key, ProxyError(ErrorCode.UPSTREAM_ERROR, "x")))
            case "failed":
                self.post(LoadFailed(model, ProxyError(ErrorCode.MODEL_LOAD_FAILED, "x")))
            case "gate":
                self.post(GateSet(model, admin, "why", mode))
            case "open":
                self.post(GateSet(model, AdminState.ENABLED))
                if not self.up[model]:
                    self.ready(model, stale=False)
            case "end":
                self.up[model] = False
                self.post(ModelEnded(model, ProxyError(ErrorCode.MODEL_UNLOADED, "x")))
                assert not [v for v in ticket_views(self.state, self.now) if v.model == model]
            case "stop" if luck == 0:
                self.post(ShutDown(ProxyError(ErrorCode.SHUTTING_DOWN, "x"), cut=stale))

    def ready(self, model, *, stale):
        if not stale:
            self.generation[model] += 1
            self.up[model] = True
        generation = self.generation[model] - int(stale)
        info = EngineInfo(SLOTS[model], 4096, self.policy[model])
        self.post(BackendReady(backend(generation, model=model), info))

    @rule(
        model=models, native=st.booleans(), member=st.sampled_from(list(MemberState)), keep=st.integers(0, 5)
    )
    def look(self, model, native, member, keep):
        """An honest snapshot: slots of tickets that are charged, some of the cancelled ones gone."""
        mine = [e for e in self.state.tickets.values() if e.grant is not None and e.spec.model == model]
        live = [e.grant.tag for e in mine if e.state is not TicketState.CANCELLING and e.cost]
        gone = [e.grant.tag for e in mine if e.state is TicketState.CANCELLING]
        self.now += 0.05
        self.show(model, [(tag, member) for tag in (live + gone[:keep])], native)

    @rule(
        model=models,
        native=st.booleans(),
        back=st.integers(0, 1),
        age=st.sampled_from((0.0, 0.0, 0.01, 1.0, 6.0)),
        picks=st.lists(st.tuples(st.integers(-3, 60), st.sampled_from(list(MemberState))), max_size=4),
    )
    def see(self, model, native, back, age, picks):
        """A snapshot with slots of tickets of any time and of strangers, honest or not."""
        busy = []
        for pick, member in picks:
            past = self.past_tags
            busy.append((past[-1 - pick % len(past)] if pick >= 0 and past else f"x{pick}", member))
        self.show(model, busy, native, back, age)

    def show(self, model, busy, native, back=0, age=0.0):
        shown = [
            SlotView(index, True, tag=tag if native else "", member=member if native else MemberState.NONE)
            for index, (tag, member) in enumerate(busy[: SLOTS[model]])
        ]
        shown += [SlotView(index, False) for index in range(len(shown), SLOTS[model])]
        key = backend(self.generation[model] - back, model=model)
        self.post(Seen(Snapshot(key, self.now - age, self.now, tuple(shown), native=native)))
        self.shown_keys.add(key)

    @rule(seconds=st.sampled_from((0.0, 0.01, 0.5, 2.0, 4.0, 20.0)))
    def wait(self, seconds):
        end = self.now + seconds
        while self.armed is not None and self.armed <= end:
            self.now = self.armed
            self.post(Tick())
        self.now = end

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def own_rules(self):
        assert broken_rules(self.state, self.now) == []

    @invariant()
    def live_grants_fit(self):
        """By the test's own count: grants without an outcome never cost more than slots (+ standby)."""
        for model in MODELS:
            live = sum(
                self.cost(ticket)
                for ticket, grant in self.grants.items()
                if ticket not in self.outcomes and grant.key == backend(self.generation[model], model=model)
            )
            standby = self.policy and self.policy[model] in (PhasePolicy.DRAIN, PhasePolicy.YIELD)
            assert live <= SLOTS[model] + (1 if standby else 0)

    @invariant()
    def ledger_is_the_living(self):
        charged = sum(
            model_view(self.state, model, self.now).backends[0].grants
            for model in MODELS
            if self.books(model)
        )
        granted = [entry for entry in self.state.tickets.values() if entry.grant is not None]
        assert charged == len(granted)
        assert {e.spec.id for e in granted} == set(self.state.tickets) & set(self.grants)

    @invariant()
    def living_or_one_outcome(self):
        for name in self.specs:
            entry = self.state.tickets.get(name)
            if entry is None:
                assert name in self.outcomes, f"{name} vanished"
            elif name in self.outcomes:
                assert entry.state is TicketState.CANCELLING

    @invariant()
    def nobody_waits_beside_free_capacity(self):
        """No lost wake-up: with an open gate and a ready engine the first in line does not fit."""
        for model in MODELS:
            room = self.state.rooms.get(model)
            if room is None or not room.queue or not room.books or room.admin is not AdminState.ENABLED:
                continue
            first = min(room.queue, key=lambda entry: (-entry.spec.priority, entry.number))
            ledger = next(iter(room.books.values()))
            wide = first.spec.tasks > SLOTS[model] >= first.spec.n
            assert not ledger.capacity(self.now).fits(self.cost(first.spec.id), wide)

    @invariant()
    def someone_works_on_a_load(self):
        """Who waits for a model that is not ready has asked for it."""
        for room in self.state.rooms.values():
            if room.queue and not room.books and room.admin is AdminState.ENABLED:
                assert room.load_asked

    def books(self, model):
        return model in self.state.rooms and self.state.rooms[model].books

    def teardown(self):
        """Everybody leaves, the engines go idle: nothing is left, and each ticket had one outcome."""
        for name in list(self.state.tickets):
            self.post(Released(name, Outcome.CANCELLED, upstream_open=True))
        self.now += 1.0
        for model in MODELS:
            idle = tuple(SlotView(index, False) for index in range(SLOTS[model]))
            key = backend(self.generation[model], model=model)
            self.post(Seen(Snapshot(key, self.now, self.now, idle, native=True)))
        assert self.state.tickets == {}
        assert set(self.outcomes) == set(self.specs)
        for model in MODELS:
            view = model_view(self.state, model, self.now)
            assert (view.charged, view.queued) == (0, 0)
            assert all(book.foreign == 0 and book.mirror is Mirror.NATIVE for book in view.backends)
        assert self.armed is None


EXAMPLES = int(os.environ.get("ADMISSION_EXAMPLES", "100"))

Histories.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=80,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHistories = pytest.mark.timeout(300 + EXAMPLES)(Histories.TestCase)
