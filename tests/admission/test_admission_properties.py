"""Random histories against rules that may never break, with a model of their own.

`ADMISSION_EXAMPLES` sets the number of histories.
"""

import os

import pytest
from admission_kit import backend, spec
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.admission.core import step
from proxy.admission.events import (
    ArmTimer,
    Arrived,
    BackendDown,
    BackendReady,
    Cancelled,
    Committed,
    Configured,
    Ended,
    Finished,
    FirstByte,
    GateSet,
    Granted,
    Load,
    LoadFailed,
    ModelEnded,
    Recall,
    Released,
    Reported,
    Requeued,
    Returned,
    Seen,
    ShutDown,
    SwapWait,
    Tick,
)
from proxy.admission.order import line
from proxy.admission.records import Limits, Mirror, ModelLimits
from proxy.admission.state import State
from proxy.admission.views import broken_rules, model_view, ticket_views
from proxy.errors import ErrorCode, ProxyError
from proxy.types import (
    AdminState,
    EngineInfo,
    EnginePhase,
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
AGED_S = 15.0
AGE_EVERY = 3
WEIGHTS = {"k1": 1.0, "k2": 2.0, "k3": 1.0}
LIMITS = Limits(
    max_queue=12,
    max_queued_bytes=500,
    queue_timeout_s=40.0,
    gate_hold_max_s=30.0,
    wide_patience_s=PATIENCE,
    stale_after_s=3.0,
    age_after_s=AGED_S,
    age_every=AGE_EVERY,
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
        self.recalled = {}
        self.recalling = set()
        self.turns = dict.fromkeys(MODELS, 0)
        self.places = {}
        self.shown_keys = set()
        self.post(Configured(LIMITS))

    @initialize(policy=st.sampled_from(list(PhasePolicy)), up=st.sampled_from((MODELS, MODELS, ("m",), ())))
    def choose(self, policy, up):
        self.policy = dict.fromkeys(MODELS, policy)
        for model in up:
            self.ready(model, stale=False)

    # --- driving ----------------------------------------------------------------------------------

    def post(self, event):
        cancelling = {name: at for name, at in self.cancelled.items() if name in self.state.tickets}
        back = {tag: at for tag, at in self.recalled.items() if self.charged(tag)}
        effects = step(self.state, event, self.now)
        for name, at in cancelling.items():
            if name not in self.state.tickets:
                self.check_evidence(self.grants[name], at, event)
        for tag, (grant, at) in back.items():
            if not self.charged(tag):
                self.check_evidence(grant, at, event)
        self.check_order([effect.ticket for effect in effects if isinstance(effect, Granted)])
        for effect in effects:
            match effect:
                case Granted(ticket, grant):
                    assert ticket not in self.grants or self.was_recalled(ticket), "granted twice"
                    assert ticket not in self.outcomes, "granted after its end"
                    assert grant.key.generation == self.generation[grant.key.model], "granted to the dead"
                    assert grant.tag not in self.past_tags, "two grants with one tag"
                    self.grants[ticket] = grant
                    self.past_tags.append(grant.tag)
                case Recall(ticket):
                    assert not self.was_recalled(ticket), "recalled twice"
                    assert self.state.tickets[ticket].state in (
                        TicketState.GRANTED,
                        TicketState.NATIVE_QUEUED,
                    )
                    self.recalling.add(ticket)
                case Returned(ticket):
                    assert ticket in self.recalling
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

    def check_evidence(self, grant, cancelled_at, event):
        """A cancelling grant leaves the books on evidence, or with its engine; never by age."""
        match event:
            case Seen(snapshot):
                assert snapshot.asked_at > cancelled_at or self.never_seen(grant)
                if snapshot.native and not self.never_seen(grant):
                    assert grant.tag not in {slot.tag for slot in snapshot.slots if slot.busy}
            case BackendDown() | BackendReady() | ModelEnded():
                pass
            case _:
                assert self.never_seen(grant), f"{grant} was dropped by {event}"

    def never_seen(self, grant):
        return grant.key not in self.shown_keys

    def charged(self, tag):
        return any(tag in book.charges for room in self.state.rooms.values() for book in room.books.values())

    def was_recalled(self, ticket):
        return any(grant.tag == self.grants[ticket].tag for grant, _ in self.recalled.values())

    def cost(self, ticket):
        one = self.specs[ticket]
        slots = SLOTS[one.model]
        return 0 if one.n > slots else min(one.tasks, slots)

    def check_order(self, granted):
        """Nobody overtakes: class, then the smaller counter, then arrival; by age in its turn.

        The counters at each grant are found backwards from those after the step. Exempt are wide tickets
        within their patience and tickets that take no slot.
        """
        before = {}
        undone = {}
        for ticket in reversed(granted):
            entry = self.state.tickets[ticket]
            undone[entry.account] = undone.get(entry.account, 0.0) + entry.charged / entry.account.weight
            before[ticket] = dict(undone)
        for index, ticket in enumerate(granted):
            entry = self.state.tickets[ticket]
            if self.cost(ticket) == 0:
                continue
            back = before[ticket]
            later = [self.state.tickets[other] for other in granted[index + 1 :]]
            rivals = [e for e in [*self.state.tickets.values(), *later] if self.rival(e, entry, later)]
            self.check_turn(entry, rivals, lambda e, back=back: e.account.counter - back.get(e.account, 0.0))

    def rival(self, other, entry, later):
        """Whether a ticket could have been granted instead: it waited for the same slots, exempt from nothing."""
        spec = other.spec
        waits = other.state is TicketState.QUEUED or other in later
        if other is entry or not waits or spec.model != entry.spec.model or self.cost(spec.id) == 0:
            return False
        wide = spec.tasks > SLOTS[spec.model] >= spec.n
        patient = other.wide_since is None or self.now - other.wide_since < PATIENCE
        return not (wide and patient)

    def check_turn(self, entry, rivals, counter):
        model, name = entry.spec.model, entry.spec.id
        old = [e.number for e in (*rivals, entry) if self.now >= e.senior_at + AGED_S]
        if self.turns[model] >= AGE_EVERY - 1 and old:
            assert entry.number == min(old), f"{name} went although it was the turn of the longest waiting"
            self.turns[model] = 0
            return
        self.turns[model] += 1
        for other in rivals:
            if other.spec.priority != entry.spec.priority:
                assert other.spec.priority < entry.spec.priority, f"{name} overtook {other.spec.id} by class"
            elif other.account is entry.account:
                assert entry.number < other.number, f"{name} overtook {other.spec.id} of its own key"
            else:
                mine, theirs = counter(entry), counter(other)
                assert mine <= theirs + 1e-6, f"{name} overtook {other.spec.id} by share"

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
        key=st.sampled_from(list(WEIGHTS)),
        size=st.sampled_from((1, 10, 90)),
        cap=st.sampled_from((None, None, 2)),
        may_load=st.sampled_from((True, True, True, False)),
    )
    def arrive(self, model, tasks, n, priority, key, size, cap, may_load):
        self.counter += 1
        name = f"t{self.counter}"
        if n > 1:
            tasks = max(tasks, 1) * n
        more = {"body_bytes": size, "max_queue": cap, "may_load": may_load, "n": n}
        more["prompt_bytes"] = size * 40
        more["replayable"] = self.counter % 7 != 0
        self.specs[name] = spec(name, tasks, priority, model=model, key=key, weight=WEIGHTS[key], **more)
        self.post(Arrived(self.specs[name]))
        if name in self.state.tickets:
            self.places[name] = self.state.tickets[name].number

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

    @rule(pick=st.integers(0, 9))
    def give_back(self, pick):
        """A recalled requester closes its exchange and waits again."""
        names = [name for name in self.recalling if name in self.state.tickets]
        assume(names)
        self.requeue(sorted(names)[pick % len(names)])

    @rule(index=st.integers(0, 200))
    def requeue_anything(self, index):
        self.requeue(self.known(index))

    def requeue(self, name):
        entry = self.state.tickets.get(name)
        due = entry is not None and entry.recalling and name not in self.outcomes
        grant = self.grants.get(name)
        before = [self.facts(model) for model in MODELS]
        if due and grant.tag not in self.recalled:
            self.recalled[grant.tag] = (grant, self.now)
        self.post(Requeued(name))
        if not due:
            assert before == [self.facts(model) for model in MODELS], "a void requeue changed something"
        elif name in self.state.tickets:
            assert entry.number == self.places[name], "a recalled ticket lost its place"
            queue = self.state.rooms[entry.spec.model].queue
            assert [e.number for e in queue] == sorted(e.number for e in queue)

    def facts(self, model):
        view = model_view(self.state, model, self.now)
        return (view.queued, view.running, view.cancelling, view.charged, view.free)

    @rule(index=st.integers(0, 200))
    def commit(self, index):
        name = self.known(index)
        self.post(Committed(name))
        if name in self.state.tickets and self.state.tickets[name].grant is not None:
            self.recalling.discard(name)

    @rule(
        index=st.integers(0, 200),
        prompt=st.sampled_from((None, 0, 5, 2000)),
        cached=st.sampled_from((None, 0, 3, 5000)),
        generated=st.sampled_from((None, 0, 300)),
    )
    def report(self, index, prompt, cached, generated):
        before = [self.facts(model) for model in MODELS]
        self.post(Reported(self.known(index), prompt, cached, generated))
        assert before == [self.facts(model) for model in MODELS]

    @rule(pick=st.integers(0, 30), count=st.sampled_from((1, 50, 700)))
    def tokens(self, pick, count):
        running = [entry for entry in self.state.tickets.values() if entry.grant is not None]
        assume(running)
        running[pick % len(running)].tokens += count

    @rule(index=st.integers(0, 200))
    def first_byte(self, index):
        self.post(FirstByte(self.known(index)))

    @rule(
        kind=st.sampled_from(
            ("cancel", "swap", "ready", "down", "failed", "gate", "gate", "open", "open", "end", "stop")
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
            case "swap":
                self.post(SwapWait(model, stale))
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
        model=models,
        native=st.sampled_from((True, True, False)),
        member=st.sampled_from(list(MemberState)),
        keep=st.integers(0, 5),
        phase=st.sampled_from(list(EnginePhase)),
        parked=st.integers(0, 4),
    )
    def look(self, model, native, member, keep, phase, parked):
        """An honest snapshot: slots of tickets that are charged, some of the cancelled ones gone.

        The newest of them (`parked`) wait in the engine, if anything works there.
        """
        mine = [e for e in self.state.tickets.values() if e.grant is not None and e.spec.model == model]
        live = [e.grant.tag for e in mine if e.state is not TicketState.CANCELLING and e.cost]
        gone = [e.grant.tag for e in mine if e.state is TicketState.CANCELLING]
        self.now += 0.05
        shown = [(tag, member) for tag in (live + gone[:keep])]
        for index in range(max(1, len(live) - parked), len(live)):
            shown[index] = (live[index], MemberState.QUEUED)
        self.show(model, shown, native, phase=phase)

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

    def show(self, model, busy, native, back=0, age=0.0, phase=EnginePhase.UNKNOWN):
        shown = [
            SlotView(index, True, tag=tag if native else "", member=member if native else MemberState.NONE)
            for index, (tag, member) in enumerate(busy[: SLOTS[model]])
        ]
        shown += [SlotView(index, False) for index in range(len(shown), SLOTS[model])]
        key = backend(self.generation[model] - back, model=model)
        self.post(Seen(Snapshot(key, self.now - age, self.now, tuple(shown), native=native, phase=phase)))
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
                if ticket not in self.outcomes
                and grant.tag not in self.recalled
                and grant.key == backend(self.generation[model], model=model)
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
        assert charged == len(granted) + sum(1 for tag in self.recalled if self.charged(tag))
        living = {name for name in set(self.state.tickets) & set(self.grants)}
        assert {e.spec.id for e in granted} == {n for n in living if self.grants[n].tag not in self.recalled}

    @invariant()
    def keys_are_counted(self):
        """Accounts know who waits and who lives, and nobody absent is kept without need."""
        for model, room in self.state.rooms.items():
            mine = [e for e in self.state.tickets.values() if e.spec.model == model]
            for account in room.shares.accounts():
                alive = [e for e in mine if e.account is account]
                assert account.alive == len(alive)
                assert account.waiting == sum(1 for e in alive if e.state is TicketState.QUEUED)
            assert {id(e.account) for e in mine} <= {id(a) for a in room.shares.accounts()}

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
            first = next(line(room, self.state.limits, self.now)).entry
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


SHRINK = os.environ.get("ADMISSION_SHRINK", "1") != "0"
EXAMPLES = int(os.environ.get("ADMISSION_EXAMPLES", "100"))

Histories.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=80,
    deadline=None,
    phases=[phase for phase in Phase if SHRINK or phase is not Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
TestHistories = pytest.mark.timeout(300 + EXAMPLES)(Histories.TestCase)
