"""What backends are told of requests: admission's books, in their words."""

from collections.abc import Callable

from proxy.admission import Admission
from proxy.backends import Gate, LiveRequests
from proxy.errors import ProxyError
from proxy.types import BackendKey


class Books:
    """The backends' `Requests` port. Admission is asked for when it is needed: it is made after the fleet."""

    def __init__(self, admission: Callable[[], Admission]) -> None:
        self._admission = admission

    def live(self, model: str) -> LiveRequests:
        """Return the model's tickets; one that is being ended counts only by the tag an engine may still work for."""
        live = self._admission().live(model)
        return LiveRequests(live.waiting, live.running, live.tags)

    def granted(self, key: BackendKey) -> int:
        """Return how many tickets hold a grant there, cancelled ones included."""
        view = self._admission().view(key.model)
        return next((backend.grants for backend in view.backends if backend.key == key), 0)

    def end(self, model: str, error: ProxyError) -> None:
        """End every ticket of the model."""
        self._admission().end_model(model, error)

    def gate(self, model: str, gate: Gate) -> None:
        """Pass a gate on."""
        self._admission().set_gate(model, gate.state, gate.reason, gate.mode)

    def check(self, model: str) -> tuple[str, ...]:
        """Return violations of admission's own rules; they concern all models, so every model shows them."""
        _ = model
        return tuple(self._admission().broken_rules())

    async def settled(self, model: str, timeout_s: float) -> bool:
        """Wait until nobody is past the queue."""
        return await self._admission().drained(model, timeout=timeout_s)
