"""Where everything that is fetched or built lives, and the lock that keeps two builders apart."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.engine.errors import CancelledByCallerError, EngineToolError, ExitCode
from proxy.engine.progress import Progress, SilentProgress

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping

LOCK_TIMEOUT_S = 3600.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Cache:
    """The cache directory: ``downloads``, ``models``, ``tools``, ``work`` (trees to rebuild from) and ``engines`` (finished)."""

    root: Path

    @property
    def downloads(self) -> Path:
        """Archives as fetched, each checked by SHA-256 before every use."""
        return self.root / "downloads"

    @property
    def models(self) -> Path:
        """Model files taken out of packages."""
        return self.root / "models"

    @property
    def tools(self) -> Path:
        """Build tools from package wheels, used only where the machine has none."""
        return self.root / "tools"

    @property
    def work(self) -> Path:
        """Patched trees and build folders, at paths that stay the same from build to build."""
        return self.root / "work"

    @property
    def engines(self) -> Path:
        """Finished engines, one directory per content key; they appear by rename, whole."""
        return self.root / "engines"


def cache_from_environment(environ: Mapping[str, str] | None = None) -> Cache:
    """Find the cache: ``LLAMA_PROXY_CACHE``, else ``XDG_CACHE_HOME/llama-proxy``, else ``~/.cache/llama-proxy``."""
    env = os.environ if environ is None else environ
    if own := env.get("LLAMA_PROXY_CACHE"):
        root = Path(own).expanduser()
    elif xdg := env.get("XDG_CACHE_HOME"):
        root = Path(xdg).expanduser() / "llama-proxy"
    elif home := env.get("HOME"):
        root = Path(home) / ".cache" / "llama-proxy"
    else:
        root = Path.home() / ".cache" / "llama-proxy"
    return Cache(root.absolute())


def make_dir(path: Path) -> Path:
    """Create ``path`` with its parents; a failure names the directory and the variable that moves the cache."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineToolError(
            f"cannot create {path}: {error.strerror or error}; point LLAMA_PROXY_CACHE at a directory you can write to"
        ) from error
    return path


@contextlib.contextmanager
def file_lock(
    path: Path,
    what: str,
    progress: Progress | None = None,
    *,
    timeout_s: float = LOCK_TIMEOUT_S,
    cancel: threading.Event | None = None,
) -> Iterator[None]:
    """Hold an exclusive lock on ``path`` for the work called ``what``.

    The kernel drops the lock when its holder dies, so a killed build never blocks the next one. Raises
    EngineToolError naming the holder's pid when the lock is not had within ``timeout_s``.
    """
    listener = progress or SilentProgress()
    make_dir(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(descriptor, path, listener, timeout_s, cancel)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {what}\n".encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _acquire(
    descriptor: int, path: Path, progress: Progress, timeout_s: float, cancel: threading.Event | None
) -> None:
    deadline = time.monotonic() + timeout_s
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            pid, _, what = holder.partition(" ")
            who = f"pid {pid} ({what})" if pid else "another process"
            if time.monotonic() >= deadline:
                raise EngineToolError(
                    f"{path} is held by {who} for more than {timeout_s:g} s; wait for it or end it, then run this again",
                    exit_code=ExitCode.BUSY,
                ) from None
            if not told:
                progress.note(f"waiting for {who}, which works in the same place")
                told = True
            if cancel is not None and cancel.is_set():
                raise CancelledByCallerError("waiting for another build") from None
            time.sleep(_POLL_S)
        else:
            return
