"""Fixtures: a small engine source, its series, and a small real program to verify."""

import shutil
import subprocess
from pathlib import Path

import pytest

from proxy.engine.cache import Cache
from proxy.engine.manifest import Manifest, describe_files, write_manifest
from proxy.engine.series import PatchSet
from proxy.engine.source import ArchiveSource
from proxy.engine.workflow import apply_series, export_series, write_patch_set
from tests.engine_tool import tiny


class Recorder:
    """A progress listener that keeps what it was told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, str]] = []
        self.notes: list[str] = []

    def step(self, done: int, total: int, text: str) -> None:
        self.steps.append((done, total, text))

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session")
def tiny_origin(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    """Made once: the archive and a series of one hook patch, exported from a development tree like any other."""
    root = tmp_path_factory.mktemp("tiny")
    cache = Cache(root / "cache")
    archive = tiny.write_archive(
        cache.downloads / f"tiny_engine-{tiny.VERSION}.tar.gz",
        {f"llama.cpp/{name}": text for name, text in tiny.TREE.items()},
    )
    native_patch = root / "native-patch"
    tiny.write_files(native_patch, {f"overlay/{name}": text for name, text in tiny.OVERLAY.items()})
    tiny.write_upstream(native_patch, archive)
    tree = root / "dev"
    apply_series(ArchiveSource(archive).files(), PatchSet((), ()), tree, "tiny")
    tiny.write_files(tree, {f"tools/server/phase/{name}": text for name, text in tiny.OVERLAY.items()})
    tiny.write_files(tree, {"tools/server/CMakeLists.txt": tiny.HOOKED})
    tiny.commit(tree, "Let the overlay in\n\nWhy it is there.\n\nPatch-Name: hook\nForwarded: not-needed")
    write_patch_set(native_patch, export_series(tree))
    return tiny.Tiny(native_patch, cache, archive)


@pytest.fixture
def tiny_engine(tiny_origin: tiny.Tiny, tmp_path: Path) -> tiny.Tiny:
    """A copy of the series and a cache of its own, to be changed at will."""
    native_patch = tmp_path / "native-patch"
    shutil.copytree(tiny_origin.native_patch, native_patch)
    cache = Cache(tmp_path / "cache")
    cache.downloads.mkdir(parents=True)
    archive = cache.downloads / tiny_origin.archive.name
    shutil.copyfile(tiny_origin.archive, archive)
    return tiny.Tiny(native_patch, cache, archive)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real program that waits for its standard input, and a real library it finds beside itself."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "lib.c").write_text("int answer(void) { return 42; }\n")
    (folder / "main.c").write_text(
        "#include <stdio.h>\nint answer(void);\n"
        'int main(void) { printf("%d\\n", answer()); fflush(stdout); return getchar() == EOF ? 0 : 1; }\n'
    )
    engine = folder / "engine"
    engine.mkdir()
    for command in (
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libanswer.so.1", "-o", "engine/libanswer.so.1.2", "lib.c"],
        ["cc", "-o", "engine/llama-server", "main.c", "engine/libanswer.so.1.2", "-Wl,-rpath,$ORIGIN"],
    ):
        # The loader looks for the soname, so the link must exist before the program is linked against it.
        (engine / "libanswer.so.1").unlink(missing_ok=True)
        (engine / "libanswer.so.1").symlink_to("libanswer.so.1.2")
        subprocess.run(command, cwd=folder, check=True, timeout=60)
    write_manifest(engine, make_manifest(engine))
    return engine


def make_manifest(engine: Path) -> Manifest:
    return Manifest(
        identity="tiny-42 : abc",
        pin="tiny-42",
        series="abc",
        build_number=42,
        flags="GGML_NATIVE=ON",
        key="cpu-native-abc",
        version="version: tiny (build 42, commit abc)",
        compiler="cc",
        cmake=(),
        cpu_features=(),
        built_at="2026-01-01T00:00:00+00:00",
        files=describe_files(engine, ["llama-server"], "llama-server"),
    )


@pytest.fixture
def engine_dir(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the compiled engine, to be damaged at will."""
    target = tmp_path / "engine"
    shutil.copytree(compiled, target, symlinks=True)
    return target
