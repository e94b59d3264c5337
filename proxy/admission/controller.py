"""The shell of admission: feeds events to the core and performs its effects on the event loop."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from proxy import logs
from proxy.admission import views
from proxy.admission.core import step
from proxy.admission.entry import Entry
from proxy.admission.events import (
    ArmTimer,
    Arrived,
    BackendDown,
    BackendDraining,
    BackendReady,
    Cancelled,
    Committed,
    Configured,
    Effect,
    Ended,
    Event,
    Finished,
    FirstByte,
    GateSet,
    Granted,
    Load,
    LoadFailed,
    ModelDropped,
    ModelEnded,
    Poke,
    Recall,
    Released,
    Reported,
    Requeued,
    Seen,
    ShutDown,
    SwapWait,
    Tick,
)
from proxy.admission.instruments import Instruments
from proxy.admission.ports import World
from proxy.admission.records import (
    GateMode,
    Limits,
    LiveTickets,
    ModelAdmissionView,
    ModelLimits,
    TicketSpec,
    TicketView,
)
from proxy.admission.state import State
from proxy.admission.ticket import Ticket
from proxy.clock import Clock, monotonic
from proxy.errors import ErrorCode, ProxyError
from proxy.metrics import Metrics
from proxy.settings import Settings
from proxy.types import AdminState, BackendKey, EngineInfo, Outcome, Snapshot, TicketState

_TIMER_MIN_S = 0.001
"""Event loops may fire a timer a little early; this keeps the repeat from spinning."""


def limits_of(settings: Settings) -> Limits:
    """Return the core's limits from the configuration."""
    admission = settings.admission
    return Limits(
        max_queue=admission.max_queue,
        max_queued_bytes=admission.max_queued_bytes,
        queue_timeout_s=admission.queue_timeout_s,
        gate_hold_max_s=admission.gate_hold_max_s,
        wide_patience_s=admission.wide_patience_s,
        gather_ms=admission.cohort_gather_ms,
        stale_after_s=admission.stale_after_s,
        native_standby=admission.native_standby,
        fair_share=admission.fair_share,
        fair_decode_weight=admission.fair_decode_weight,
        age_after_s=admission.age_after_s,
        age_every=admission.age_every_grants,
        recall=admission.recall,
        shape=admission.cohort_shape,
        shape_ratio=admission.cohort_shape_ratio,
        shape_max_wait_s=admission.cohort_shape_max_wait_s,
        models={
            name: ModelLimits(model.max_queue, model.budgets.load_timeout_s)
            for name, model in settings.models.items()
        },
    )


