"""Apply, export, check, bump: nothing is lost, nothing is taken on trust."""

from pathlib import Path

import pytest

from proxy.engine.bump import Outcome, try_series
from proxy.engine.errors import EngineToolError
from proxy.engine.mail import AUTHOR
from proxy.engine.series import read_patch_set, read_series_names
from proxy.engine.source import ArchiveSource
from proxy.engine.workflow import (
    apply_series,
    check_files,
    check_round_trip,
    core_touch_table,
    export_series,
    write_patch_set,
)
from tests.engine_tool import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tiny_engine: tiny.Tiny, tmp_path: Path) -> Path:
    """A development tree of the small engine."""
    directory = tmp_path / "dev"
    apply_series(
        ArchiveSource(tiny_engine.archive).files(),
        read_patch_set(tiny_engine.native_patch),
        directory,
        "tiny",
    )
    return directory


def problems(engine: tiny.Tiny) -> list[str]:
    found = check_files(engine.native_patch)
    return [
        str(p) for p in found or check_round_trip(engine.native_patch, ArchiveSource(engine.archive), "tiny")
    ]


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_apply_then_export_changes_nothing(tiny_engine: tiny.Tiny, tree: Path) -> None:
    assert write_patch_set(tiny_engine.native_patch, export_series(tree)) == []
    assert problems(tiny_engine) == []


def test_the_tree_is_pristine_plus_one_commit_per_patch(tree: Path) -> None:
    assert tiny.git(tree, "log", "--format=%s").splitlines() == ["Let the overlay in", "tiny, unpatched"]
    assert tiny.git(tree, "status", "--porcelain") == ""
    assert (tree / "tools/server/phase/machine.cpp").is_file()


def test_a_new_commit_becomes_a_patch_and_the_overlay_comes_back(tiny_engine: tiny.Tiny, tree: Path) -> None:
    replace_in(tree / "common/sampling.cpp", "7", "8")
    (tree / "common/extra.h").write_text("#pragma once\n")
    tiny.commit(
        tree, "Sample: take eight\n\nBecause — well — of é.\n\nForwarded: no\nCore-Touch: nonsense +1/-0"
    )
    (tree / "tools/server/phase/new.h").write_text("#pragma once\n")
    (tree / "tools/server/phase/machine.cpp").write_text("int machine() { return 2; }\n")
    changed = write_patch_set(tiny_engine.native_patch, export_series(tree))
    assert sorted(changed) == [
        "overlay/machine.cpp",
        "overlay/new.h",
        "patches/sample-take-eight.patch",
        "series",
    ]
    text = (tiny_engine.native_patch / "patches/sample-take-eight.patch").read_text()
    assert "dev@example.org" not in text
    assert f"From: {AUTHOR}" in text
    assert "Core-Touch: common/extra.h +1/-0\nCore-Touch: common/sampling.cpp +1/-1\n" in text
    assert read_series_names(tiny_engine.native_patch) == ("hook.patch", "sample-take-eight.patch")
    assert problems(tiny_engine) == []


def test_a_removed_commit_and_overlay_file_disappear(tiny_engine: tiny.Tiny, tree: Path) -> None:
    tiny.git(tree, "reset", "-q", "--hard", "pristine")
    (tree / "tools/server/phase/machine.cpp").unlink()
    changed = write_patch_set(tiny_engine.native_patch, export_series(tree))
    assert sorted(changed) == ["overlay/machine.cpp (removed)", "patches/hook.patch (removed)", "series"]
    assert read_patch_set(tiny_engine.native_patch).patches == ()


def test_export_ignores_the_trees_own_git_settings(tiny_engine: tiny.Tiny, tree: Path) -> None:
    """A developer's diff settings must not leak into the mails."""
    for key, value in (
        ("diff.noprefix", "true"),
        ("diff.context", "9"),
        ("format.signature", "me"),
        ("diff.renames", "copies"),
    ):
        tiny.git(tree, "config", key, value)
    assert write_patch_set(tiny_engine.native_patch, export_series(tree)) == []


def test_apply_refuses_a_directory_that_holds_something(tree: Path) -> None:
    with pytest.raises(EngineToolError, match="not empty"):
        apply_series([], read_patch_set(ROOT / "native-patch"), tree, "x")


