"""The patched tree: composed strictly, synchronised by content."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine.errors import EngineToolError
from proxy.engine.series import PatchSet, read_patch_set
from proxy.engine.source import ArchiveSource, SourceFile
from proxy.engine.tree import compose, sync_tree
from proxy.engine.workflow import apply_series
from tests.engine_tool import tiny

PATHS = ["a", "b.c", "dir/a", "dir/b", "dir/sub/c", "other/a"]


def read_back(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_compose_equals_a_git_am_of_the_whole_tree(tiny_engine: tiny.Tiny, tmp_path: Path) -> None:
    """The short way (patch only touched files) gives the same tree as the long one."""
    source, patch_set = ArchiveSource(tiny_engine.archive), read_patch_set(tiny_engine.native_patch)
    long_way = tmp_path / "long"
    apply_series(source.files(), patch_set, long_way, "tiny")
    short = {item.path: item.data for item in compose(source, patch_set)}
    expected = {name: data for name, data in read_back(long_way).items() if not name.startswith(".git/")}
    assert short == expected
    assert "include" in short["tools/server/CMakeLists.txt"].decode()


def test_a_patch_that_does_not_apply_is_named(tiny_engine: tiny.Tiny) -> None:
    patch_set = read_patch_set(tiny_engine.native_patch)
    twice = PatchSet((*patch_set.patches, *patch_set.patches), patch_set.overlay)
    with pytest.raises(EngineToolError, match=r"hook\.patch does not apply"):
        list(compose(ArchiveSource(tiny_engine.archive), twice))


def test_a_source_with_files_in_the_overlays_place_is_refused(tiny_engine: tiny.Tiny) -> None:
    path = tiny.write_archive(
        tiny_engine.archive.with_name("other.tar.gz"),
        {f"llama.cpp/{k}": v for k, v in (tiny.TREE | {"tools/server/phase/x.h": ""}).items()},
    )
    with pytest.raises(EngineToolError, match=r"phase/x\.h"):
        list(compose(ArchiveSource(path), PatchSet((), ())))


def test_apply_works_inside_another_repository(
    tiny_engine: tiny.Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git apply silently skips files outside its repository; the scratch folder must not count as part of one."""
    tiny.git(tmp_path, "init", "-q")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    found = {
        item.path: item.data
        for item in compose(ArchiveSource(tiny_engine.archive), read_patch_set(tiny_engine.native_patch))
    }
    assert b"phase.cmake" in found["tools/server/CMakeLists.txt"]


def test_unchanged_files_keep_their_times(tmp_path: Path) -> None:
    files = [SourceFile("a", b"1"), SourceFile("d/b", b"2"), SourceFile("d/run", b"3", executable=True)]
    sync_tree(files, tmp_path)
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
    result = sync_tree([files[0], SourceFile("d/b", b"changed"), files[2]], tmp_path)
    assert (result.written, result.deleted, result.unchanged) == (("d/b",), (), 2)
    assert (tmp_path / "a").stat().st_mtime == 1
    assert (tmp_path / "d/b").stat().st_mtime > 1
    assert os.access(tmp_path / "d/run", os.X_OK)


def test_same_size_other_bytes_is_a_change(tmp_path: Path) -> None:
    sync_tree([SourceFile("a", b"one")], tmp_path)
    assert sync_tree([SourceFile("a", b"two")], tmp_path).written == ("a",)
    assert (tmp_path / "a").read_bytes() == b"two"


def test_what_is_in_the_way_is_replaced(tmp_path: Path) -> None:
    """A directory, a link and a stray file where files should be; the link's target stays as it is."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("keep")
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "stray").write_text("")
    (root / "d").symlink_to(outside)
    (root / "e").write_text("a file where a folder should be")
    sync_tree([SourceFile("a", b"1"), SourceFile("d/b", b"2"), SourceFile("e/f", b"3")], root)
    assert read_back(root) == {"a": b"1", "d/b": b"2", "e/f": b"3"}
    assert sorted(path.name for path in outside.iterdir()) == ["keep"]


@settings(max_examples=60, deadline=None)
@given(
    before=st.dictionaries(st.sampled_from(PATHS), st.binary(max_size=3)),
    after=st.dictionaries(st.sampled_from(PATHS), st.binary(max_size=3)),
)
def test_sync_gives_exactly_the_wanted_tree(
    tmp_path_factory: pytest.TempPathFactory, before: dict[str, bytes], after: dict[str, bytes]
) -> None:
    root = tmp_path_factory.mktemp("sync")
    sync_tree([SourceFile(path, data) for path, data in before.items()], root)
    result = sync_tree([SourceFile(path, data) for path, data in after.items()], root)
    assert read_back(root) == after
    assert set(result.written) == {path for path, data in after.items() if before.get(path) != data}
    assert set(result.deleted) == set(before) - set(after)
