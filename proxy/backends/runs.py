"""Run records on disk, the processes they speak of, and the end of those that nobody owns any more."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from proxy import logs
from proxy.backends.output import open_for_engine
from proxy.backends.runrecord import TOKEN_VARIABLE, RunRecord, Seen, Verdict, decode, encode, judge
from proxy.clock import boot_id, wall
from proxy.state import StateDir, file_name

FOLDER: Final = "runs"
OUTPUT_FOLDER: Final = "logs"
TERM_S: Final = 1.0
GONE_S: Final = 2.0
REAP_ROUNDS: Final = 3
OUTLAST_S: Final = 300.0
_LOOK_S: Final = 0.02
_OUTLAST_LOOK_S: Final = 0.1
_VARIABLE: Final = f"{TOKEN_VARIABLE}=".encode()
_log = logs.get("backends")


class RunStore:
    """Writes records around the life of each process. Without a state folder it does nothing."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._known: dict[str, RunRecord] = {}

    def known(self, model: str) -> tuple[RunRecord, ...]:
        """Return the records of a model's processes that this proxy started or found and has not seen the end of."""
        return tuple(record for record in self._known.values() if record.model == model)

    @property
    def kept(self) -> bool:
        """Whether a kept engine could be found again."""
        return self._state.kept

    def output(self, model: str) -> Path | None:
        """Return the file for the output of a model that outlives the proxy; None where it cannot be written."""
        folder = self._state.folder(OUTPUT_FOLDER)
        if folder is None:
            return None
        file = folder / f"{file_name(model)}.log"
        try:
            os.close(open_for_engine(file))
        except OSError as error:
            _log.warning("output cannot be written", model=model, path=str(file), error=error.strerror)
            return None
        return file

    async def intend(
        self, model: str, *, keep: bool, recipe: str, api_key: str, output: Path | None, files: str = ""
    ) -> RunRecord:
        """Write down that a process is about to be started; return the record with its token.

        Where it cannot be written the record that is returned says not to keep the process: nobody would find it again.
        """
        record = RunRecord(
            model=model,
            token=secrets.token_hex(16),
            keep=keep,
            boot=boot_id(),
            recipe=recipe,
            api_key=api_key if keep else "",
            started_wall=wall(),
            output=str(output or ""),
            files=files,
        )
        try:
            problem = await self._write(record)
        except BaseException:
            self.forget(record)
            raise
        if keep and problem:
            why = f"{problem}: it will stop with the proxy"
            _log.warning("an engine cannot be kept", model=model, problem=why)
            record = self._known[record.token] = replace(record, keep=False, api_key="", output="")
        return record

    async def started(self, record: RunRecord, pid: int) -> RunRecord:
        """Note the process."""
        seen = look(pid)
        record = replace(record, pid=pid, born=seen.born if seen else 0)
        await self._write(record)
        return record

    async def ready(self, record: RunRecord, *, port: int, build: str) -> RunRecord:
        """Note what makes it recognizable: now it runs the engine and no launcher any more."""
        seen = look(record.pid)
        if seen is None:
            return record
        record = replace(record, born=seen.born, exe=seen.exe, port=port, build=build)
        await self._write(record)
        return record

    def renounce(self, record: RunRecord) -> None:
        """Note at once that the process is being ended: should the proxy die now, nobody may take it over."""
        if record.keep and self._state.kept:
            self._state.write(_name(record), encode(replace(record, keep=False)), durable=False)

    def forget(self, record: RunRecord) -> None:
        """Remove the record of a process that is gone."""
        self._known.pop(record.token, None)
        self._state.remove(_name(record))

    async def outlast(self, records: Sequence[RunRecord], left: Iterable[int]) -> None:
        """Forget records once the processes that outlived a KILL are gone; after `OUTLAST_S` they stay for `reconcile`.

        `left` are the process ids that were told to be left, beside those of the records.
        """
        pids = {*left, *(record.pid for record in records)}
        born = {pid: seen.born for pid in pids if (seen := look(pid)) is not None}
        deadline = time.monotonic() + OUTLAST_S
        while any((seen := look(pid)) is not None and seen.born == at for pid, at in born.items()):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(_OUTLAST_LOOK_S)
        tokens = {process.token for process in (await asyncio.to_thread(processes)).values()}
        for record in records:
            if record.token not in tokens:
                self.forget(record)

    async def _write(self, record: RunRecord) -> str:
        """Return an empty text, or why the record will not be found."""
        self._known[record.token] = record
        if not self._state.kept:
            return self._state.problem or "no state folder is in use"
        if self._state.folder(FOLDER) is None:
            return f"there is no folder {FOLDER}"
        writing = asyncio.ensure_future(
            asyncio.to_thread(self._state.write, _name(record), encode(record), durable=False)
        )
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            # the file comes all the same: whoever removes it has to come after it
            await asyncio.wait((writing,))
            raise

    async def survey(
        self, recipe: Callable[[str], str | None], wanted: Callable[[str], bool]
    ) -> list[tuple[RunRecord, Verdict]]:
        """Judge every record left by an earlier proxy. The files of those that are gone are removed."""
        records = await asyncio.to_thread(self._records)
        if not records:
            return []
        seen = await asyncio.to_thread(processes)
        found = []
        for record in records:
            verdict = judge(
                record, seen, boot=boot_id(), recipe=recipe(record.model), wanted=wanted(record.model)
            )
            _log.info(
                "engine of an earlier proxy",
                model=record.model,
                pid=record.pid,
                fate=verdict.fate.value,
                why=verdict.why,
            )
            self._known[record.token] = record
            found.append((record, verdict))
        return found

    async def reap(self, record: RunRecord, pids: Sequence[int]) -> tuple[int, ...]:
        """End the processes that carry the record's token, and forget it; return what outlived a KILL."""
        left: tuple[int, ...] = ()
        for _ in range(REAP_ROUNDS):
            left = await end_bearers(record.token, pids)
            # one that was being forked while we looked has the token, too
            seen = await asyncio.to_thread(processes) if pids else {}
            pids = [pid for pid, process in seen.items() if process.token == record.token]
            if not pids:
                break
        if left:
            _log.error("processes survived a kill", model=record.model, left=left)
        else:
            self.forget(record)
        return left

    async def reap_unclaimed(self, record: RunRecord | None) -> tuple[int, ...] | None:
        """End what a record speaks of, unless its end was seen; return what outlived a KILL, None for nothing to end."""
        if record is None or record.token not in self._known:
            return None
        return await self.reap(record, [record.pid])

    def _records(self) -> list[RunRecord]:
        found = (self._state.read(name, decode) for name in self._state.names(FOLDER))
        return [record for record in found if record is not None]