def test_export_refuses_what_would_be_lost(tree: Path, tmp_path: Path) -> None:
    (tree / "common/sampling.cpp").write_text("changed\n")
    with pytest.raises(EngineToolError, match=r"no commit.*\n.*sampling\.cpp"):
        export_series(tree)
    tiny.git(tree, "checkout", "-q", ".")
    (tree / "stray.h").write_text("")
    with pytest.raises(EngineToolError, match=r"stray\.h"):
        export_series(tree)
    with pytest.raises(EngineToolError, match="engine apply"):
        export_series(tmp_path)


def test_export_refuses_merges_and_the_overlay_in_a_commit(tree: Path) -> None:
    tiny.git(tree, "add", "--force", "tools/server/phase")
    tiny.git(tree, "commit", "-q", "-m", "Overlay by accident")
    with pytest.raises(EngineToolError, match="Overlay by accident"):
        export_series(tree)
    tiny.git(tree, "reset", "-q", "--mixed", "HEAD~1")
    tiny.git(tree, "checkout", "-q", "-b", "side", "pristine")
    tiny.git(tree, "commit", "-q", "--allow-empty", "-m", "side")
    tiny.git(tree, "merge", "-q", "--no-ff", "-m", "merge", "master")
    with pytest.raises(EngineToolError, match="merges"):
        export_series(tree)


def test_two_patches_of_one_name_are_refused(tree: Path) -> None:
    replace_in(tree / "common/sampling.cpp", "7", "8")
    tiny.commit(tree, "Again\n\nPatch-Name: hook")
    with pytest.raises(EngineToolError, match=r"'hook' is taken"):
        export_series(tree)


def damage_trailer(native_patch: Path) -> None:
    replace_in(native_patch / "patches/hook.patch", "CMakeLists.txt +1/-0", "CMakeLists.txt +2/-0")


def damage_author(native_patch: Path) -> None:
    replace_in(native_patch / "patches/hook.patch", f"From: {AUTHOR}", "From: A <a@example.org>")


def damage_unlisted(native_patch: Path) -> None:
    (native_patch / "patches/forgotten.patch").write_text("x")


def damage_name(native_patch: Path) -> None:
    (native_patch / "patches/hook.patch").rename(native_patch / "patches/other.patch")
    (native_patch / "series").write_text("other.patch\n")


def damage_whitespace(native_patch: Path) -> None:
    replace_in(native_patch / "patches/hook.patch", "Why it is there.\n", "Why it is there. \n")


def damage_hash(native_patch: Path) -> None:
    text = (native_patch / "patches/hook.patch").read_text()
    (native_patch / "patches/hook.patch").write_text(text.replace("index ", "index 0", 1))


def damage_series(native_patch: Path) -> None:
    (native_patch / "series").write_text("hook.patch\n\n")


def damage_context(native_patch: Path) -> None:
    replace_in(
        native_patch / "patches/hook.patch",
        " target_link_libraries(server-context",
        " target_link_library(server-context",
    )


def damage_overlay_list(native_patch: Path) -> None:
    (native_patch / "overlay/unused.cpp").write_text("int unused;\n")


def damage_table(native_patch: Path) -> None:
    (native_patch / "README.md").write_text(
        "<!-- core-touch: written by `llama-proxy engine export` -->\nold\n<!-- core-touch end -->\n"
    )


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (damage_trailer, "+2/-0"),
        (damage_author, "hook.patch"),
        (damage_unlisted, "forgotten.patch"),
        (damage_name, "Patch-Name: other"),
        (damage_whitespace, "comes back different"),
        (damage_hash, "comes back different"),
        (damage_series, "series"),
        (damage_context, "does not apply"),
        (damage_overlay_list, "unused.cpp"),
        (damage_table, "README.md"),
    ],
)
def test_check_finds_every_kind_of_damage(tiny_engine: tiny.Tiny, damage, named: str) -> None:  # type: ignore[no-untyped-def]
    damage(tiny_engine.native_patch)
    found = problems(tiny_engine)
    assert found
    assert any(named in line for line in found), found


