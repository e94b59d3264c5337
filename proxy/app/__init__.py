"""Composition: the only place that knows admission, backends, engine and the HTTP surface together.

`engines` finds and checks llama-servers, `parts` wires one proxy, `describe` shows its models, `running`
is its life as a process.
"""

from proxy.app.engines import Engines, inspect_engine, server_at
from proxy.app.parts import Proxy
from proxy.app.running import Listening, serve, with_overrides
from proxy.backends import EngineBinary

__all__ = [
    "EngineBinary",
    "Engines",
    "Listening",
    "Proxy",
    "inspect_engine",
    "serve",
    "server_at",
    "with_overrides",
]
