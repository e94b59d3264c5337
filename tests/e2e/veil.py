"""A program that runs an engine and stands before it: while the file `cut` exists, it swallows every question for
the engine's slots.

    python veil.py FOLDER PORT ENGINE [ARGUMENT…]

The engine gets a port of its own, written to `FOLDER/port`; each swallowed question adds a byte to
`FOLDER/swallowed`. TERM ends both.
"""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path


async def main() -> None:
    folder, port, *command = sys.argv[1:]
    cut, swallowed = Path(folder) / "cut", Path(folder) / "swallowed"
    # kept to the end: nobody else is given the port, and the engine allows its address to be used again
    held = socket.socket()
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        held.setsockopt(socket.SOL_SOCKET, option, 1)
    held.bind(("127.0.0.1", 0))
    own = held.getsockname()[1]
    # the proxy's key is for the proxy; strangers may come, too
    env = {name: value for name, value in os.environ.items() if name != "LLAMA_API_KEY"}
    engine = await asyncio.create_subprocess_exec(
        *command, "--host", "127.0.0.1", "--port", str(own), env=env
    )

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, asks: bool) -> None:
        try:
            while some := await source.read(65536):
                if asks and some.startswith(b"GET /slots") and cut.exists():
                    with swallowed.open("ab") as file:
                        file.write(b".")
                else:
                    sink.write(some)
                    await sink.drain()
        except ConnectionError:
            pass
        finally:
            sink.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", own)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(pump(reader, back, asks=True), pump(there, writer, asks=False))

    server = await asyncio.start_server(relay, "127.0.0.1", int(port))
    (Path(folder) / "port").write_text(str(own))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, engine.kill)
    await engine.wait()
    server.close()
    held.close()


if __name__ == "__main__":
    asyncio.run(main())
