"""Carrying the series: a development tree out of it (apply), the series out of a tree (export), and is it sound (check)."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.engine.errors import EngineToolError, ExitCode
from proxy.engine.mail import AUTHOR, ZERO_COMMIT, normalise, parse_mail, stated_touches
from proxy.engine.series import (
    OVERLAY_DIR,
    OverlayFile,
    Patch,
    PatchSet,
    read_overlay,
    read_patch_set,
    read_series_names,
)
from proxy.engine.tree import git_environment, sync_tree, write_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.engine.source import Source, SourceFile

PRISTINE_TAG = "pristine"
_GIT_TIMEOUT_S = 300
_FIXED_DATE = "2026-01-01T00:00:00+0000"
_TABLE_BEGIN = "<!-- core-touch: written by `llama-proxy engine export` -->"
_TABLE_END = "<!-- core-touch end -->"
_FORMAT = (
    "--stdout", "--zero-commit", "--no-signature", "--no-numbered", "--no-stat", "--full-index", "-U3", "--no-renames",
    "--subject-prefix=PATCH", "--src-prefix=a/", "--dst-prefix=b/", "--diff-algorithm=myers", "--indent-heuristic",
    "--no-color", "--no-ext-diff", "--no-textconv",
)  # fmt: skip


def _git(tree: Path, *arguments: str, stdin: str | None = None) -> str:
    name, _, address = AUTHOR.partition(" <")
    env = git_environment(tree.parent)
    for role in ("AUTHOR", "COMMITTER"):
        env |= {
            f"GIT_{role}_NAME": name,
            f"GIT_{role}_EMAIL": address.rstrip(">"),
            f"GIT_{role}_DATE": _FIXED_DATE,
        }
    try:
        done = subprocess.run(
            ["git", "-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "commit.gpgSign=false",
             "-c", "gc.auto=0", "-c", "core.hooksPath=/dev/null", *arguments],
            cwd=tree, input=stdin, env=env, capture_output=True, check=False, timeout=_GIT_TIMEOUT_S,
            encoding="utf-8",
        )  # fmt: skip
    except FileNotFoundError as error:
        raise EngineToolError(
            "git is missing; it carries the patches (Debian: apt-get install git)",
            exit_code=ExitCode.MISSING_TOOL,
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineToolError(f"git {arguments[0]} took more than {_GIT_TIMEOUT_S} s in {tree}") from error
    if done.returncode != 0:
        raise EngineToolError(f"git {arguments[0]} failed in {tree}:\n{(done.stderr or done.stdout).strip()}")
    return done.stdout


def apply_series(files: Iterable[SourceFile], patch_set: PatchSet, directory: Path, label: str) -> None:
    """Make ``directory`` a git tree: one commit of the unpatched ``files``, tagged ``pristine``, one per patch on top.

    The overlay lies in its place, ignored by this git; ``export_series`` reads it back from there. ``directory`` must
    be absent or empty. Raises EngineToolError naming the first patch that does not apply.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise EngineToolError(f"{directory} is not empty; apply starts from nothing, so name a new directory")
    sync_tree(files, directory)
    _git(directory, "init", "--quiet")
    exclude = directory / ".git" / "info" / "exclude"
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text(f"/{OVERLAY_DIR}/\n/build*/\n", encoding="utf-8")
    _git(directory, "add", "--all", "--force")
    _git(directory, "commit", "--quiet", "--no-verify", "--allow-empty", "--message", f"{label}, unpatched")
    _git(directory, "tag", PRISTINE_TAG)
    for patch in patch_set.patches:
        try:
            _git(
                directory, "am", "--quiet", "--keep-cr", "--keep-non-patch", "--committer-date-is-author-date",
                "--whitespace=nowarn", "--no-3way", stdin=patch.data.decode("utf-8"),
            )  # fmt: skip
        except EngineToolError as error:
            raise EngineToolError(f"{patch.file_name} does not apply: {error.message}") from error
    for item in patch_set.overlay:
        write_file(directory / OVERLAY_DIR / item.name, item.data)


