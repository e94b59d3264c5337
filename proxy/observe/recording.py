"""Recordings on disk: JSON lines, one record each, the header first.

Every record is one write of one whole line to the end of the file, without a buffer in between: a process that is killed loses at
most the line it was writing, and a reader leaves out a last line that is not whole.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, NoReturn, Self

from proxy.observe.records import FORMAT, VERSION, Event, Header, Record, RecordError, Sample, decode, encode
from proxy.types import PhaseEvent

_MODE: Final = 0o600
"""An engine's log may hold what users wrote."""


_LINE: Final = 32 << 20
"""More than any record has: what is longer is another kind of file."""


class RecordingError(Exception):
    """A recording cannot be written or read; the message names the file and what to do."""


def line_of(record: Record) -> bytes:
    """Return the record as one line."""
    return json.dumps(encode(record), separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


class Recorder:
    """Writes a new recording. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Create the file; one that is there already is never written to. Raises `RecordingError`."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, _MODE)
        except FileExistsError:
            raise RecordingError(f"{path} exists; choose another name, or remove it first") from None
        except OSError as error:
            raise RecordingError(f"cannot write {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Append one record. Raises `RecordingError`, for example when the disk is full."""
        left = memoryview(line_of(record))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise RecordingError(f"cannot write {self._path}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Recording:
    """Reads a recording: `header`, then the other records by iterating once. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Open it and read its header. Raises `RecordingError`."""
        self._path = path
        self.notes: list[str] = []
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror}") from None
        try:
            self.header = self._header(self._file.readline(_LINE))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Record]:
        pending: dict[int, list[PhaseEvent]] = {}
        number = 1
        while line := self._file.readline(_LINE):
            number += 1
            if not line.endswith(b"\n") and len(line) < _LINE:
                self.notes.append(f"line {number} is cut: the recording was ended while it was written")
                return
            record = self._record(line, number)
            if isinstance(record, Event):
                pending.setdefault(record.server, []).append(record.event)
            elif isinstance(record, Sample):
                record = _with_events(record, pending.pop(record.server, []))
            yield record

    def _header(self, line: bytes) -> Header:
        if not line.endswith(b"\n"):
            raise RecordingError(
                f"{self._path} is no recording: it is empty, or its first line is cut"
                if len(line) < _LINE
                else f"{self._path} is no recording of `llama-proxy watch --record`"
            )
        header = self._record(line, 1)
        if not isinstance(header, Header) or header.format != FORMAT:
            raise RecordingError(f"{self._path} is no recording of `llama-proxy watch --record`")
        if header.version != VERSION:
            raise RecordingError(
                f"{self._path} has version {header.version}, this llama-proxy reads version {VERSION}"
            )
        return header

    def _record(self, line: bytes, number: int) -> Record:
        try:
            return decode(json.loads(line, parse_constant=_no_number))
        except (ValueError, RecursionError) as error:
            words = str(error) if isinstance(error, RecordError) else f"not JSON: {error}"
            raise RecordingError(f"{self._path}, line {number}: {words}") from None


def _with_events(sample: Sample, events: list[PhaseEvent]) -> Sample:
    return replace(sample, report=replace(sample.report, events=tuple(events)))


def _no_number(word: str) -> NoReturn:
    raise RecordError(f"{word} is no number")
