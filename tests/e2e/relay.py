"""Two things that stand behind a proxy in tests: a relay that keeps what passes, and a backend at our own pace."""

import socket
import threading
from typing import Self


class Relay:
    """Passes TCP connections on to a port of this machine and keeps their bytes. Use as a context manager."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.kept: list[tuple[bytearray, bytearray]] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            engine = socket.create_connection(("127.0.0.1", self.target))
            kept = (bytearray(), bytearray())
            self.kept.append(kept)
            self._open += [client, engine]
            for source, sink, store in ((client, engine, kept[0]), (engine, client, kept[1])):
                threading.Thread(target=_pump, args=(source, sink, store), daemon=True).start()

    def answer_to(self, request: bytes) -> bytes:
        """Return the payload that the engine sent in answer to the one request that starts so."""
        [(asked, answers)] = [(bytes(asked), bytes(sent)) for asked, sent in self.kept if request in asked]
        for _ in range(asked[: asked.index(request)].count(b" HTTP/1.1\r\n")):
            _, answers = _first_answer(answers)
        return _first_answer(answers)[0]


def _first_answer(answers: bytes) -> tuple[bytes, bytes]:
    """Return the payload of the first of several answers, and the bytes of the others."""
    head, _, body = answers.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        return dechunked(body)
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return body[:length], body[length:]


def _pump(source: socket.socket, sink: socket.socket, store: bytearray) -> None:
    try:
        while data := source.recv(65536):
            store += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def dechunked(body: bytes) -> tuple[bytes, bytes]:
    """Return the payload of a chunked body and what follows it; ValueError when it is cut."""
    payload = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        payload, body = payload + body[:length], body[length + 2 :]
        if length == 0:
            return payload, body


PACED = """
import asyncio, json, sys

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" t%d"},"finish_reason":null}],"created":1,"id":"c","object":"chat.completion.chunk"}\\n\\n'
SLOTS = [{"id": number, "n_ctx": 1024, "speculative": False, "is_processing": False} for number in range(4)]
PROPS = {"total_slots": 4, "default_generation_settings": {"n_ctx": 1024}, "model_path": "x", "build_info": "b1-x"}

async def serve(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
            length = head.partition("content-length:")[2].partition("\\r\\n")[0]
            await reader.readexactly(int(length or 0))
            path = head.split()[1]
            if path != "/v1/chat/completions":
                value = SLOTS if path.startswith("/slots") else PROPS if path == "/props" else {"status": "ok"}
                data = json.dumps(value).encode()
                writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n%s" % (len(data), data))
                continue
            writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n")
            for event in (*(EVENT % number for number in range(500)), b"data: [DONE]\\n\\n"):
                writer.write(b"%x\\r\\n%s\\r\\n" % (len(event), event))
                await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            writer.write(b"0\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
"""A program: a stock-like backend that writes the next event for each line it gets, and first its port to standard output."""
