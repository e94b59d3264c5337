"""Reading the unpatched tree: out of an archive without trusting it, out of a checkout without touching it."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from proxy.engine.errors import EngineToolError
from proxy.engine.source import ArchiveSource, CheckoutSource, identify_checkout, safe_relative
from tests.engine_tool import tiny


def archive_with(tmp_path: Path, *members: tarfile.TarInfo) -> Path:
    path = tiny.write_archive(tmp_path / "base.tar.gz", {f"llama.cpp/{k}": v for k, v in tiny.TREE.items()})
    out = tmp_path / "out.tar"
    with tarfile.open(path) as source, tarfile.open(out, "w") as target:
        for member in source:
            target.addfile(member, source.extractfile(member))
        for member in members:
            target.addfile(member, io.BytesIO(b"x" * member.size))
    return out


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, 1 if kind == tarfile.REGTYPE else 0
    return info


def test_takes_only_the_engine_tree(tmp_path: Path) -> None:
    found = {item.path: item.data.decode() for item in ArchiveSource(archive_with(tmp_path)).files()}
    assert found == tiny.TREE


@pytest.mark.parametrize(
    "bad",
    [
        member("top/llama.cpp/../../escape"),
        member("/etc/passwd"),
        member("top/llama.cpp/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("top/llama.cpp/hard", tarfile.LNKTYPE, "top/llama.cpp/CMakeLists.txt"),
        member("top/llama.cpp/fifo", tarfile.FIFOTYPE),
        member("top/llama.cpp/back\\slash"),
    ],
    ids=lambda info: info.name,
)
def test_refuses_members_that_are_unsafe(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    with pytest.raises(EngineToolError, match=r"unsafe member|link or a device"):
        list(ArchiveSource(archive_with(tmp_path, bad)).files())


def test_a_truncated_archive_is_an_error(tmp_path: Path) -> None:
    path = tiny.write_archive(tmp_path / "a.tar.gz", {f"llama.cpp/{k}": v for k, v in tiny.TREE.items()})
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(EngineToolError, match=r"cannot be unpacked"):
        list(ArchiveSource(path).files())


def test_an_archive_of_something_else_is_an_error(tmp_path: Path) -> None:
    path = tiny.write_archive(tmp_path / "a.tar.gz", {"README.md": "hello"})
    with pytest.raises(EngineToolError, match="does not hold a llama.cpp tree"):
        list(ArchiveSource(path).files())


@pytest.mark.parametrize("path", ["", ".", "..", "a/../b", "/a", "a\0b", "a\\b"])
def test_safe_relative_refuses(path: str) -> None:
    assert safe_relative(path) is None


def test_safe_relative_normalises() -> None:
    assert safe_relative("./a//b") == "a/b"


def test_checkout_without_git(tmp_path: Path) -> None:
    tiny.write_files(tmp_path, tiny.TREE | {"build/CMakeCache.txt": "generated"})
    found = {item.path for item in CheckoutSource(tmp_path).files()}
    assert found == set(tiny.TREE)
    identity = identify_checkout(tmp_path)
    assert identity.identity == f"local:{identity.content_sha256[:12]}"
    (tmp_path / "common/sampling.cpp").write_text("int sample() { return 8; }\n")
    assert identify_checkout(tmp_path).identity != identity.identity


def test_checkout_with_git_follows_ignore_rules_and_says_dirty(tmp_path: Path) -> None:
    tiny.write_files(tmp_path, tiny.TREE | {".gitignore": "*.o\n", "x.o": "object"})
    tiny.git(tmp_path, "init", "-q")
    tiny.commit(tmp_path, "all")
    tiny.git(tmp_path, "tag", "b123")
    clean = identify_checkout(tmp_path)
    assert (clean.identity, clean.build_number) == ("local:b123", 123)
    assert {item.path for item in CheckoutSource(tmp_path).files()} == {*tiny.TREE, ".gitignore"}
    (tmp_path / "common/sampling.cpp").write_text("int sample() { return 8; }\n")
    dirty = identify_checkout(tmp_path)
    assert dirty.identity == f"local:b123-dirty-{dirty.content_sha256[:8]}"


def test_checkout_refuses_links_out_of_it(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    tiny.write_files(root, tiny.TREE)
    (tmp_path / "secret").write_text("x")
    os.symlink(tmp_path / "secret", root / "common" / "link.h")
    with pytest.raises(EngineToolError, match=r"link\.h"):
        list(CheckoutSource(root).files())


def test_missing_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineToolError, match="LLAMA_CPP_DIR"):
        identify_checkout(tmp_path / "nowhere")
