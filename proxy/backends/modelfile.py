"""The files a model consists of, and how much of them an engine has taken in so far."""

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_MAGIC: Final = b"GGUF"
_SPLIT: Final = re.compile(r"^(.*-)(\d{5})(-of-(\d{5})\.gguf)$")


def parts(path: Path) -> tuple[Path, ...]:
    """Return the files of a model: one, or all of a split GGUF (`…-00001-of-00003.gguf`)."""
    match = _SPLIT.match(path.name)
    if match is None:
        return (path,)
    count = int(match.group(4))
    return tuple(path.with_name(f"{match.group(1)}{n:05d}{match.group(3)}") for n in range(1, count + 1))


def size(path: Path | None) -> int:
    """Return the bytes of a model's files, those that are there; 0 for none."""
    total = 0
    for part in parts(path) if path is not None else ():
        try:
            total += part.stat().st_size
        except OSError:
            continue
    return total


def identity(path: Path, words: Iterable[str] = (), base: Path = Path()) -> str:
    """Return what tells the files of a model from all others at their places; empty when one cannot be looked at.

    They are those of `path`, and every GGUF that `words` (arguments, values of variables) name: projectors, drafts,
    adapters. Relative paths begin at `base`. Content is not read: size, inode and times tell, and of the times also
    that of the last change of any kind, because a copy into the same file can keep everything else. Blocks.
    """
    files = dict.fromkeys(part for file in (path, *_named(words, base)) for part in parts(file))
    seen = []
    for file in files:
        try:
            found = (base / file).stat()
        except OSError:
            return ""
        seen.append((str(file), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns))
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def _named(words: Iterable[str], base: Path) -> Iterator[Path]:
    """Return the GGUF files among words, and among their parts: several in a row with commas, each with its scale."""
    for word in words:
        for part in dict.fromkeys((word, *word.split(","))):
            for name in dict.fromkeys((part, part.rpartition(":")[0])):
                if name and _is_gguf(base / name):
                    yield Path(name)


def _is_gguf(file: Path) -> bool:
    try:
        # not a pipe, which would wait for somebody to write
        if not stat.S_ISREG(file.stat().st_mode):
            return False
        with file.open("rb") as opened:
            return opened.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):
        return False


def taken_in(pid: int, path: Path) -> int | None:
    """Return how many bytes of the model a loading process has read, None when it cannot be told.

    Read calls count what they returned, a mapped file by its resident pages; the larger of the two is the
    truth for either way of loading. May take tens of milliseconds for a large mapping: not for an event loop.
    """
    try:
        io = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
        maps = Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")
    except (OSError, UnicodeDecodeError):
        return None
    read = next((int(line.split()[1]) for line in io.splitlines() if line.startswith("rchar:")), 0)
    return max(read, _resident(maps, {str(part.resolve()) for part in parts(path)}))


def _resident(smaps: str, files: set[str]) -> int:
    total, ours = 0, False
    for line in smaps.splitlines():
        head = line.split(maxsplit=5)
        if head and not head[0].endswith(":"):
            ours = len(head) == 6 and head[5] in files
        elif ours and head[0] == "Rss:":
            total += int(head[1]) * 1024
    return total
