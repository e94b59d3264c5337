"""Keeps what an engine's slots hold over an unload: saved after the drain, restored at the next load.

Off unless a model asks for it (`slot_cache`): a long context takes gigabytes on disk. A failure costs the cache and
nothing else: it is said in the log, and the prompt is simply read again.

What is saved belongs to one configuration, one build and the very files that the model was read from: given to other
weights of the same shape it would be taken, and answers would be wrong without an error.
"""

import asyncio
import contextlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from proxy import logs
from proxy.backends import modelfile
from proxy.backends.client import EngineClient, ProbeError
from proxy.backends.runrecord import recipe_of
from proxy.settings import Engine, Model
from proxy.state import StateDir, file_name
from proxy.types import EngineInfo
from proxy.upstream import UpstreamRequest

FOLDER: Final = "slots"
SAVE_S: Final = 60.0
RESTORE_S: Final = 60.0
"""For all slots of a model together."""
_log = logs.get("backends")


class SlotCache:
    """One model's saved slots, of this configuration."""

    def __init__(self, state: StateDir, name: str, model: Model, defaults: Engine) -> None:
        self._state = state
        self._model = name
        self._recipe = recipe_of(model, defaults)
        self._path = model.path or Path()
        self._words = (*defaults.args, *model.args, *defaults.env.values(), *model.env.values())
        self._base = model.cwd or Path()
        self._stem = _stem(name)
        self._index = f"{FOLDER}/{self._stem}.json"

    async def files(self) -> str:
        """Return what tells the model's files as they are now from others; take it before an engine is started."""
        return await asyncio.to_thread(modelfile.identity, self._path, self._words, self._base)

    def folder(self) -> Path | None:
        """Return the folder that the engine gets as `--slot-save-path`, None where nothing can be kept."""
        above = self._state.folder(FOLDER)
        if above is None:
            return None
        folder = above / self._stem
        try:
            folder.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            _log.warning("slots cannot be kept", model=self._model, folder=str(folder), error=error.strerror)
            return None
        return folder

    async def save(self, client: EngineClient, info: EngineInfo, files: str) -> int:
        """Save every slot of an engine that does nothing; return how many tokens are kept.

        `files` are what they were before it was started: when they are others now, nothing is worth keeping.
        """
        if not files or files != await self.files():
            _log.info("slots not saved: the model's files have changed", model=self._model)
            await self.discard()
            return 0
        kept: dict[str, int] = {}
        try:
            async with asyncio.timeout(SAVE_S):
                for slot in range(info.slots):
                    answer = await _act(client, slot, "save", SAVE_S)
                    if int(answer.get("n_saved") or 0) > 0:
                        kept[str(slot)] = int(answer["n_saved"])
        except (TimeoutError, ProbeError, ValueError) as error:
            _log.warning(
                "slots were not all saved", model=self._model, error=str(error) or "it took too long"
            )
        data = {"recipe": self._recipe, "build": info.build, "files": files, "slots": kept}
        problem = (
            "" if not kept else await asyncio.to_thread(self._state.write, self._index, data, durable=False)
        )
        if problem or not kept:
            # a full disk must not be left fuller
            await self.discard()
            return 0
        _log.info("slots saved", model=self._model, slots=len(kept), tokens=sum(kept.values()))
        return sum(kept.values())

    async def restore(self, client: EngineClient, info: EngineInfo, files: str) -> int:
        """Give an engine that has just become ready its slots back; return how many tokens it has now.

        `files` are what they were before it was started: others by now may be the ones that it has read.
        """
        saved = await asyncio.to_thread(self._state.read, self._index, _decode)
        if not saved:
            # of a save that was not finished
            await self.discard()
            return 0
        tokens = 0
        try:
            now = (self._recipe, info.build, files)
            if (
                files
                and (saved["recipe"], saved["build"], saved["files"]) == now
                and files == await self.files()
            ):
                async with asyncio.timeout(RESTORE_S):
                    for slot in saved["slots"]:
                        answer = await _act(client, int(slot), "restore", RESTORE_S)
                        tokens += int(answer.get("n_restored") or 0)
                _log.info("slots restored", model=self._model, tokens=tokens)
        except (TimeoutError, ProbeError, ValueError) as error:
            _log.warning(
                "slots were not all restored", model=self._model, error=str(error) or "it took too long"
            )
        await self.discard()
        return tokens

    async def discard(self) -> None:
        """Remove what was saved; the folder stays, an engine may have been told to use it."""
        await asyncio.to_thread(self._discard)

    async def abandon(self) -> None:
        """Remove what was saved and the folder: nothing will be saved there."""
        await asyncio.to_thread(_remove, self._state, self._stem)

    def _discard(self) -> None:
        self._state.remove(self._index)
        folder = self.folder()
        with contextlib.suppress(OSError):
            for file in folder.iterdir() if folder is not None else ():
                file.unlink()


def cache_of(state: StateDir, name: str, model: Model, defaults: Engine) -> SlotCache | None:
    """Return the cache of a model that wants one."""
    return SlotCache(state, name, model, defaults) if _wanted(model) else None


async def sweep(state: StateDir, models: Mapping[str, Model]) -> None:
    """Remove what no model wants to be kept: the configuration may have changed while no proxy ran."""
    await asyncio.to_thread(_sweep, state, {_stem(name) for name, model in models.items() if _wanted(model)})


def _wanted(model: Model) -> bool:
    return model.slot_cache and model.path is not None


def _sweep(state: StateDir, kept: Container[str]) -> None:
    folder = state.path / FOLDER if state.path is not None else None
    with contextlib.suppress(OSError):
        for stem in {file.name.partition(".")[0] for file in folder.iterdir()} if folder is not None else ():
            if stem and stem not in kept:
                _log.info("saved slots removed", of=stem)
                _remove(state, stem)


def _stem(model: str) -> str:
    return file_name(model)[:100]


def _remove(state: StateDir, stem: str) -> None:
    state.remove(f"{FOLDER}/{stem}.json")
    if state.path is None:
        return
    folder = state.path / FOLDER / stem
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


async def _act(client: EngineClient, slot: int, action: str, timeout_s: float) -> Mapping[str, Any]:
    """Ask the engine to save or restore one slot. Raises `ProbeError`, or `ValueError` with its words."""
    body = orjson.dumps({"filename": f"slot-{slot}.bin"})
    headers = (("Content-Type", "application/json"),)
    request = UpstreamRequest("POST", f"/slots/{slot}?action={action}", headers, body)
    asked = await client.ask(request, timeout_s)
    if asked.status != 200:
        raise ValueError(f"{action} of slot {slot}: {asked.body[:200].decode('utf-8', 'replace')}")
    answer = orjson.loads(asked.body)
    if not isinstance(answer, dict):
        raise ValueError(f"{action} of slot {slot}: no object")  # noqa: TRY004 - one error for bad answers
    return answer


def _decode(data: Any) -> dict[str, Any]:
    return {
        "recipe": str(data["recipe"]),
        "build": str(data["build"]),
        "files": str(data.get("files", "")),
        "slots": {str(int(slot)): int(tokens) for slot, tokens in data["slots"].items()},
    }
