"""A recorder around the pure core: drives it by what happens, keeps its effects, checks its rules each step."""

from proxy.admission import TicketSpec
from proxy.admission.core import step
from proxy.admission.events import (
    Arrived,
    BackendDown,
    BackendDraining,
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
    Mismatch,
    ModelDropped,
    ModelEnded,
    Released,
    Seen,
    ShutDown,
    Tick,
    Waited,
)
from proxy.admission.records import Limits, ModelLimits
from proxy.admission.state import State
from proxy.admission.views import broken_rules, model_view, ticket_views
from proxy.errors import ErrorCode, ProxyError
from proxy.types import (
    AdminState,
    BackendKey,
    EngineInfo,
    EnginePhase,
    MemberState,
    Outcome,
    PhasePolicy,
    SlotView,
    Snapshot,
)

MODEL = "m"


def spec(name, tasks=1, priority=0, model=MODEL, key="k", **more):
    return TicketSpec(
        id=name,
        model=model,
        key=key,
        priority=priority,
        priority_name=more.pop("priority_name", "normal"),
        tasks=tasks,
        stream=more.pop("stream", True),
        body_bytes=more.pop("body_bytes", 10),
        endpoint=more.pop("endpoint", "/v1/completions"),
        **more,
    )


def backend(generation=1, name="b", model=MODEL):
    return BackendKey(model, name, generation)


def slots(*busy, total=4):
    """Slots of a snapshot: each busy one is a tag, or (tag, member) or (tag, member, cohort)."""
    views = []
    for index, item in enumerate(busy):
        tag, member, cohort = (*(item if isinstance(item, tuple) else (item,)), MemberState.NONE, None)[:3]
        views.append(SlotView(index, True, tag=tag, member=member, cohort=cohort))
    views += [SlotView(index, False) for index in range(len(busy), total)]
    return tuple(views)


class Scene:
    """One admission core with a hand-wound clock."""

    def __init__(self, **limits):
        self.now = 100.0
        self.state = State()
        self.effects = []
        self.log = []
        models = limits.pop("models", {MODEL: ModelLimits(load_timeout_s=900.0)})
        self.post(Configured(Limits(models=models, **limits)))

    def post(self, event):
        self.effects = step(self.state, event, self.now)
        self.log += self.effects
        assert broken_rules(self.state, self.now) == []
        return self.effects

    # what happens
    def arrive(self, name, tasks=1, priority=0, **more):
        self.post(Arrived(spec(name, tasks, priority, **more)))
        return self

    def ready(self, slots=4, policy=PhasePolicy.UNKNOWN, key=None):
        self.post(BackendReady(key or backend(), EngineInfo(slots, 4096, policy)))
        return self

    def down(self, key=None, code=ErrorCode.UPSTREAM_ERROR):
        self.post(BackendDown(key or backend(), ProxyError(code, "gone")))
        return self

    def drain(self, key=None, draining=True):
        self.post(BackendDraining(key or backend(), draining))
        return self

    def load_failed(self, model=MODEL):
        self.post(LoadFailed(model, ProxyError(ErrorCode.MODEL_LOAD_FAILED, "no such file")))
        return self

    def release(self, *names, outcome=Outcome.COMPLETED, upstream_open=False):
        for name in names:
            self.post(Released(name, outcome, upstream_open=upstream_open))
        return self

    def leave(self, *names):
        return self.release(*names, outcome=Outcome.CANCELLED, upstream_open=True)

    def cancel(self, name):
        self.post(Cancelled(name, ProxyError(ErrorCode.CANCELLED_BY_OPERATOR, "by hand")))
        return self

    def see(self, *busy, native=True, asked=None, total=4, key=None, phase=EnginePhase.UNKNOWN, cohort=None):
        """A snapshot arrives; asked now unless said otherwise."""
        asked = self.now if asked is None else asked
        shown = Snapshot(
            key or backend(),
            asked,
            self.now,
            slots(*busy, total=total),
            native=native,
            phase=phase,
            cohort=cohort,
        )
        self.post(Seen(shown))
        return self

    def gate(self, admin=AdminState.BLOCKED, reason="maintenance", mode="hold"):
        self.post(GateSet(MODEL, admin, reason, mode))
        return self

    def end_model(self):
        self.post(ModelEnded(MODEL, ProxyError(ErrorCode.MODEL_UNLOADED, "force")))
        return self

    def drop_model(self):
        self.post(ModelDropped(MODEL, ProxyError(ErrorCode.MODEL_NOT_FOUND, "dropped")))
        return self

    def shut_down(self, cut=False):
        self.post(ShutDown(ProxyError(ErrorCode.SHUTTING_DOWN, "bye"), cut))
        return self

    def first_byte(self, name):
        self.post(FirstByte(name))
        return self

    def wait(self, seconds):
        """Let time pass, ticking whenever the core asked for it."""
        end = self.now + seconds
        while self.state.timer is not None and self.state.timer <= end:
            assert self.state.timer > self.now, "a timer in the past would spin"
            self.now = self.state.timer
            self.post(Tick())
        self.now = end
        return self

    # what came of it
    def of(self, kind, effects=None):
        return [effect for effect in (self.log if effects is None else effects) if isinstance(effect, kind)]

    @property
    def granted(self):
        return [effect.ticket for effect in self.of(Granted)]

    def grant(self, name):
        return next(effect.grant for effect in self.of(Granted) if effect.ticket == name)

    @property
    def ended(self):
        return {effect.ticket: effect.error.code for effect in self.of(Ended)}

    def error(self, name):
        return next(effect.error for effect in self.of(Ended) if effect.ticket == name)

    @property
    def outcomes(self):
        found = {}
        for effect in self.of(Finished):
            assert effect.ending.id not in found, "two outcomes"
            found[effect.ending.id] = effect.ending.outcome
        return found

    @property
    def loads(self):
        return len(self.of(Load))

    @property
    def mismatches(self):
        return [effect.foreign for effect in self.of(Mismatch)]

    def held(self, name):
        found = {}
        for effect in self.of(Waited):
            if effect.ticket == name:
                found[effect.reason] = found.get(effect.reason, 0.0) + effect.seconds
        return found

    def ticket(self, name):
        return next(view for view in ticket_views(self.state, self.now) if view.id == name)

    def reason(self, name):
        return self.ticket(name).reason

    def ticket_state(self, name):
        return self.ticket(name).state

    @property
    def view(self):
        return model_view(self.state, MODEL, self.now)

    @property
    def book(self):
        return self.view.backends[0]

    @property
    def waiting(self):
        order = sorted(
            (v for v in ticket_views(self.state, self.now) if v.position), key=lambda v: v.position
        )
        return [view.id for view in order]