def _name(record: RunRecord) -> str:
    return f"{FOLDER}/{file_name(record.model)[:90]}.{record.token[:12]}.json"


def look(pid: int) -> Seen | None:
    """Return what the kernel says of a process; None for none and for a zombie."""
    folder = Path(f"/proc/{pid}")
    try:
        # the name in parentheses may hold anything; what follows the last one is state, parent, …
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            return None
        born = int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
    token, exe = "", None
    with suppress(OSError):
        for variable in (folder / "environ").read_bytes().split(b"\0"):
            if variable.startswith(_VARIABLE):
                token = variable[len(_VARIABLE) :].decode("ascii", "replace")
    with suppress(OSError):
        found = (folder / "exe").stat()
        exe = (found.st_dev, found.st_ino)
    return Seen(pid, born, token, exe)


def processes() -> Mapping[int, Seen]:
    """Return every process this user may look into, by id."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return {pid: seen for pid in pids if (seen := look(pid)) is not None}


def claim(record: RunRecord) -> int | None:
    """Return a pidfd of the recorded process, None when it is not (any more) that one.

    The descriptor comes first and the check second, so that it cannot be another process by the time it is used.
    """
    try:
        pidfd = os.pidfd_open(record.pid)
    except OSError:
        return None
    seen = look(record.pid)
    if (
        seen is not None
        and (seen.born, seen.token, seen.exe) == (record.born, record.token, record.exe)
        and record.boot == boot_id()
    ):
        return pidfd
    os.close(pidfd)
    return None


async def end_bearers(token: str, pids: Iterable[int]) -> tuple[int, ...]:
    """TERM, then KILL the processes that carry a token, and wait until they are gone; return those that are not.

    Each is signalled through a descriptor that was opened before its token was read: never a stranger.
    """
    held: dict[int, int] = {}
    try:
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                continue
            seen = look(pid)
            if seen is not None and seen.token == token:
                held[pid] = pidfd
            else:
                os.close(pidfd)
        for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, GONE_S)):
            for pidfd in held.values():
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(pidfd, number)
            await _gone(held, time.monotonic() + wait_s)
        return tuple(sorted(pid for pid in held if look(pid) is not None))
    finally:
        for pidfd in held.values():
            os.close(pidfd)


async def _gone(pids: Iterable[int], until: float) -> None:
    """Wait until none of the processes runs, or the time is over."""
    for pid in pids:
        while look(pid) is not None:
            if time.monotonic() > until:
                return
            await asyncio.sleep(_LOOK_S)
