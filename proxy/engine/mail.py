"""A patch mail, read without git: its headers, trailers and what its diff touches. Pure text in, values out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from proxy.engine.errors import EngineToolError

AUTHOR = "llama-proxy <llama-proxy@localhost>"
ZERO_COMMIT = "0" * 40

_TRAILER = re.compile(r"^[A-Za-z][A-Za-z0-9-]*: \S.*$")
_CORE_TOUCH = re.compile(r"^(?P<path>\S+) \+(?P<added>\d+)/-(?P<removed>\d+)$")
_DIFF = re.compile(r"^diff --git a/(?P<old>\S+) b/(?P<new>\S+)$")
_HUNK = re.compile(r"^@@ -\d+(?:,(?P<old>\d+))? \+\d+(?:,(?P<new>\d+))? @@")
_SLUG = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Touch:
    """Lines added to and removed from one file of the unpatched tree (or a file the patch creates)."""

    path: str
    added: int
    removed: int

    def __str__(self) -> str:
        """As a ``Core-Touch`` trailer says it."""
        return f"{self.path} +{self.added}/-{self.removed}"


@dataclass(frozen=True, slots=True)
class Mail:
    """One patch of the series. ``body`` is the commit message without the subject; ``diff`` starts at ``diff --git``."""

    name: str
    header: tuple[str, ...]
    subject: str
    body: str
    diff: str
    touches: tuple[Touch, ...]

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """The ``Key: value`` lines of the message's last paragraph, in order."""
        return tuple(_split_trailer(line) for line in trailer_block(self.body))

    def trailer(self, key: str) -> tuple[str, ...]:
        """All values of the trailer ``key``."""
        return tuple(value for name, value in self.trailers if name == key)


def parse_mail(name: str, text: str) -> Mail:
    """Read a mail as ``git format-patch`` writes it. Raises EngineToolError naming the patch and what is wrong."""
    head, blank, rest = text.partition("\n\n")
    lines = head.split("\n")
    if (
        not blank
        or not lines[0].startswith("From ")
        or not any(line.startswith("Subject: ") for line in lines)
    ):
        raise EngineToolError(f"{name}: not a git format-patch mail (needs From and Subject headers)")
    at = rest.find("\ndiff --git ")
    if at < 0 and not rest.startswith("diff --git "):
        raise EngineToolError(f"{name}: the mail holds no diff")
    message, diff = rest[: at + 1], rest[at + 1 :]
    return Mail(
        name=name,
        header=tuple(lines),
        subject=_subject(lines),
        body=message.removesuffix("---\n").strip("\n"),
        diff=diff,
        touches=diff_touches(name, diff),
    )


def _subject(header: list[str]) -> str:
    start = next(i for i, line in enumerate(header) if line.startswith("Subject: "))
    parts = [header[start].removeprefix("Subject: ")]
    for line in header[start + 1 :]:
        if not line.startswith(" "):
            break
        parts.append(line.strip())
    return " ".join(parts).removeprefix("[PATCH] ")


def trailer_block(body: str) -> list[str]:
    """The lines of the last paragraph, when every one of them is a trailer; else nothing."""
    lines = body.strip("\n").split("\n\n")[-1].split("\n")
    return lines if all(_TRAILER.match(line) for line in lines) else []


def _split_trailer(line: str) -> tuple[str, str]:
    key, _, value = line.partition(": ")
    return key, value


def diff_touches(name: str, diff: str) -> tuple[Touch, ...]:
    """Count added and removed lines per file, hunk by hunk, so that a line starting with ``---`` cannot confuse it."""
    touches: list[Touch] = []
    path, added, removed = "", 0, 0
    left_old = left_new = 0

    def close() -> None:
        if path:
            touches.append(Touch(path, added, removed))

    for line in diff.split("\n"):
        if left_old > 0 or left_new > 0:
            match line[:1]:
                case "+":
                    added, left_new = added + 1, left_new - 1
                case "-":
                    removed, left_old = removed + 1, left_old - 1
                case "\\":
                    pass
                case _:
                    left_old, left_new = left_old - 1, left_new - 1
        elif found := _DIFF.match(line):
            close()
            path, added, removed = found["new"], 0, 0
            if found["old"] != found["new"]:
                raise EngineToolError(
                    f"{name}: renames {found['old']} to {found['new']}; export without renames"
                )
        elif found := _HUNK.match(line):
            left_old = int(found["old"] or "1")
            left_new = int(found["new"] or "1")
        elif line.startswith("GIT binary patch"):
            raise EngineToolError(f"{name}: {path} is binary; a patch may change text only")
    if left_old > 0 or left_new > 0:
        raise EngineToolError(f"{name}: the last hunk of {path} is cut short")
    close()
    return tuple(touches)


def stated_touches(mail: Mail) -> tuple[Touch, ...]:
    """What the mail's ``Core-Touch`` trailers claim."""
    stated = []
    for value in mail.trailer("Core-Touch"):
        found = _CORE_TOUCH.match(value)
        if not found:
            raise EngineToolError(f"{mail.name}: 'Core-Touch: {value}' is not 'path +N/-M'")
        stated.append(Touch(found["path"], int(found["added"]), int(found["removed"])))
    return tuple(stated)


def slug(subject: str) -> str:
    """A file name from a subject, for a patch that does not say its own name."""
    return _SLUG.sub("-", subject.lower()).strip("-")[:48].strip("-") or "patch"


def normalise(text: str) -> tuple[str, str]:
    """Finish a freshly exported mail: fixed author, ``Patch-Name`` and true ``Core-Touch`` trailers.

    Returns (patch name without suffix, mail text). Idempotent, so apply then export gives the same bytes.
    """
    mail = parse_mail("exported mail", text)
    block = trailer_block(mail.body)
    prose = mail.body.strip("\n")
    if block:
        prose = prose[: len(prose) - len("\n".join(block))].strip("\n")
    kept = [line for line in block if _split_trailer(line)[0] != "Core-Touch"]
    names = [value for key, value in map(_split_trailer, kept) if key == "Patch-Name"]
    if not names:
        names = [slug(mail.subject)]
        kept.insert(0, f"Patch-Name: {names[0]}")
    kept += [f"Core-Touch: {touch}" for touch in mail.touches]
    header = [f"From: {AUTHOR}" if line.startswith("From: ") else line for line in mail.header]
    message = "\n\n".join(part for part in (prose, "\n".join(kept)) if part)
    return names[0], "\n".join(header) + "\n\n" + message + "\n\n" + mail.diff