def test_export_writes_the_table_that_check_wants(tiny_engine: tiny.Tiny, tree: Path) -> None:
    damage_table(tiny_engine.native_patch)
    assert write_patch_set(tiny_engine.native_patch, export_series(tree)) == ["README.md"]
    assert "| **all** | 1 file | **+1/-0** |" in (tiny_engine.native_patch / "README.md").read_text()
    assert problems(tiny_engine) == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("../x.patch\n", "not the name"),
        ("hook\n", "not the name"),
        ("hook.patch\nhook.patch\n", "twice"),
        ("gone.patch\n", r"gone\.patch"),
    ],
)
def test_a_wrong_series_is_an_error(tiny_engine: tiny.Tiny, text: str, named: str) -> None:
    (tiny_engine.native_patch / "series").write_text(text)
    with pytest.raises(EngineToolError, match=named):
        read_patch_set(tiny_engine.native_patch)


def test_the_overlay_is_flat(tiny_engine: tiny.Tiny) -> None:
    (tiny_engine.native_patch / "overlay" / "deep").mkdir()
    with pytest.raises(EngineToolError, match="flat"):
        read_patch_set(tiny_engine.native_patch)


def test_series_hash_follows_content_order_and_names(tiny_engine: tiny.Tiny) -> None:
    seen = {read_patch_set(tiny_engine.native_patch).series_hash}
    machine = tiny_engine.native_patch / "overlay/machine.cpp"
    machine.write_text("int machine() { return 3; }\n")
    seen.add(read_patch_set(tiny_engine.native_patch).series_hash)
    machine.rename(machine.with_name("machine2.cpp"))
    seen.add(read_patch_set(tiny_engine.native_patch).series_hash)
    replace_in(tiny_engine.native_patch / "patches/hook.patch", "Why it is", "Why is it")
    seen.add(read_patch_set(tiny_engine.native_patch).series_hash)
    assert len(seen) == 4


def rows_on(engine: tiny.Tiny, changes: dict[str, str]) -> tuple[list[Outcome], tuple[str, ...], str]:
    path = tiny.write_archive(
        engine.archive.with_name("next.tar.gz"),
        {f"llama.cpp/{k}": v for k, v in (tiny.TREE | changes).items()},
    )
    rows, clash = try_series(ArchiveSource(path), read_patch_set(engine.native_patch))
    return [row.outcome for row in rows], clash, " ".join(detail for row in rows for detail in row.details)


SERVER = "tools/server/CMakeLists.txt"


def test_bump_tells_clean_moved_and_conflict_apart(tiny_engine: tiny.Tiny) -> None:
    before = (tiny_engine.native_patch / "patches/hook.patch").read_bytes()
    assert rows_on(tiny_engine, {"docs/notes.md": "other\n"}) == ([Outcome.CLEAN], (), "")
    outcomes, _, details = rows_on(tiny_engine, {SERVER: "# new\n# lines\n" + tiny.TREE[SERVER]})
    assert outcomes == [Outcome.OFFSET]
    assert f"{SERVER}: Hunk #1" in details
    outcomes, _, details = rows_on(tiny_engine, {SERVER: tiny.TREE[SERVER].replace("PUBLIC", "PRIVATE")})
    assert outcomes == [Outcome.CONFLICT]
    assert SERVER in details
    assert rows_on(tiny_engine, {"tools/server/phase/x.h": "int x;\n"})[1] == ("tools/server/phase/x.h",)
    assert (tiny_engine.native_patch / "patches/hook.patch").read_bytes() == before


def test_bump_names_a_file_that_is_gone(tiny_engine: tiny.Tiny, tree: Path) -> None:
    replace_in(tree / "docs/notes.md", "nothing", "something")
    tiny.commit(tree, "Notes")
    write_patch_set(tiny_engine.native_patch, export_series(tree))
    files = {f"llama.cpp/{k}": v for k, v in tiny.TREE.items() if not k.startswith("docs/")}
    path = tiny.write_archive(tiny_engine.archive.with_name("next.tar.gz"), files)
    rows, _ = try_series(ArchiveSource(path), read_patch_set(tiny_engine.native_patch))
    assert [row.outcome for row in rows] == [Outcome.CLEAN, Outcome.CONFLICT]
    assert "docs/notes.md" in " ".join(rows[1].details)


def test_the_real_series_is_in_order() -> None:
    """What can be said about native-patch/ itself without the source."""
    assert [str(problem) for problem in check_files(ROOT / "native-patch")] == []
    patch_set = read_patch_set(ROOT / "native-patch")
    assert core_touch_table(patch_set) in (ROOT / "native-patch/README.md").read_text()
