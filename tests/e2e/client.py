"""A raw HTTP client over one socket: tests see what bytes arrive, when, and can vanish at any moment."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

OPEN: list[socket.socket] = []
"""Sockets of the running test; a fixture closes what the test left open."""


class RawStream:
    """One POST over its own socket. `events` are whole SSE events without their blank line."""

    def __init__(
        self, url: str, path: str, body: Any, timeout_s: float = 60.0, headers: dict[str, str] | None = None
    ) -> None:
        at = urlsplit(url)
        assert at.hostname is not None
        self.sock = socket.create_connection((at.hostname, at.port or 80), timeout=timeout_s)
        OPEN.append(self.sock)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = json.dumps(body).encode()
        extra = "".join(f"{k}: {v}\r\n" for k, v in (headers or {}).items())
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"{extra}Content-Length: {len(data)}\r\n\r\n"
        )
        self.sock.sendall(head.encode() + data)
        self.buffer = b""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.chunked = False
        self.ended = False
        self._cut = 0

    def _fill(self) -> bool:
        data = self.sock.recv(65536)
        self.buffer += data
        if not data:
            self.ended = True
        return bool(data)

    def head(self) -> int:
        """Read the response head; returns the status."""
        while b"\r\n\r\n" not in self.buffer:
            if not self._fill():
                raise ConnectionError("closed before the response head")
        raw, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
        lines = raw.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        self.chunked = self.headers.get("transfer-encoding", "") == "chunked"
        return self.status

    def chunk(self) -> bytes:
        """Return the next chunk of a chunked body, b"" at its proper end; ConnectionError when it is cut."""
        while True:
            line, sep, rest = self.buffer.partition(b"\r\n")
            if sep:
                size = int(line, 16)
                if len(rest) >= size + 2:
                    self.buffer = rest[size + 2 :]
                    return rest[:size]
            if not self._fill():
                raise ConnectionError("the chunked body was cut")

    def event(self) -> bytes:
        """Return the next whole SSE event, b"" at the end of the stream."""
        while b"\n\n" not in self.body:
            data = self.chunk()
            if not data:
                assert self.body == b"", f"half an event at the end: {self.body!r}"
                return b""
            self.body += data
        event, self.body = self.body.split(b"\n\n", 1)
        return event

    def rest(self) -> list[bytes]:
        """Return all further events until the end of the stream."""
        found = []
        while event := self.event():
            found.append(event)
        return found

    def whole(self) -> bytes:
        """Return the whole body of a response with a known or chunked length."""
        if self.chunked:
            parts = []
            while data := self.chunk():
                parts.append(data)
            return b"".join(parts)
        length = int(self.headers["content-length"])
        while len(self.buffer) < length:
            if not self._fill():
                raise ConnectionError("the body was cut")
        return self.buffer[:length]

    def close(self) -> None:
        """Vanish."""
        self.sock.close()


def data(event: bytes) -> Any:
    """Return the decoded `data:` of an event; None for a comment or the end marker."""
    for line in event.split(b"\n"):
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            return json.loads(line[6:])
    return None
