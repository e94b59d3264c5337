"""The directory of a measurement: what is measured, one evidence file per run, and who may write."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from proxy.bench.errors import BenchError
from proxy.bench.evidence import Result, parse_result

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from proxy.bench.matrix import Matrix, Run

MATRIX_NAME = "matrix.json"
_SAMPLED_BYTES = 1024 * 1024
_SHORT = 16


class Store:
    """One directory. Files in it appear whole, by rename; what is there is never written again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs = root / "runs"

    @contextlib.contextmanager
    def opened(self, matrix: Matrix) -> Iterator[None]:
        """Hold the directory for ``matrix``. Raises BenchError when it is of another one, or somebody else writes."""
        try:
            self._runs.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise BenchError(f"--out {self.root}: {error.strerror or error}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BenchError(
                    f"--out {self.root}: another measurement is writing there; wait for it or name another directory"
                ) from error
            self._claim(matrix.to_json())
            yield
        finally:
            os.close(descriptor)

    def _claim(self, wanted: dict[str, Any]) -> None:
        path = self.root / MATRIX_NAME
        if not any(self._runs.glob("*.json")):
            write_json(path, wanted)
            return
        there = read_json(path)
        if there == wanted:
            return
        differ = ", ".join(differences(there, wanted)) or "its form"
        raise BenchError(
            f"{self.root} holds another configuration: {differ}; name another directory with --out, or delete it"
        )

    def evidence(self, run: Run) -> Path:
        """Where a run's evidence is or will be."""
        return self._runs / f"{run.key}.json"

    def log(self, run: Run) -> Path:
        """Where a run's own output is kept."""
        return self._runs / f"{run.key}.log"

    def load(self, run: Run) -> Result | None:
        """A run's result, None where it was not done yet. Raises BenchError on a damaged file."""
        path = self.evidence(run)
        return parse_result(read_json(path), run, str(path)) if path.exists() else None


def differences(there: object, wanted: dict[str, Any], prefix: str = "") -> list[str]:
    """What differs, as ``name: there, not wanted``."""
    if not isinstance(there, dict):
        return [f"{prefix or 'it'} is {there!r}"]
    found: list[str] = []
    for name, value in wanted.items():
        if isinstance(value, dict):
            found += differences(there.get(name), value, f"{prefix}{name}.")
        elif there.get(name) != value:
            found.append(f"{prefix}{name} is {there.get(name)!r} there, {value!r} here")
    return found


def write_json(path: Path, value: object) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def read_json(path: Path) -> object:
    """Read a JSON file. Raises BenchError naming it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BenchError(f"{path} is not JSON: {error}; delete it and run this again") from error


def fingerprint(path: Path) -> str:
    """Name, size and a hash of the beginning and the end of a file: enough to tell two models apart in no time."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            total = hashlib.sha256(stream.read(_SAMPLED_BYTES))
            stream.seek(max(0, size - _SAMPLED_BYTES))
            total.update(stream.read(_SAMPLED_BYTES))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from error
    return f"{path.name} {size} {total.hexdigest()[:_SHORT]}"


def identify_engine(program: Path) -> str:
    """The key of the engine the program lies in, else a fingerprint of the program."""
    manifest = program.parent / "manifest.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(manifest.read_text(encoding="utf-8"))["key"])
    return fingerprint(program)
