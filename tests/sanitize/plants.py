"""Defects that the sanitizers must find, planted into a copy of the patch directory, never into the repository."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement in a file of the overlay; `old` must be there exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Plant:
    """Defects of one build: what to change, and what the reports must then say (all words of a tuple in one report)."""

    edits: tuple[Edit, ...]
    expects: tuple[tuple[str, ...], ...]


PLANTS = {
    # The kept logits are read after the row was freed; a counter of steps overflows.
    "address": Plant(
        edits=(
            Edit(
                "phase-hooks.inc",
                "        std::vector<float>().swap(slot.phase.row);\n",
                "        const float * planted = slot.phase.row.data();\n"
                "        std::vector<float>().swap(slot.phase.row);\n"
                "        slot.phase.n_steps = planted[1] > 1e30f ? 1 : 0;\n",
            ),
            Edit(
                "phase-server.cpp",
                "    n_queued   = machine.count(phase::member::queued);\n",
                "    n_queued   = machine.count(phase::member::queued);\n"
                "    volatile int planted = 0x7fffffff;\n"
                "    planted = planted + 1;\n",
            ),
        ),
        expects=(
            ("AddressSanitizer: heap-use-after-free", "phase_open"),
            ("signed integer overflow", "phase-server.cpp"),
        ),
    ),
    # The main loop changes a value of the machine that the HTTP threads of /slots read, without a lock.
    "thread": Plant(
        edits=(
            Edit(
                "phase-machine.cpp",
                "void machine::advance(int64_t now) {\n",
                "int planted = 0;\n\nvoid machine::advance(int64_t now) {\n    planted++;\n",
            ),
            Edit(
                "phase-server.cpp",
                "int64_t server_phase_tag::parse_since(const std::string & text) {\n",
                "namespace phase { extern int planted; }\n\n"
                "int64_t server_phase_tag::parse_since(const std::string & text) {\n"
                "    if (phase::planted < 0) {\n        return -1;\n    }\n",
            ),
        ),
        expects=(("ThreadSanitizer: data race", "parse_since", "advance"),),
    ),
}


def plant(patch_dir: Path, target: Path, edits: tuple[Edit, ...]) -> None:
    """Copy the patch directory to `target` and make the edits there.

    Raises AssertionError naming the edit whose place is not there exactly once: the overlay changed, so the plant must.
    """
    shutil.copytree(patch_dir, target, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    for edit in edits:
        path = target / "overlay" / edit.file
        text = path.read_text(encoding="utf-8")
        count = text.count(edit.old)
        assert count == 1, f"{edit.file} holds {count} times: {edit.old!r}"
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
