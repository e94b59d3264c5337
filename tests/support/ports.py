"""Ports that nobody else is given while a test needs them."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield a port of this address that nobody listens on, and that no other program is given meanwhile.

    Whoever is told of it may listen there, if it allows the address to be used again, as llama-server does.
    """
    with socket.socket() as held:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]
