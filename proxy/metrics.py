"""Prometheus metrics: every name, label and bucket of the proxy, in one place.

Labels are closed vocabularies only (models, states, codes): never a request id, a raw client string or
an error text. Series of a removed model are dropped by `forget_model`.
"""

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

PREFIX: Final = "llama_proxy_"
OTHER: Final = "other"
"""Label of clients without a configured name."""
LABELLED_KEYS: Final = 64
"""Names beyond these count as `OTHER`, too."""
_M = TypeVar("_M", bound=MetricWrapperBase)

LAT: Final = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 5, 7.5, 10, 15, 20, 30),
    *(40, 60, 80, 120, 160, 320),
)
GAP: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2, 2.5, 5, 10),
    *(20, 40),
)
OVH: Final = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOK: Final = tuple(4**n for n in range(1, 10))
CNT: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


class Metrics:
    """All metrics on one registry. One instance per proxy process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry(auto_describe=True)
        self._all: list[MetricWrapperBase] = []
        self._refreshers: list[Callable[[], None]] = []
        c, g, h = self._counter, self._gauge, self._histogram

        self.requests = c("requests", "Finished client requests", "endpoint model priority code outcome")
        self.rejected = c("requests_rejected", "Requests refused by the proxy, by error code", "model code")
        self.inflight = g("requests_inflight", "Live requests by state", "model state")
        self.queue_size = g("queue_size", "Requests waiting in the proxy", "model priority")
        self.queue_bytes = g("queue_bytes", "Bytes of bodies waiting in the proxy", "model priority")
        self.queue_oldest = g("queue_oldest_seconds", "Age of the longest waiting request", "model priority")
        self.queue_wait = h("queue_wait_seconds", "Time in the proxy's queue", LAT, "model priority outcome")
        self.hold_seconds = c("hold_seconds", "Where waiting time went, by reason", "model reason")
        self.ttft = h(
            "time_to_first_token_seconds",
            "Last request byte in to first content byte out, queueing included",
            LAT,
            "model priority",
        )
        self.ttst = h(
            "time_to_second_token_seconds", "As time to first token, to the second", LAT, "model priority"
        )
        self.chunk_gap = h("inter_chunk_gap_seconds", "Every gap between content chunks", GAP, "model")
        self.max_gap = h("request_max_gap_seconds", "The worst gap of each request", GAP, "model")
        self.tpot = h(
            "time_per_output_token_seconds", "(duration - TTFT) / tokens after the first", GAP, "model"
        )
        self.duration = h("request_duration_seconds", "Whole request", LAT, "endpoint model code")
        self.prompt_tokens = c("prompt_tokens", "Prompt tokens of finished requests", "model key")
        self.cached_prompt_tokens = c("cached_prompt_tokens", "Prompt tokens served from cache", "model key")
        self.generated_tokens = c("generated_tokens", "Generated tokens", "model key")
        self.draft_tokens = c("draft_tokens", "Drafted tokens", "model key")
        self.draft_accepted = c("draft_accepted_tokens", "Drafted tokens that were accepted", "model key")
        self.key_counter = g("key_virtual_counter", "Fair-share counter", "key")
        self.overhead = h("overhead_seconds", "The proxy's own time", OVH, "stage")

        self.engine_phase = g("engine_phase", "1 for the engine's present phase", "model backend phase")
        self.engine_phase_seconds = c("engine_phase_seconds", "Time in each phase", "model backend phase")
        self.engine_slots = g("engine_slots", "Engine slots by state", "model backend state")
        self.cohort_size = h("cohort_size", "Members of a cohort at its seal", CNT, "model")
        self.cohort_prompt_tokens = h("cohort_prompt_tokens", "Prompt tokens at the seal", TOK, "model")
        self.cohorts = c("cohorts", "Seals", "model")
        self.cohort_duration = h("cohort_duration_seconds", "Duration of cohort phases", LAT, "model phase")
        self.barrier_wait = h("barrier_wait_seconds", "Wait at the barrier, per request", LAT, "model")
        self.native_queue = h("native_queue_seconds", "Wait for a cohort on a slot", LAT, "model")
        self.paused = h("paused_seconds", "Time paused by a yield, per request", LAT, "model")
        self.recalls = c("recalls", "Tickets taken back from the engine's queue", "model")
        self.wide_requests = c("wide_requests", "Requests with more tasks than slots", "model")
        self.mirror_age = g("mirror_age_seconds", "Age of the newest snapshot", "model backend")
        self.mirror_poll = h("mirror_poll_seconds", "Cost of one /slots poll", OVH, "model backend")
        self.mirror_mismatch = c(
            "mirror_mismatch", "Reconciliations that found a difference", "model backend"
        )

        self.model_state = g("model_state", "1 for the model's present state", "model state")
        self.model_transitions = c("model_transitions", "State changes", "model from to cause")
        self.load_seconds = h("load_seconds", "Loads", LAT, "model outcome")
        self.unload_seconds = h("unload_seconds", "Unloads", LAT, "model forced")
        self.forced_cancels = c("forced_cancels", "Requests ended by force-unload", "model")
        self.wedges = c("wedges", "Engines declared wedged", "model")
        self.crashes = c("crashes", "Engine exits nobody asked for", "model")
        self.restarts = c("restarts", "Restarts after a crash or wedge", "model")
        self.identity_mismatch = c("identity_mismatch", "Loads refused by the identity check", "model")
        self.gate_blocked = g("gate_blocked", "1 while a model's gate is blocked", "model")
        self.leases_held = g("leases_held", "Keep-awake leases held", "")
        self.host_awake = g("host_awake", "1 while a host answers its probe", "host")
        self.host_transitions = c("host_transitions", "State changes of hosts", "host from to cause")
        self.host_hook_failures = c("host_hook_failures", "Wake and idle hooks that failed", "host hook")
        self.upstream_errors = c("upstream_errors", "Failed exchanges with engines", "model kind")
        self.client_disconnects = c("client_disconnects", "Clients that left early, by state", "model state")
        self.build_info = g("build_info", "Always 1", "version engine_build patch_series")

    def on_render(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` before every rendering: for gauges that are read off a state, such as ages."""
        self._refreshers.append(refresh)

    def render(self) -> bytes:
        """Return the registry in the text exposition format."""
        self.refresh()
        return self.text()

    def refresh(self) -> None:
        """Bring the gauges up to date; on the event loop's thread, for they are read off live state."""
        for refresh in self._refreshers:
            refresh()

    def text(self) -> bytes:
        """Return the registry as it is, without refreshing: fit for another thread."""
        return generate_latest(self.registry)

    def forget_model(self, model: str) -> None:
        """Drop every series of a model that no longer exists."""
        for metric in self._all:
            if "model" in metric._labelnames:  # noqa: SLF001 - no public list of label names
                metric.remove_by_labels({"model": model})

    def forget_backend(self, model: str, backend: str) -> None:
        """Drop every series of one of a model's engines."""
        for metric in self._all:
            if "backend" in metric._labelnames:  # noqa: SLF001 - as above
                metric.remove_by_labels({"model": model, "backend": backend})

    def _counter(self, name: str, text: str, labels: str) -> Counter:
        return self._keep(Counter(PREFIX + name, text, labels.split(), registry=self.registry))

    def _gauge(self, name: str, text: str, labels: str) -> Gauge:
        return self._keep(Gauge(PREFIX + name, text, labels.split(), registry=self.registry))

    def _histogram(self, name: str, text: str, buckets: Iterable[float], labels: str) -> Histogram:
        return self._keep(
            Histogram(PREFIX + name, text, labels.split(), buckets=tuple(buckets), registry=self.registry)
        )

    def _keep(self, metric: _M) -> _M:
        self._all.append(metric)
        return metric