def export_series(directory: Path) -> PatchSet:
    """Read the series and the overlay back out of a tree made by ``apply_series``.

    One commit since ``pristine`` is one patch; its file name is its ``Patch-Name`` trailer, else made of the subject.
    Uncommitted changes, merges, and commits that touch the overlay's place are errors.
    """
    if not (directory / ".git").exists() or not _git(directory, "tag", "--list", PRISTINE_TAG).strip():
        raise EngineToolError(f"{directory} is not a tree made by 'llama-proxy engine apply'")
    if dirty := _git(directory, "status", "--porcelain").strip():
        raise EngineToolError(
            f"{directory} has changes that are in no commit; commit or remove them:\n{dirty}"
        )
    if _git(directory, "rev-list", "--merges", f"{PRISTINE_TAG}..HEAD").strip():
        raise EngineToolError(f"{directory} has merges since {PRISTINE_TAG}; rebase to one line of commits")
    patches: list[Patch] = []
    for commit in _git(directory, "rev-list", "--reverse", f"{PRISTINE_TAG}..HEAD").split():
        name, text = normalise(_git(directory, "format-patch", *_FORMAT, "-1", commit))
        mail = parse_mail(f"{name}.patch", text)
        if any(touch.path.startswith(f"{OVERLAY_DIR}/") for touch in mail.touches):
            raise EngineToolError(
                f"commit {commit[:12]} ({mail.subject}) touches {OVERLAY_DIR}/; the overlay is exported as files"
            )
        if "/" in name or any(patch.name == name for patch in patches):
            raise EngineToolError(
                f"commit {commit[:12]}: Patch-Name {name!r} is taken or not a plain file name"
            )
        patches.append(Patch(f"{name}.patch", text.encode(), mail))
    return PatchSet(tuple(patches), read_overlay(directory / OVERLAY_DIR))


def write_patch_set(native_patch: Path, patch_set: PatchSet) -> list[str]:
    """Make ``series``, ``patches/``, ``overlay/`` and the table in README.md say ``patch_set``; returns what changed."""
    wanted: dict[str, bytes] = {"series": _series_text(patch_set)}
    wanted |= {f"patches/{patch.file_name}": patch.data for patch in patch_set.patches}
    wanted |= {f"overlay/{item.name}": item.data for item in patch_set.overlay}
    if (readme := _readme_with_table(native_patch, patch_set)) is not None:
        wanted["README.md"] = readme
    changed = []
    for name, data in wanted.items():
        path = native_patch / name
        if not path.is_file() or path.read_bytes() != data:
            write_file(path, data)
            changed.append(name)
    for folder in ("patches", "overlay"):
        for path in sorted((native_patch / folder).glob("*")):
            if path.is_file() and f"{folder}/{path.name}" not in wanted:
                path.unlink()
                changed.append(f"{folder}/{path.name} (removed)")
    return changed


def _series_text(patch_set: PatchSet) -> bytes:
    return "".join(f"{patch.file_name}\n" for patch in patch_set.patches).encode()


def core_touch_table(patch_set: PatchSet) -> str:
    """The budget as a Markdown table: what each patch changes in files that are not ours."""
    rows = ["| patch | file | lines |", "|---|---|---|"]
    added = removed = 0
    for patch in patch_set.patches:
        for touch in patch.mail.touches:
            rows.append(f"| {patch.name} | `{touch.path}` | +{touch.added}/-{touch.removed} |")
            added, removed = added + touch.added, removed + touch.removed
    files = len(patch_set.touched)
    rows.append(f"| **all** | {files} file{'s' if files != 1 else ''} | **+{added}/-{removed}** |")
    return "\n".join(rows)


