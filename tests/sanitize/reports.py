"""What a sanitizer wrote: its report files, cut into single reports."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# the first line of a report: ==1==ERROR: AddressSanitizer: ..., WARNING: ThreadSanitizer: ... (pid=1),
# /path/file.cpp:1:2: runtime error: ..., ==1==ERROR: LeakSanitizer: ...
_BEGIN = re.compile(
    r"^(?:==\d+==\s*)?(?:ERROR|WARNING|FATAL): (?P<tool>\w+Sanitizer): (?P<kind>.*)$"
    r"|^(?P<place>\S+:\d+:\d+): runtime error: (?P<error>.*)$",
    re.MULTILINE,
)
LINES_AT_MOST = 150
_FRAME = re.compile(r"^\s*#\d+ .*$", re.MULTILINE)
_VARYING = re.compile(r"0x[0-9a-f]+|\(pid=\d+\)|==\d+==|\b[TM]\d+\b")


@dataclass(frozen=True, slots=True)
class Report:
    """One report: the tool's own headline, and the whole text with all stacks."""

    headline: str
    text: str

    @property
    def key(self) -> str:
        """The same for the same defect: headline and stacks without addresses and numbers of processes and threads."""
        return _VARYING.sub("", "\n".join([self.headline, *_FRAME.findall(self.text)]))


def cut(text: str) -> list[Report]:
    """Cut one report file into its reports; a file without a headline is one report, so that nothing is lost."""
    starts = list(_BEGIN.finditer(text))
    if not starts:
        return [Report("not a known form", text)] if text.strip() else []
    ends = [*(start.start() for start in starts[1:]), len(text)]
    return [
        Report(_headline(found), text[found.start() : end]) for found, end in zip(starts, ends, strict=True)
    ]


def _headline(found: re.Match[str]) -> str:
    if found["place"]:
        return f"UndefinedBehaviorSanitizer: {found['place']}: {found['error']}"
    return f"{found['tool']}: {found['kind']}".strip()


def read_reports(folder: Path, logs: Iterable[Path] = ()) -> list[Report]:
    """Return the different reports of all files in `folder` (sanitizers write one per process) and in engines' logs.

    GCC's UBSan writes to standard error, whatever it is told, when ASan is there too: so logs are searched as well.
    """
    found: dict[str, Report] = {}
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in sorted(folder.iterdir())]
    for file in sorted(logs):
        text = file.read_text(encoding="utf-8", errors="replace")
        texts += [text[start.start() :] for start in [_BEGIN.search(text)] if start]
    for text in texts:
        for report in cut(text):
            found.setdefault(report.key, report)
    return list(found.values())
