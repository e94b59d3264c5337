"""Keeps what an engine's slots hold over an unload: saved after the drain, restored at the next load.

Off unless a model asks for it (`slot_cache`): a long context takes gigabytes on disk. A failure costs the cache and
nothing else: it is said in the log, and the prompt is simply read again.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from proxy import logs
from proxy.backends.client import EngineClient
from proxy.state import StateDir, file_name
from proxy.types import EngineInfo
from proxy.upstream import UpstreamDied, UpstreamRequest

FOLDER: Final = "slots"
SAVE_S: Final = 60.0
RESTORE_S: Final = 60.0
"""For all slots of a model together."""
_ANSWER_BYTES: Final = 1 << 20
_log = logs.get("backends")


class SlotCache:
    """One model's saved slots. `recipe` is the fingerprint of the configuration that they belong to."""

    def __init__(self, state: StateDir, model: str, recipe: str) -> None:
        self._state = state
        self._model = model
        self._recipe = recipe
        self._index = f"{FOLDER}/{file_name(model)[:100]}.json"

    def folder(self) -> Path | None:
        """Return the folder that the engine gets as `--slot-save-path`, None where nothing can be kept."""
        above = self._state.folder(FOLDER)
        if above is None:
            return None
        folder = above / file_name(self._model)[:100]
        try:
            folder.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            _log.warning("slots cannot be kept", model=self._model, folder=str(folder), error=error.strerror)
            return None
        return folder

    async def save(self, client: EngineClient, info: EngineInfo) -> int:
        """Save every slot of an engine that does nothing; return how many tokens are kept."""
        kept: dict[str, int] = {}
        try:
            async with asyncio.timeout(SAVE_S):
                for slot in range(info.slots):
                    answer = await _act(client, slot, "save")
                    if int(answer.get("n_saved") or 0) > 0:
                        kept[str(slot)] = int(answer["n_saved"])
        except (TimeoutError, UpstreamDied, ValueError) as error:
            _log.warning(
                "slots were not all saved", model=self._model, error=str(error) or "it took too long"
            )
        data = {"recipe": self._recipe, "build": info.build, "slots": kept}
        problem = (
            "" if not kept else await asyncio.to_thread(self._state.write, self._index, data, durable=False)
        )
        if problem or not kept:
            # a full disk must not be left fuller
            await asyncio.to_thread(self._discard)
            return 0
        _log.info("slots saved", model=self._model, slots=len(kept), tokens=sum(kept.values()))
        return sum(kept.values())

    async def restore(self, client: EngineClient, info: EngineInfo) -> int:
        """Give an engine that has just become ready its slots back; return how many tokens it has now."""
        saved = await asyncio.to_thread(self._state.read, self._index, _decode)
        if not saved:
            # of a save that was not finished
            await asyncio.to_thread(self._discard)
            return 0
        tokens = 0
        try:
            if (saved["recipe"], saved["build"]) == (self._recipe, info.build):
                async with asyncio.timeout(RESTORE_S):
                    for slot in saved["slots"]:
                        answer = await _act(client, int(slot), "restore")
                        tokens += int(answer.get("n_restored") or 0)
                _log.info("slots restored", model=self._model, tokens=tokens)
        except (TimeoutError, UpstreamDied, ValueError) as error:
            _log.warning(
                "slots were not all restored", model=self._model, error=str(error) or "it took too long"
            )
        await asyncio.to_thread(self._discard)
        return tokens

    def _discard(self) -> None:
        """Remove what was saved; the folder stays, an engine may have been told to use it."""
        self._state.remove(self._index)
        folder = self.folder()
        with contextlib.suppress(OSError):
            for file in folder.iterdir() if folder is not None else ():
                file.unlink()


async def _act(client: EngineClient, slot: int, action: str) -> Mapping[str, Any]:
    """Ask the engine to save or restore one slot. Raises `UpstreamDied`, or `ValueError` with its words."""
    body = orjson.dumps({"filename": f"slot-{slot}.bin"})
    headers = (("Content-Type", "application/json"),)
    exchange = await client.open(UpstreamRequest("POST", f"/slots/{slot}?action={action}", headers, body))
    try:
        raw = await exchange.read(_ANSWER_BYTES)
        if exchange.head.status != 200:
            raise ValueError(f"{action} of slot {slot}: {raw[:200].decode('utf-8', 'replace')}")
        answer = orjson.loads(raw)
    finally:
        exchange.close()
    if not isinstance(answer, dict):
        raise ValueError(f"{action} of slot {slot}: no object")  # noqa: TRY004 - one error for bad answers
    return answer


def _decode(data: Any) -> dict[str, Any]:
    return {
        "recipe": str(data["recipe"]),
        "build": str(data["build"]),
        "slots": {str(int(slot)): int(tokens) for slot, tokens in data["slots"].items()},
    }
