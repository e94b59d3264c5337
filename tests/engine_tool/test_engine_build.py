"""The real engine, out of the user's cache: built where it is missing, then looked at from every side."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.engine import (
    BuildOptions,
    EnginePaths,
    cache_from_environment,
    ensure_engine,
    verify_files,
    verify_process,
)
from proxy.engine.fetch import fetch, source_archive
from proxy.engine.pin import find_native_patch, read_upstream
from proxy.engine.progress import SilentProgress
from proxy.engine.series import OVERLAY_DIR, read_patch_set
from proxy.engine.source import ArchiveSource
from proxy.engine.tree import compose, sync_tree
from proxy.engine.workflow import check_round_trip
from tests.support.ports import held_port

pytestmark = [pytest.mark.engine_build, pytest.mark.timeout(3600)]

READY_S = 60


@pytest.fixture(scope="module")
def built() -> EnginePaths:
    return ensure_engine(BuildOptions())


@pytest.fixture(scope="module")
def source(built: EnginePaths) -> ArchiveSource:
    return ArchiveSource(
        fetch(cache_from_environment(), source_archive(read_upstream(find_native_patch())), SilentProgress())
    )


@pytest.fixture
def router(built: EnginePaths, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The engine without a model, which is its router mode: it answers /props at once."""
    with held_port() as port:
        arguments = [
            str(built.server),
            "-t",
            "1",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--models-dir",
            str(tmp_path),
        ]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                arguments, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"HOME": str(tmp_path)}
            )
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + READY_S
        try:
            while True:
                try:
                    with urllib.request.urlopen(f"{url}/health", timeout=5):
                        break
                except OSError:
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                    time.sleep(0.05)
            yield process, url
        finally:
            process.kill()
            process.wait(10)


def test_it_verifies_and_says_what_it_is(built: EnginePaths) -> None:
    series = read_patch_set(find_native_patch()).series_hash
    pin = read_upstream(find_native_patch())
    assert verify_files(built.dir) == []
    assert built.manifest.identity == f"{pin.identity} : {series}"
    assert f"build {pin.build_number}, commit {series})" in built.manifest.version


def test_props_tells_the_same_identity(
    built: EnginePaths, router: tuple[subprocess.Popen[bytes], str]
) -> None:
    process, url = router
    with urllib.request.urlopen(f"{url}/props", timeout=10) as answer:
        props = json.load(answer)
    manifest = built.manifest
    assert props["build"] == {"pin": manifest.pin, "series": manifest.series, "flags": manifest.flags}
    assert props["build_info"] == f"b{manifest.build_number}-{manifest.series}"
    assert verify_process(process.pid, built.dir) == []


def test_a_second_call_takes_no_time(built: EnginePaths) -> None:
    before = time.monotonic()
    assert ensure_engine(BuildOptions()) == built
    assert time.monotonic() - before < 10


def test_the_series_comes_back_byte_for_byte(source: ArchiveSource) -> None:
    found = check_round_trip(find_native_patch(), source, read_upstream(find_native_patch()).identity)
    assert [str(problem) for problem in found] == []


def test_the_patched_tree_is_the_source_and_the_series_and_nothing_else(
    source: ArchiveSource, tmp_path: Path
) -> None:
    """What is compiled is the archive's tree but for the files the series names and the overlay."""
    patch_set = read_patch_set(find_native_patch())
    sync_tree(compose(source, patch_set), tmp_path)
    pristine = {item.path: item.data for item in source.files()}
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    overlay = {f"{OVERLAY_DIR}/{item.name}" for item in patch_set.overlay}
    differing = {name for name in there - overlay if pristine.get(name) != (tmp_path / name).read_bytes()}
    assert differing == set(patch_set.touched)
    assert there == set(pristine) | set(patch_set.touched) | overlay
