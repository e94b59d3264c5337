"""Which llama-server a model gets, and whether a started one is the binary that was built."""

import asyncio
import contextlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from proxy.backends import EngineBinary
from proxy.engine import EngineToolError, HashCache, verify_process
from proxy.errors import ErrorCode, ProxyError
from proxy.settings import Model, Settings

PROBE_TIMEOUT_S: Final = 10.0
_File = tuple[int, int, int, int]
"""Device, inode, size and time of change: another one is another file."""


class Engines:
    """Finds the llama-server of a model, and whether it carries our patch.

    `default` serves every model that names no engine of its own. What a binary says of itself
    (`--help`) is asked once per file, and again when another file stands in its place.
    """

    def __init__(self, settings: Settings, default: EngineBinary | None) -> None:
        self._default = default
        self._settings = settings
        self._known: dict[Path, tuple[_File, EngineBinary]] = {}

    async def __call__(self, model: Model) -> EngineBinary:
        """Return the engine of `model`; `ProxyError` (`model_load_failed`) when there is none."""
        if model.engine is not None:
            return await self._named(model.engine, "engine")
        if self._settings.engine.dir != "auto":
            return await self._named(self._settings.engine.dir, "engine.dir")
        if self._default is None:
            text = "no engine: run `llama-proxy engine build`, or set engine.dir to a llama-server"
            raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, text)
        return self._default

    async def _named(self, text: str, field: str) -> EngineBinary:
        server = server_at(text)
        file = None if server is None else _file(server)
        if server is None or file is None:
            raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, f"{field}: there is no llama-server at {text}")
        known, engine = self._known.get(server, (None, None))
        if engine is None or file != known:
            engine = await inspect_engine(server)
            self._known[server] = file, engine
        return replace(engine, dir=_manifest(server))


def _file(path: Path) -> _File | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _manifest(server: Path) -> Path | None:
    return server.parent if (server.parent / "manifest.json").is_file() else None


def server_at(text: str) -> Path | None:
    """Return the llama-server that a file or folder name stands for, None where there is none."""
    path = Path(text).expanduser()
    places = (path, path / "llama-server", path / "bin" / "llama-server")
    return next((place for place in places if place.is_file() and os.access(place, os.X_OK)), None)


async def inspect_engine(server: Path) -> EngineBinary:
    """Ask a llama-server which flags it knows; `ProxyError` with its own words when it does not run."""
    try:
        process = await asyncio.create_subprocess_exec(
            str(server), "--help", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, f"{server} cannot be run: {error.strerror}") from None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            out, _ = await process.communicate()
    except TimeoutError:
        raise ProxyError(ErrorCode.MODEL_LOAD_FAILED, f"{server} --help does not answer") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        words = out.decode(errors="replace").strip()[-300:]
        raise ProxyError(
            ErrorCode.MODEL_LOAD_FAILED, f"{server} --help ended with {process.returncode}: {words}"
        )
    return EngineBinary(path=server, patched=b"--phase-policy" in out, dir=_manifest(server))


class IdentityCheck:
    """Checks a started process against its engine's manifest, off the event loop."""

    def __init__(self) -> None:
        self._hashes = HashCache()

    async def __call__(self, pid: int, folder: Path) -> str:
        """Return `verified`; `ProxyError` (`identity_mismatch`) naming file and identities otherwise."""
        try:
            wrong = await asyncio.to_thread(partial(verify_process, pid, folder, cache=self._hashes))
        except EngineToolError as error:
            raise ProxyError(ErrorCode.IDENTITY_MISMATCH, error.message) from None
        if wrong:
            raise ProxyError(ErrorCode.IDENTITY_MISMATCH, "; ".join(str(item) for item in wrong[:3]))
        return "verified"
