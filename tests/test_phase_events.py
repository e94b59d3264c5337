"""Phase events: one per change of an engine's phase or cohort, however many engines a model has."""

from types import SimpleNamespace

from proxy.app.parts import _Observer
from proxy.errors import ErrorCode, ProxyError
from proxy.types import BackendKey, EnginePhase, Snapshot


def test_engines_of_one_model_do_not_hide_each_others_phase():
    published = []
    proxy = SimpleNamespace(
        reconciler=SimpleNamespace(take=lambda _: None, forget=lambda _: None),
        admission=SimpleNamespace(backend_down=lambda *_: None),
        hub=SimpleNamespace(
            publish=lambda kind, data: published.append((kind, data["backend"], data["phase"]))
        ),
    )
    observer = _Observer(proxy)

    def see(backend, phase):
        key = BackendKey("m", backend, 1)
        observer.on_snapshot(Snapshot(key, 0.0, 0.0, (), native=True, phase=phase, cohort=1))

    for _ in range(3):
        see("a", EnginePhase.GENERATE)
        see("b", EnginePhase.IDLE)
    see("b", EnginePhase.GENERATE)
    assert published == [("phase", "a", "generate"), ("phase", "b", "idle"), ("phase", "b", "generate")]
    observer.on_down(BackendKey("m", "a", 1), ProxyError(ErrorCode.UPSTREAM_ERROR, "gone"))
    see("a", EnginePhase.GENERATE)
    assert published[3:] == [("phase", "a", "generate")]
