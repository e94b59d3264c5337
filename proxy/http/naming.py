"""Models by the names that clients and operators give them."""

from typing import Final

from proxy.catalog import Catalog
from proxy.errors import ErrorCode, ProxyError

_SHOWN: Final = 200
"""Characters of a name that is sent back: a request may hold a very long one."""


def model_of(name: str, catalog: Catalog) -> str:
    """Return the id of a model by id or alias; raises 404 `model_not_found`."""
    model = catalog.resolve(name)
    if model is None:
        raise no_such_model(name)
    return model


def no_such_model(name: str) -> ProxyError:
    """Return the error for a name that is nobody's, or nobody's that the caller may know of."""
    shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "…"
    text = f"the model {shown!r} does not exist: GET /v1/models lists the names"
    return ProxyError(ErrorCode.MODEL_NOT_FOUND, text, param="model")
