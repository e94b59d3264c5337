"""Random histories against rules that may never break, with a model of their own.

A history is a string of bytes that Hypothesis makes up and shrinks: each event takes the bytes it needs.
`ADMISSION_EXAMPLES` sets the number of histories.
"""

import os
from dataclasses import replace

import pytest
from admission_kit import Scene, backend, spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.admission.core import step
from proxy.admission.events import (
    ArmTimer,
    Arrived,
    BackendDown,
    BackendDraining,
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
from proxy.admission.shape import plan
from proxy.admission.state import State
from proxy.admission.views import broken_rules, live, model_view, ticket_views
from proxy.errors import ErrorCode, ProxyError
from proxy.types import (
    AdminState,
    EngineInfo,
    EnginePhase,
    MemberState,
    Outcome,
    PhasePolicy,
    Reason,
    SlotView,
    Snapshot,
    TicketState,
)

MODELS = ("m", "o")
SLOTS = {"m": 4, "o": 2}
AGE_EVERY = 3
WEIGHTS = {"k1": 1.0, "k2": 2.0, "k3": 1.0}
LIMITS = Limits(
    max_queue=8,
    max_queued_bytes=500,
    queue_timeout_s=40.0,
    gate_hold_max_s=30.0,
    wide_patience_s=5.0,
    stale_after_s=3.0,
    age_after_s=15.0,
    age_every=AGE_EVERY,
    shape_ratio=0.5,
    shape_max_wait_s=6.0,
    models={model: ModelLimits(load_timeout_s=50.0) for model in MODELS},
)


BUDGETS = (
    (
        {
            Reason.NO_FREE_SLOT,
            Reason.COHORT_SEALED,
            Reason.COHORT_SHAPE,
            Reason.FAIRNESS,
            Reason.WIDE_REQUEST,
        },
        lambda limits, model: limits.queue_timeout_s,
    ),
    (
        {Reason.MODEL_LOADING, Reason.BACKEND_DOWN, Reason.SWAP_WAIT},
        lambda limits, model: limits.of(model).load_timeout_s,
    ),
    ({Reason.GATE_BLOCKED, Reason.MODEL_DRAINING}, lambda limits, model: limits.gate_hold_max_s),
)
"""Which waits count together, and what bounds them: the test's own table."""


class Choices:
    """Bytes as choices; an end of the bytes is the end of the history."""

    def __init__(self, data):
        self._data = data
        self._at = 0

    @property
    def left(self):
        return self._at < len(self._data)

    def number(self, below):
        byte = self._data[self._at] if self.left else 0
        self._at += 1
        return byte % below

    def one(self, *options):
        return options[self.number(len(options))]

    def chance(self, percent):
        return self.number(100) < percent


_SHOWN = {
    "generate": (MemberState.GENERATE, EnginePhase.GENERATE),
    "open": (MemberState.PREFILL, EnginePhase.PREFILL_OPEN),
    "sealed": (MemberState.READY, EnginePhase.PREFILL_SEALED),
    "paused": (MemberState.PAUSED, EnginePhase.YIELD_PREFILL),
    "idle": (MemberState.NONE, EnginePhase.IDLE),
}


class History:
    """Arrivals, endings, crashes, gates, honest and lying snapshots, and time, in any order."""

    def __init__(self, data):
        self.pick = Choices(data)
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
        self.cohorts = {}
        self.shown_keys = set()
        self.post(Configured(LIMITS))

    def play(self):
        """Live the whole history, then let everybody leave."""
        pick = self.pick
        drain = PhasePolicy.DRAIN
        policy = pick.one(drain, drain, drain, PhasePolicy.YIELD, PhasePolicy.MIXED, PhasePolicy.UNKNOWN)
        self.policy = dict.fromkeys(MODELS, policy)
        self.post(Configured(replace(LIMITS, shape=pick.chance(40))))
        for model in pick.one(MODELS, MODELS, MODELS, ("m",), ()):
            self.ready(model, stale=False)
            self.look(model, "idle")
            # as if some cohorts had been seen: 100 tokens are read in a second
            pace = self.state.rooms[model].books["b"].pace
            pace.reading_s, pace.read_tokens, pace.generation_s = 1.0, 100.0, pick.one(1.0, 4.0)
        while pick.left:
            self.event()
            self.check()
        self.teardown()

    def check(self):
        self.own_rules()
        self.live_grants_fit()
        self.ledger_is_the_living()
        self.keys_are_counted()
        self.living_or_one_outcome()
        self.nobody_waits_beside_free_capacity()
        self.shape_has_its_bound()
        shown = ticket_views(self.state, self.now)
        self.nobody_outlives_a_budget(shown)
        self.the_short_list_is_the_long_one(shown)
        self.places_are_unique()
        self.someone_works_on_a_load()

    def event(self):
        """One of all that may happen; ordinary service mostly."""
        pick = self.pick
        model = pick.one("m", "m", "m", "o")
        kind = pick.number(100)
        if kind < 30:
            for _ in range(pick.one(1, 1, 1, 3, 6)):
                self.arrive(model)
        elif kind < 44:
            self.finish()
        elif kind < 66:
            self.look(model, pick.one("generate", "generate", "generate", "open", "sealed", "paused", "idle"))
        elif kind < 69:
            self.see(model)
        elif kind < 76:
            self.wait(pick.one(0.0, 0.01, 0.5, 0.5, 2.0, 4.0, 20.0, 45.0))
        elif kind < 82:
            self.give_back()
        elif kind < 84:
            self.tokens()
        elif kind < 87 and self.specs:
            self.post(FirstByte(self.known()))
        elif kind < 90 and self.specs:
            self.commit()
        elif kind < 92 and self.specs:
            self.report()
        elif kind < 94 and self.specs:
            self.let_go(self.known(), pick.chance(50), pick.one(*Outcome))
        elif kind < 95 and self.specs:
            self.requeue(self.known())
        elif kind < 96:
            self.reload()
        else:
            self.trouble(model)

    # --- driving ----------------------------------------------------------------------------------

    def post(self, event):
        cancelling = {name: at for name, at in self.cancelled.items() if name in self.state.tickets}
        back = {tag: at for tag, at in self.recalled.items() if self.charged(tag)}
        alive = dict(self.state.tickets)
        effects = step(self.state, event, self.now)
        for name, at in cancelling.items():
            if name not in self.state.tickets:
                self.check_evidence(self.grants[name], at, event)
        for name, entry in alive.items():
            if name not in self.state.tickets and entry.grant is not None:
                assert entry.reported or entry.folded == entry.tokens, f"{name} had tokens for nothing"
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
                    drains = self.state.rooms[grant.key.model].books["b"].draining
                    assert not drains or not self.specs[ticket].tasks, "granted to one that drains"
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

    @property
    def limits(self):
        return self.state.limits

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
        patient = other.wide_since is None or self.now - other.wide_since < self.limits.wide_patience_s
        since = other.shape_since
        shaped = since is not None and self.now < since + self.limits.shape_max_wait_s
        return not (wide and patient) and not (shaped and self.limits.shape) and not self.kept_out(spec)

    def kept_out(self, one):
        """Whether strangers take what a request needs, whatever becomes of ours."""
        slots, (book,) = SLOTS[one.model], self.books(one.model).values()
        foreign, seen = book.capacity(self.now).foreign, book.mirror(self.now) is not Mirror.STALE
        standby = 1 if seen and self.policy[one.model] in (PhasePolicy.DRAIN, PhasePolicy.YIELD) else 0
        if one.tasks > slots >= one.n:
            return foreign > 0
        return self.cost(one.id) > max(1, slots + standby - foreign)

    def check_turn(self, entry, rivals, counter):
        model, name = entry.spec.model, entry.spec.id
        old = [e.number for e in (*rivals, entry) if self.now >= e.senior_at + self.limits.age_after_s]
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

    def known(self):
        """Any ticket there ever was, the latest rather."""
        names = list(self.specs)
        return names[-1 - self.pick.number(256) % len(names)]

    # --- what may happen --------------------------------------------------------------------------

    def arrive(self, model):
        pick = self.pick
        self.counter += 1
        name = f"t{self.counter}"
        tasks = pick.one(1, 1, 1, 1, 1, 1, 1, 1, 0, 2, 3, 9)
        n = pick.one(1, 1, 1, 1, 1, 1, 1, 2, 5)
        size = pick.one(1, 10, 40)
        self.specs[name] = spec(
            name,
            tasks if n == 1 else max(tasks, 1) * n,
            pick.one(0, 0, 0, 10, -10),
            model=model,
            key=(key := pick.one(*WEIGHTS)),
            weight=WEIGHTS[key],
            body_bytes=size,
            prompt_bytes=size * 40,
            max_queue=pick.one(None, None, None, 2),
            may_load=not pick.chance(10),
            replayable=not pick.chance(10),
            retry_id=pick.one("", "r1", "r2", "r1"),
            prefix=pick.one((), (b"s",), (b"s", key.encode())),
            n=n,
        )
        self.post(Arrived(self.specs[name]))
        if name in self.state.tickets:
            self.places[name] = self.state.tickets[name].number

    def running(self):
        return [name for name, entry in self.state.tickets.items() if entry.grant is not None]

    def finish(self):
        """The release of a ticket that holds capacity."""
        if names := self.running():
            open_ = self.pick.chance(30)
            outcome = Outcome.CANCELLED if open_ else Outcome.COMPLETED
            self.let_go(self.pick.one(*names), open_, outcome)

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

    def give_back(self):
        """A recalled requester closes its exchange and waits again."""
        if names := sorted(name for name in self.recalling if name in self.state.tickets):
            self.requeue(self.pick.one(*names))

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

    def commit(self):
        name = self.known()
        self.post(Committed(name))
        if name in self.state.tickets and self.state.tickets[name].grant is not None:
            self.recalling.discard(name)

    def report(self):
        pick = self.pick
        before = [self.present(model) for model in MODELS]
        counted = (pick.one(None, 0, 5, 2000), pick.one(None, 0, 3, 5000), pick.one(None, 0, 300))
        self.post(Reported(self.known(), *counted))
        # it moves counters, and may so let somebody else go first; it ends and frees nothing
        assert before == [self.present(model) for model in MODELS]

    def present(self, model):
        view = model_view(self.state, model, self.now)
        return (view.queued + view.running, view.cancelling)

    def tokens(self):
        if names := self.running():
            self.state.tickets[self.pick.one(*names)].tokens += self.pick.one(1, 50, 700)

    def trouble(self, model):
        """What operators and crashes do."""
        pick = self.pick
        kind = pick.one(
            "cancel", "swap", "ready", "down", "drain", "failed", "gate", "open", "open", "end", "stop"
        )
        stale = pick.chance(50)
        match kind:
            case "cancel" if self.specs:
                self.post(Cancelled(self.known(), ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "x")))
            case "swap":
                self.post(SwapWait(model, stale))
            case "ready":
                self.ready(model, stale=stale)
            case "down":
                self.up[model] = self.up[model] and stale
                key = backend(self.generation[model] - int(stale), model=model)
                self.post(BackendDown(key, ProxyError(ErrorCode.UPSTREAM_ERROR, "x")))
            case "drain":
                key = backend(self.generation[model] - int(pick.chance(10)), model=model)
                self.post(BackendDraining(key, stale))
            case "failed":
                self.post(LoadFailed(model, ProxyError(ErrorCode.MODEL_LOAD_FAILED, "x")))
            case "gate":
                self.post(GateSet(model, pick.one(*AdminState), "why", pick.one("hold", "reject")))
            case "open":
                self.post(GateSet(model, AdminState.ENABLED))
                if not self.up[model]:
                    self.ready(model, stale=False)
            case "end":
                self.up[model] = False
                self.post(ModelEnded(model, ProxyError(ErrorCode.MODEL_UNLOADED, "x")))
                assert not [v for v in ticket_views(self.state, self.now) if v.model == model]
            case "stop" if pick.chance(20):
                self.post(ShutDown(ProxyError(ErrorCode.SHUTTING_DOWN, "x"), cut=stale))

    def reload(self):
        """New limits, shorter than what some have waited, longer, or off."""
        pick = self.pick
        load_s = pick.one(50.0, 5.0, None)
        limits = replace(
            LIMITS,
            shape=self.limits.shape,
            queue_timeout_s=pick.one(40.0, 40.0, 10.0, 1.0, 90.0, None),
            gate_hold_max_s=pick.one(30.0, 30.0, 3.0, None),
            stale_after_s=pick.one(3.0, 3.0, 0.1, 30.0),
            wide_patience_s=pick.one(5.0, 5.0, 0.0, 15.0),
            age_after_s=pick.one(15.0, 15.0, 1.0),
            shape_max_wait_s=pick.one(6.0, 6.0, 0.0, 1.0),
            models={model: ModelLimits(load_timeout_s=load_s) for model in MODELS},
        )
        self.post(Configured(limits))

    def ready(self, model, *, stale):
        if not stale:
            self.generation[model] += 1
            self.up[model] = True
        generation = self.generation[model] - int(stale)
        info = EngineInfo(SLOTS[model], 4096, self.policy[model])
        self.post(BackendReady(backend(generation, model=model), info))

    def look(self, model, kind):
        """An honest snapshot: the oldest of those who are charged at work, the newest parked behind them.

        Of the cancelled some are gone; strangers may be there.
        """
        pick = self.pick
        mine = [e for e in self.state.tickets.values() if e.grant is not None and e.spec.model == model]
        live = [e.grant.tag for e in mine if e.state is not TicketState.CANCELLING and e.cost]
        gone = [e.grant.tag for e in mine if e.state is TicketState.CANCELLING]
        gone += [tag for tag in self.recalled if self.charged(tag)]
        member, phase = _SHOWN[kind] if live else _SHOWN["idle"]
        if phase is EnginePhase.PREFILL_OPEN or model not in self.cohorts:
            self.cohorts[model] = self.cohorts.get(model, 0) + 1
        self.now += pick.one(0.05, 0.05, 0.2, 1.5)
        shown = [(tag, member) for tag in live]
        for index in range(max(1, len(live) - pick.number(4)), len(live)):
            shown[index] = (live[index], MemberState.QUEUED)
        if kind == "idle":
            shown = []
        shown += [(tag, member) for tag in gone[: pick.one(0, 0, 1, 5)]]
        shown += [("x", member) for _ in range(pick.one(0, 0, 0, 0, 0, 1, 2))]
        self.show(model, shown, not pick.chance(8), phase=phase)

    def see(self, model):
        """A snapshot with slots of tickets of any time and of strangers, honest or not, old or of the dead."""
        pick = self.pick
        busy = []
        for _ in range(pick.number(5)):
            past = self.past_tags
            tag = past[-1 - pick.number(20) % len(past)] if past and pick.chance(80) else f"x{pick.number(3)}"
            busy.append((tag, pick.one(*MemberState)))
        age = pick.one(0.0, 0.0, 0.01, 1.0, 6.0)
        self.show(model, busy, pick.chance(70), pick.number(2), age, pick.one(*EnginePhase))

    def show(self, model, busy, native, back=0, age=0.0, phase=EnginePhase.UNKNOWN):
        shown = [
            SlotView(index, True, tag=tag if native else "", member=member if native else MemberState.NONE)
            for index, (tag, member) in enumerate(busy[: SLOTS[model]])
        ]
        shown += [SlotView(index, False) for index in range(len(shown), SLOTS[model])]
        key = backend(self.generation[model] - back, model=model)
        seen = Snapshot(
            key,
            self.now - age,
            self.now,
            tuple(shown),
            native=native,
            phase=phase if native else EnginePhase.UNKNOWN,
            cohort=self.cohorts.get(model),
        )
        self.post(Seen(seen))
        self.shown_keys.add(key)

    def wait(self, seconds):
        end = self.now + seconds
        while self.armed is not None and self.armed <= end:
            self.now = self.armed
            self.post(Tick())
        self.now = end

    # --- what must hold ---------------------------------------------------------------------------

    def own_rules(self):
        assert broken_rules(self.state, self.now) == []

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

    def keys_are_counted(self):
        """Accounts know who waits and who lives, and nobody absent is kept without need."""
        for model, room in self.state.rooms.items():
            mine = [e for e in self.state.tickets.values() if e.spec.model == model]
            for account in room.shares.accounts():
                alive = [e for e in mine if e.account is account]
                assert account.alive == len(alive)
                assert account.waiting == sum(1 for e in alive if e.state is TicketState.QUEUED)
            assert {id(e.account) for e in mine} <= {id(a) for a in room.shares.accounts()}

    def living_or_one_outcome(self):
        for name in self.specs:
            entry = self.state.tickets.get(name)
            if entry is None:
                assert name in self.outcomes, f"{name} vanished"
            elif name in self.outcomes:
                assert entry.state is TicketState.CANCELLING

    def nobody_waits_beside_free_capacity(self):
        """No lost wake-up: with an open gate and a ready engine the first in line does not fit.

        Nor does who is behind one for whom nobody is held back.
        """
        for model in MODELS:
            room = self.state.rooms.get(model)
            if room is None or not room.queue or not room.books or room.admin is not AdminState.ENABLED:
                continue
            held = plan(self.state, room, self.now)
            if held.closed:
                continue
            ledger = next(iter(room.books.values()))
            capacity = ledger.capacity(self.now)
            if not held.standby:
                capacity = replace(capacity, standby=0)
            for turn in line(room, self.limits, self.now):
                first = turn.entry
                if first.number in held.held:
                    continue
                if ledger.draining and first.spec.tasks:
                    break
                wide = first.spec.tasks > SLOTS[model] >= first.spec.n
                assert not capacity.fits(self.cost(first.spec.id), wide)
                since = first.wide_since
                patient = wide and (since is None or self.now < since + self.limits.wide_patience_s)
                if not patient and not self.kept_out(first.spec):
                    break

    def shape_has_its_bound(self):
        """Nobody waits for its like longer than the configuration says."""
        for entry in self.state.tickets.values():
            if entry.reason is Reason.COHORT_SHAPE:
                assert self.limits.shape
                assert self.now < entry.shape_since + self.limits.shape_max_wait_s

    def the_short_list_is_the_long_one(self, shown):
        """What backends are told is what people are shown."""
        over = (TicketState.QUEUED, TicketState.CANCELLING)
        for model in MODELS:
            mine = [view for view in shown if view.model == model]
            found = live(self.state, model)
            for ids, states in (
                (found.waiting, {TicketState.QUEUED}),
                (found.cancelling, {TicketState.CANCELLING}),
                (found.running, set(TicketState).difference(over)),
            ):
                assert sorted(ids) == sorted(view.id for view in mine if view.state in states)
            recalled = {tag for tag, (grant, _) in self.recalled.items() if grant.key.model == model}
            assert found.tags == {view.tag for view in mine if view.tag} | set(filter(self.charged, recalled))

    def nobody_outlives_a_budget(self, shown):
        """Who waits has waited for less than its budget in all, and time alone will end it: rule 5.

        What an engine showed of a ticket counts only while it is seen.
        """
        limits = self.limits
        for view in shown:
            entry = self.state.tickets[view.id]
            ledger = self.state.ledger_of(entry)
            blind = ledger is not None and not ledger.mirror(self.now).fresh
            if view.reason is None or view.id in self.outcomes or blind:
                continue
            reasons, limit = next((r, of(limits, view.model)) for r, of in BUDGETS if view.reason in r)
            if limit is None:
                continue
            waited = sum(seconds for reason, seconds in view.held_s.items() if reason in reasons)
            assert waited < limit + 1e-6, f"{view.id} has waited {waited:g} s for {view.reason}"
            assert self.armed is not None and self.armed <= self.now + limit, "nothing would end its wait"

    def places_are_unique(self):
        """A promise gives an old place to one ticket only."""
        numbers = [entry.number for entry in self.state.tickets.values()]
        assert len(numbers) == len(set(numbers))
        for room in self.state.rooms.values():
            seniority = [entry.senior_at for entry in room.queue]
            assert seniority == sorted(seniority)

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