def _readme_with_table(native_patch: Path, patch_set: PatchSet) -> bytes | None:
    path = native_patch / "README.md"
    if not path.is_file():
        return None
    head, begin, rest = path.read_text(encoding="utf-8").partition(_TABLE_BEGIN)
    _, end, after = rest.partition(_TABLE_END)
    if not begin or not end:
        return None
    return f"{head}{begin}\n\n{core_touch_table(patch_set)}\n\n{end}{after}".encode()


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the series: where, and what to do about it."""

    where: str
    what: str

    def __str__(self) -> str:
        """One line."""
        return f"{self.where}: {self.what}"


def check_files(native_patch: Path) -> list[Problem]:
    """What can be said without the source: series against files, mail form, trailers against diffs, the overlay's list."""
    listed = set(read_series_names(native_patch))
    present = (
        {path.name for path in (native_patch / "patches").glob("*")}
        if (native_patch / "patches").is_dir()
        else set()
    )
    found = [
        Problem(f"patches/{name}", "is in no line of series; add it or delete it")
        for name in sorted(present - listed)
    ]
    patch_set = read_patch_set(native_patch)
    for patch in patch_set.patches:
        where = f"patches/{patch.file_name}"
        if patch.mail.header[0].split()[1] != ZERO_COMMIT or f"From: {AUTHOR}" not in patch.mail.header:
            found.append(
                Problem(where, f"must come from commit {ZERO_COMMIT} and '{AUTHOR}'; export it again")
            )
        if patch.mail.trailer("Patch-Name") != (patch.name,):
            found.append(Problem(where, f"needs exactly one trailer 'Patch-Name: {patch.name}'"))
        stated, real = stated_touches(patch.mail), patch.mail.touches
        if stated != real:
            says, is_ = "; ".join(map(str, stated)) or "nothing", "; ".join(map(str, real))
            found.append(Problem(where, f"Core-Touch says {says}, the diff is {is_}; export it again"))
    recipe = next((item.data.decode() for item in patch_set.overlay if item.name == "phase.cmake"), "")
    found += [
        Problem(f"overlay/{item.name}", "is not named in overlay/phase.cmake, so it is never compiled")
        for item in patch_set.overlay
        if item.name.endswith(".cpp") and item.name not in recipe
    ]
    readme = _readme_with_table(native_patch, patch_set)
    if readme is not None and readme != (native_patch / "README.md").read_bytes():
        found.append(Problem("README.md", "its core-touch table is not that of the series; export again"))
    return found


def check_round_trip(native_patch: Path, source: Source, label: str) -> list[Problem]:
    """Apply to the unpatched source and export again; every byte must come back. Only touched files are looked at."""
    patch_set = read_patch_set(native_patch)
    touched = patch_set.touched
    files = [item for item in source.files() if item.path in touched]
    with tempfile.TemporaryDirectory(prefix="llama-proxy-check-") as name:
        tree = Path(name) / "tree"
        try:
            apply_series(files, patch_set, tree, label)
        except EngineToolError as error:
            return [Problem("series", error.message)]
        again = export_series(tree)
    found = []
    if _series_text(again) != (native_patch / "series").read_bytes():
        found.append(Problem("series", "export writes it differently; export it again"))
    exported = {patch.file_name: patch.data for patch in again.patches}
    for patch in patch_set.patches:
        if (text := exported.get(patch.file_name)) is None:
            found.append(Problem(f"patches/{patch.file_name}", "does not come back under this name"))
        elif text != patch.data:
            found.append(
                Problem(
                    f"patches/{patch.file_name}",
                    f"comes back different at {_first_difference(patch.data, text)}",
                )
            )
    if _by_name(again.overlay) != _by_name(patch_set.overlay):
        found.append(Problem("overlay", "does not come back as it was"))
    return found


def _by_name(overlay: tuple[OverlayFile, ...]) -> dict[str, bytes]:
    return {item.name: item.data for item in overlay}


def _first_difference(before: bytes, after: bytes) -> str:
    old, new = before.split(b"\n"), after.split(b"\n")
    for number, (left, right) in enumerate(zip(old, new, strict=False), 1):
        if left != right:
            return f"line {number}: {left.decode()!r} became {right.decode()!r}"
    return f"line {min(len(old), len(new)) + 1}: one is longer"
