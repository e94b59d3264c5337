"""The errors that people get from a model's life. Pure."""

from proxy.backends.lifecycle import LoadRefused
from proxy.errors import ErrorCode, ProxyError
from proxy.types import AdminState, Cause


def gone(model: str, cause: Cause) -> ProxyError:
    """Return what those are told whose backend is stopped."""
    match cause:
        case Cause.SHUTDOWN:
            return ProxyError(ErrorCode.SHUTTING_DOWN, "the proxy is shutting down")
        case Cause.WEDGE:
            return ProxyError(ErrorCode.UPSTREAM_WEDGED, f"the engine of model {model!r} made no progress")
        case _:
            return ProxyError(ErrorCode.MODEL_UNLOADED, f"model {model!r} was unloaded ({cause.value})")


def refused(model: str, effect: LoadRefused) -> ProxyError:
    """Return what a request is told whose load the operator's gate forbids."""
    code = ErrorCode.GATE_BLOCKED if effect.admin is AdminState.BLOCKED else ErrorCode.MODEL_DRAINING
    why = f": {effect.reason}" if effect.reason else ""
    return ProxyError(code, f"model {model!r} is {effect.admin.value}{why}")


def too_soon(model: str, before: ProxyError | None, strikes: int, left_s: float) -> ProxyError:
    """Return the last failure again, with the time of the next try."""
    code = before.code if before else ErrorCode.MODEL_LOAD_FAILED
    words = before.message if before else f"model {model!r} could not be loaded"
    text = f"{words} (failed {strikes} times in a row; it will be tried again in {left_s:.0f} s)"
    return ProxyError(code, text, retry_after_s=left_s)