EXAMPLES = int(os.environ.get("ADMISSION_EXAMPLES", "10000"))


@pytest.mark.timeout(600 + EXAMPLES // 5)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=40, max_size=160))
def test_no_history_breaks_a_rule(data):
    """Whatever happens, in whatever order: the ledger, the order, the places and the outcomes hold."""
    History(data).play()


@settings(max_examples=max(1, EXAMPLES // 10), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(min_size=20, max_size=120))
def test_ids_may_come_back_whatever_became_of_their_last_request(data):
    """A few clients that always use the same ids, recalled, gone and back: none is in use twice, nothing is left."""
    pick = Choices(data)
    scene = Scene(age_after_s=None).ready(slots=2, policy=PhasePolicy.DRAIN).arrive("a").wait(0.1)
    scene.see(("a.1", MemberState.GENERATE), total=2, phase=EnginePhase.GENERATE)
    scene.arrive("b").arrive("c").wait(0.1)
    scene.see(("a.1", MemberState.GENERATE), total=2, phase=EnginePhase.GENERATE).arrive("d", priority=10)
    assert [name for name, entry in scene.state.tickets.items() if entry.recalling] == ["c"]
    while pick.left:
        scene.now += 0.01
        tickets = scene.state.tickets
        charges = list(scene.state.rooms["m"].books["b"].charges.values())
        recalling = [name for name, entry in tickets.items() if entry.recalling]
        back = [name for name, entry in tickets.items() if entry.recalls and entry.waiting]
        match pick.number(9):
            case 0 | 1 | 2:
                name = pick.one("a", "b", "c", "d")
                if not scene.state.taken(name):
                    scene.arrive(name, priority=pick.one(0, 0, 10))
            case 3 | 4 if recalling:
                scene.post(Requeued(pick.one(*recalling)))
            case 5 if back:
                scene.leave(pick.one(*back))
            case 6 if tickets:
                scene.release(pick.one(*tickets))
            case 7 if tickets:
                scene.leave(pick.one(*tickets))
            case _:
                live = [charge.tag for charge in charges if charge.released_at is None]
                keeps = [charge.tag for charge in charges if charge.recalled]
                shown = [(tag, MemberState.GENERATE) for tag in live[:1]]
                shown += [(tag, MemberState.QUEUED) for tag in (keeps if pick.chance(70) else [])[:1]]
                scene.see(*shown, total=2, phase=EnginePhase.GENERATE if live else EnginePhase.IDLE)
    for name in list(scene.state.tickets):
        scene.leave(name)
    scene.now += 1.0
    scene.see(total=2)
    assert scene.state.tickets == {}
    assert scene.book.charged == 0
