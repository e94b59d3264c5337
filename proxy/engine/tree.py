"""The patched tree: composed from source, series and overlay, and synchronised by content so that a rebuild is small."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.engine.errors import EngineToolError
from proxy.engine.series import OVERLAY_DIR, PatchSet
from proxy.engine.source import Source, SourceFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_APPLY_TIMEOUT_S = 60


def git_environment(ceiling: Path) -> dict[str, str]:
    """Environment for git that reads no configuration of the user or machine, so that mails come out the same anywhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(ceiling.resolve()),
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
    }


def compose(source: Source, patch_set: PatchSet) -> Iterator[SourceFile]:
    """Yield every file of the patched tree.

    Only files that some patch touches are written out and patched, so that this costs little more than reading
    the source. Raises EngineToolError naming the first patch that does not apply.
    """
    touched = patch_set.touched
    with tempfile.TemporaryDirectory(prefix="llama-proxy-stage-") as name:
        stage = Path(name) / "tree"
        stage.mkdir()
        for item in source.files():
            if item.path.startswith(f"{OVERLAY_DIR}/"):
                raise EngineToolError(
                    f"the unpatched tree already has {item.path}; the overlay needs another place"
                )
            if item.path in touched:
                write_file(stage / item.path, item.data, executable=item.executable)
            else:
                yield item
        for patch in patch_set.patches:
            apply_patch(stage, patch.file_name, patch.data)
        yield from read_tree(stage)
    for overlay in patch_set.overlay:
        yield SourceFile(f"{OVERLAY_DIR}/{overlay.name}", overlay.data)


def apply_patch(tree: Path, file_name: str, data: bytes, *options: str) -> str:
    """Apply one mail's diff to ``tree`` with git's own strict rules; returns what git said about offsets."""
    done = run_apply(tree, data, *options)
    if done.returncode != 0:
        raise EngineToolError(
            f"{file_name} does not apply to this source:\n{done.stderr.strip()}\n"
            "see which patches still do with: llama-proxy engine bump"
        )
    return done.stderr


def run_apply(tree: Path, data: bytes, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``git apply`` on ``data`` inside ``tree``, wherever that lies."""
    try:
        return subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "--verbose", *options, "-"],
            cwd=tree,
            input=data.decode("utf-8"),
            env=git_environment(tree.parent),
            capture_output=True,
            text=True,
            check=False,
            timeout=_APPLY_TIMEOUT_S,
        )
    except FileNotFoundError as error:
        raise EngineToolError(
            "git is missing; it applies the patches (Debian: apt-get install git)"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineToolError(f"git apply took more than {_APPLY_TIMEOUT_S} s in {tree}") from error


def read_tree(root: Path) -> Iterator[SourceFile]:
    """Every plain file below ``root``, in a stable order."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            executable = bool(path.stat().st_mode & stat.S_IXUSR)
            yield SourceFile(path.relative_to(root).as_posix(), path.read_bytes(), executable)


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What a synchronisation changed: relative paths, and the number of files left alone."""

    written: tuple[str, ...]
    deleted: tuple[str, ...]
    unchanged: int


def sync_tree(files: Iterable[SourceFile], root: Path) -> SyncResult:
    """Make ``root`` hold exactly ``files``.

    A file whose bytes are already there keeps its modification time, which is what makes ninja rebuild only what
    changed. Every file is compared by content, so an interrupted or hand-edited tree is put right.
    """
    root.mkdir(parents=True, exist_ok=True)
    wanted: set[str] = set()
    written: list[str] = []
    unchanged = 0
    for item in files:
        wanted.add(item.path)
        path = root / item.path
        if _same(path, item):
            unchanged += 1
        else:
            write_file(path, item.data, executable=item.executable)
            written.append(item.path)
    deleted = _delete_others(root, wanted)
    return SyncResult(tuple(written), tuple(deleted), unchanged)


def _same(path: Path, item: SourceFile) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_size != len(item.data):
        return False
    return bool(status.st_mode & stat.S_IXUSR) == item.executable and path.read_bytes() == item.data


def write_file(path: Path, data: bytes, *, executable: bool = False) -> None:
    """Write ``path`` whole or not at all, replacing whatever is in the way."""
    _clear_way(path)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(data)
    temporary.chmod(0o755 if executable else 0o644)
    temporary.replace(path)


def _clear_way(path: Path) -> None:
    for parent in reversed(path.parents):
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            parent.unlink()
            break
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)


def _delete_others(root: Path, wanted: set[str]) -> list[str]:
    deleted = []
    for folder, folders, names in os.walk(root, topdown=False):
        here = Path(folder)
        links = [name for name in folders if (here / name).is_symlink()]
        for name in (*names, *links):
            relative = (here / name).relative_to(root).as_posix()
            if relative not in wanted:
                (here / name).unlink()
                deleted.append(relative)
        if here != root and not any(here.iterdir()):
            here.rmdir()
    return sorted(deleted)