class Admission:
    """Decides which request goes to which engine, when, and why the others wait. One per proxy.

    All methods are synchronous and must be called on the event loop's thread.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        world: World,
        *,
        clock: Clock = monotonic,
        listener: Callable[[Effect], None] | None = None,
    ) -> None:
        self._state = State()
        self._world = world
        self._clock = clock
        self._listener = listener
        self._instruments = Instruments(metrics)
        self._tickets: dict[str, Ticket] = {}
        self._copies = count(2)
        self._held: set[Ticket] = set()
        self._places: dict[str, dict[str, int]] = {}
        """Places in each model's queue, until something happens: all who wait ask, again and again."""
        self._drainers: list[tuple[str | None, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._log = logs.get("admission")
        self.configure(settings)
        metrics.on_render(self.refresh_metrics)

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, spec: TicketSpec) -> Ticket:
        """Take a request in; raises the `ProxyError` of its refusal.

        An id that is in use already gets a suffix (`Ticket.id` tells).
        """
        wanted = spec.id
        while self._state.taken(spec.id):
            spec = replace(spec, id=f"{wanted}-{next(self._copies)}")
        effects = step(self._state, Arrived(spec), self._clock())
        entry = self._state.tickets.get(spec.id)
        if entry is None:
            error = next(e.error for e in effects if isinstance(e, Ended) and e.ticket == spec.id)
            self._perform(effects)
            raise error
        ticket = self._tickets[spec.id] = Ticket(self, entry)
        self._held.add(ticket)
        self._perform(effects)
        return ticket

    def cancel(self, ticket: str, error: ProxyError) -> bool:
        """End one live ticket (an operator's wish); return whether there was one to end."""
        found = ticket in self._tickets
        self._post(Cancelled(ticket, error))
        return found

    def released(self, ticket: Ticket, outcome: Outcome, code: str, *, upstream_open: bool) -> None:
        """Take a release (called by `Ticket`)."""
        self._held.discard(ticket)
        # an ended ticket is forgotten before its release; its id may be another's by now
        if self._state.tickets.get(ticket.id) is ticket.entry:
            self._post(Released(ticket.id, outcome, code, upstream_open=upstream_open))
        self._wake_drainers()

    def first_byte(self, ticket: Ticket) -> None:
        """Take the observation of a first byte (called by `Ticket`)."""
        if self._state.tickets.get(ticket.id) is ticket.entry:
            self._post(FirstByte(ticket.id))

    def committed(self, ticket: Ticket) -> None:
        """Take the arrival of a response head (called by `Ticket`)."""
        if self._state.tickets.get(ticket.id) is ticket.entry:
            self._post(Committed(ticket.id))

    def requeued(self, ticket: Ticket) -> None:
        """Take a recalled grant back (called by `Ticket`)."""
        if self._state.tickets.get(ticket.id) is ticket.entry:
            self._post(Requeued(ticket.id))
            self._wake_drainers()

    def reported(self, ticket: Ticket, prompt: int | None, cached: int | None, generated: int | None) -> None:
        """Take what the engine counted (called by `Ticket`)."""
        if self._state.tickets.get(ticket.id) is ticket.entry:
            self._post(Reported(ticket.id, prompt, cached, generated))

    def busy(self, model: str | None = None) -> int:
        """Return how many requesters of a model (None: of all) are past the queue and not done yet.

        Those whose ticket was ended count until they released it: they still write to their clients.
        """
        return sum(
            1
            for ticket in self._held
            if ticket.state is not TicketState.QUEUED and (model is None or ticket.spec.model == model)
        )

    async def drained(self, model: str | None = None, *, timeout: float) -> bool:
        """Wait until nobody is `busy`; return False when `timeout` seconds passed first."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        drainer = (model, done)
        self._drainers.append(drainer)
        self._wake_drainers()
        try:
            await asyncio.wait({done}, timeout=timeout)
        finally:
            if drainer in self._drainers:
                self._drainers.remove(drainer)
        return done.done()

    # --- the world --------------------------------------------------------------------------------

    def backend_ready(self, key: BackendKey, info: EngineInfo) -> None:
        """A generation takes requests from now on."""
        self._post(BackendReady(key, info))

    def backend_down(self, key: BackendKey, error: ProxyError) -> None:
        """A generation is gone: what runs on it ends with `error`, what waits asks for a load."""
        self._post(BackendDown(key, error))

    def backend_draining(self, key: BackendKey, *, draining: bool) -> None:
        """A generation gets nothing new, or does again; what runs on it goes on."""
        self._post(BackendDraining(key, draining))

    def load_failed(self, model: str, error: ProxyError) -> None:
        """A load failed: everybody who waits for it ends with `error`."""
        self._post(LoadFailed(model, error))

    def swap_wait(self, model: str, *, waiting: bool) -> None:
        """A load waits for other models to make room, or goes on."""
        self._post(SwapWait(model, waiting))

    def snapshot(self, snapshot: Snapshot) -> None:
        """An engine's slots were seen."""
        self._post(Seen(snapshot))

    def set_gate(self, model: str, admin: AdminState, reason: str = "", mode: GateMode = "hold") -> None:
        """Open, drain or block a model for new and waiting requests; running ones go on."""
        self._post(GateSet(model, admin, reason, mode))

    def end_model(self, model: str, error: ProxyError) -> tuple[int, int]:
        """Force-unload: end all tickets of a model; return how many waited and how many ran."""
        before = self.view(model)
        self._post(ModelEnded(model, error))
        return before.queued, before.running

    def drop_model(self, model: str) -> None:
        """The model left the configuration: waiters end, what runs may finish."""
        text = f"{model} was removed from the configuration"
        self._post(ModelDropped(model, ProxyError(ErrorCode.MODEL_NOT_FOUND, text)))

    def shutdown(self, error: ProxyError, *, cut: bool = False) -> None:
        """Refuse newcomers and end waiters; with `cut`, end what runs, too."""
        self._post(ShutDown(error, cut))

    def configure(self, settings: Settings) -> None:
        """Take new limits."""
        keys = (key.name for key in settings.server.api_keys)
        self._instruments.configure(settings.models, settings.admission.classes, keys)
        self._post(Configured(limits_of(settings)))

    def close(self) -> None:
        """Stop the timer; call it last."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- read side --------------------------------------------------------------------------------

    def view(self, model: str) -> ModelAdmissionView:
        """Return one model's queue and books."""
        return views.model_view(self._state, model, self._clock())

    def live(self, model: str | None = None) -> LiveTickets:
        """Return who is there, of one model or (None) of all; costs little, however many wait."""
        return views.live(self._state, model)

    def tickets(self) -> list[TicketView]:
        """Return all live tickets, in order: for people, who ask now and then."""
        return views.ticket_views(self._state, self._clock())

    def shares(self) -> dict[str, float]:
        """Return the virtual counters by key: weighted tokens over weight, all models and classes together.

        Absent keys are listed only as long as their counter matters.
        """
        return views.shares(self._state)

    def broken_rules(self) -> list[str]:
        """Return violations of admission's own rules; empty unless there is a bug."""
        return views.broken_rules(self._state, self._clock())

    def refresh_metrics(self) -> None:
        """Set the gauges to what is true now (done before every rendering)."""
        self._instruments.refresh(self._state, self._clock())

    def position(self, entry: Entry) -> int:
        """Return a waiting ticket's place (called by `Ticket`)."""
        if not entry.waiting:
            return 0
        model = entry.spec.model
        found = self._places.get(model)
        if found is None:
            found = self._places[model] = views.places(self._state, model, self._clock())
        return found[entry.spec.id]

    def now(self) -> float:
        """Return the clock's time (called by `Ticket`)."""
        return self._clock()

    # --- events in, effects out -------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._perform(step(self._state, event, self._clock()))

    def _perform(self, effects: list[Effect]) -> None:
        """Perform effects: for who waits, then for who watches, then the calls, which may post events of their own."""
        self._places.clear()
        for effect in effects:
            self._deliver(effect)
        for effect in effects:
            self._note(effect)
        for effect in effects:
            self._call(effect)

    def _deliver(self, effect: Effect) -> None:
        match effect:
            case Granted(ticket, grant):
                self._tickets[ticket].resolve(grant)
            case Recall(ticket):
                self._tickets[ticket].recall()
            case Ended(ticket, error):
                if ticket in self._tickets:
                    self._tickets[ticket].end(error)
            case Finished(ending):
                self._tickets.pop(ending.id, None)
            case ArmTimer(at):
                self._arm(at)
            case _:
                pass

    def _note(self, effect: Effect) -> None:
        try:
            self._instruments.note(effect)
            if self._listener is not None:
                self._listener(effect)
        except Exception:
            # nobody's wait may depend on who only looks on
            self._log.exception("effect_not_noted", effect=type(effect).__name__)

    def _call(self, effect: Effect) -> None:
        match effect:
            case Poke(key):
                self._world.poke(key)
            case Load(model):
                try:
                    self._world.request_load(model)
                except ProxyError as error:
                    self.load_failed(model, error)
                except Exception as error:
                    self._log.exception("load_request_failed", model=model)
                    text = f"{model}: the load could not be started: {error}"
                    self.load_failed(model, ProxyError(ErrorCode.MODEL_LOAD_FAILED, text))
            case _:
                pass

    def _wake_drainers(self) -> None:
        for model, done in self._drainers:
            if not done.done() and self.busy(model) == 0:
                done.set_result(None)

    def _arm(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at is not None:
            delay = max(_TIMER_MIN_S, at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._post(Tick())
        self._keep_armed()

    def _keep_armed(self) -> None:
        """Arm again after a timer that fired early: the core saw no reason to ask anew."""
        if self._timer is None and self._state.timer is not None:
            self._arm(self._state.timer)
