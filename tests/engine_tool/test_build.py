"""Whole builds of the small engine with the real cmake, ninja and compiler: keys, rebuilds, interruptions, lies."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.engine import (
    BuildOptions,
    EnginePaths,
    EngineToolError,
    ExitCode,
    ensure_engine,
    find_engine,
    make_plan,
    read_manifest,
    verify_files,
)
from proxy.engine.cache import file_lock
from proxy.engine.toolchain import install_hint
from tests.engine_tool import tiny
from tests.engine_tool.conftest import Recorder

DEADLINE_S = 120
OPTIONS = BuildOptions(jobs=1)

Build = Callable[..., EnginePaths]


@pytest.fixture
def build(tiny_engine: tiny.Tiny, recorder: Recorder) -> Build:
    """Build the small engine from its own series into its own cache."""

    def run(options: BuildOptions = OPTIONS) -> EnginePaths:
        recorder.steps.clear()
        recorder.notes.clear()
        return ensure_engine(
            options, recorder, cache=tiny_engine.cache, native_patch=tiny_engine.native_patch
        )

    return run


def compiled(recorder: Recorder) -> int:
    """Number of ninja steps the last build took."""
    return max((done for done, _, text in recorder.steps if text == "compile"), default=0)


def test_a_build_is_whole_relocatable_and_says_what_it_is(
    tiny_engine: tiny.Tiny, build: Build, recorder: Recorder, tmp_path: Path
) -> None:
    paths = build()
    series = make_plan(OPTIONS, tiny_engine.native_patch).series
    assert paths.dir.parent == tiny_engine.cache.engines
    assert paths.manifest.identity == f"tiny-engine-{tiny.VERSION} : {series}"
    assert paths.manifest.version == f"version: tiny (build 42, commit {series})"
    assert verify_files(paths.dir) == []
    assert {entry.path for entry in paths.manifest.files} == {
        "llama-server",
        "libllama-common.so.0",
        "libllama-common.so.0.1.0",
    }
    assert all(entry.required for entry in paths.manifest.files)
    moved = tmp_path / "moved"
    paths.dir.rename(moved)
    tiny_engine.cache.work.rename(tmp_path / "gone")
    done = subprocess.run(
        [str(moved / "llama-server"), "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert series in done.stdout
    assert [text for _, _, text in recorder.steps][0] == "configure"
    done_steps = [done for done, _, text in recorder.steps if text == "compile"]
    assert done_steps == sorted(done_steps)


def test_nothing_changed_means_nothing_done(
    build: Build, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network, no compiler run: the second time only hashes are compared."""
    first = build()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    before = time.monotonic()
    assert build().dir == first.dir
    assert time.monotonic() - before < 5
    assert recorder.steps == []


def test_an_overlay_change_recompiles_it_and_not_the_rest(
    tiny_engine: tiny.Tiny, build: Build, recorder: Recorder
) -> None:
    first = build()
    everything = compiled(recorder)
    machine = tiny_engine.native_patch / "overlay/machine.cpp"
    machine.write_text("int machine() { return 2; }\n")
    second = build()
    assert second.dir != first.dir
    # machine.cpp, main.cpp (it shows the hash), the archive and the program; not sampling.cpp and its library.
    assert compiled(recorder) == 4 < everything
    assert any("1 files written" in note for note in recorder.notes)
    machine.write_text("int machine() { return 1; }\n")
    assert build().dir == first.dir
    assert recorder.steps == []


def test_a_patch_change_reaches_the_tree(tiny_engine: tiny.Tiny, build: Build, recorder: Recorder) -> None:
    build()
    patch = tiny_engine.native_patch / "patches/hook.patch"
    text = patch.read_text()
    hunk = next(line for line in text.splitlines() if line.startswith("@@ "))
    longer = hunk.replace(",7 @@", ",8 @@")
    assert longer != hunk
    patch.write_text(text.replace(hunk, longer).replace("+include(", "+# changed\n+include("))
    build()
    tree = next(tiny_engine.cache.work.glob("*/src/llama.cpp"))
    assert "# changed" in (tree / "tools/server/CMakeLists.txt").read_text()


def test_flavours_and_flags_have_their_own_engines(
    tiny_engine: tiny.Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(options: BuildOptions) -> str:
        return make_plan(options, tiny_engine.native_patch).key

    keys = {
        key(options)
        for options in (OPTIONS, BuildOptions(release=True), BuildOptions(rpc=True), BuildOptions(stock=True))
    }
    assert len(keys) == 4
    assert key(BuildOptions(jobs=7)) == key(OPTIONS)
    monkeypatch.setenv("CXXFLAGS", "-O1")
    assert key(OPTIONS) not in keys


def test_stock_then_patched_compiles_only_what_the_series_touches(
    build: Build, tiny_engine: tiny.Tiny, recorder: Recorder
) -> None:
    stock = build(dataclasses.replace(OPTIONS, stock=True))
    everything = compiled(recorder)
    assert stock.manifest.series == "stock"
    tree = next(tiny_engine.cache.work.glob("*/src/llama.cpp"))
    assert not (tree / "tools/server/phase").exists()
    patched = build()
    assert (tree / "tools/server/phase/machine.cpp").is_file()
    assert compiled(recorder) < everything
    assert [verify_files(stock.dir), verify_files(patched.dir)] == [[], []]
    assert stock.dir != patched.dir


def test_an_own_checkout_is_copied_and_named(tiny_engine: tiny.Tiny, build: Build, tmp_path: Path) -> None:
    checkout = tmp_path / "mine"
    tiny.write_files(checkout, tiny.TREE)
    before = {path: path.stat().st_mtime_ns for path in checkout.rglob("*")}
    options = dataclasses.replace(OPTIONS, llama_cpp_dir=checkout)
    paths = build(options)
    assert paths.manifest.pin.startswith("local:")
    assert {path: path.stat().st_mtime_ns for path in checkout.rglob("*")} == before
    (checkout / "common/sampling.cpp").write_text("int sample() { return 8; }\n")
    assert build(options).manifest.pin != paths.manifest.pin


def test_a_damaged_engine_is_never_handed_out(
    tiny_engine: tiny.Tiny, build: Build, recorder: Recorder
) -> None:
    paths = build()
    library = paths.dir / "libllama-common.so.0.1.0"
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    library.write_bytes(data)
    assert find_engine(make_plan(OPTIONS, tiny_engine.native_patch), tiny_engine.cache) is None
    again = build()
    assert again.dir == paths.dir
    assert verify_files(again.dir) == []
    assert any("did not match its manifest" in note for note in recorder.notes)
    assert sorted(path.name for path in tiny_engine.cache.engines.iterdir()) == [paths.dir.name]


def test_a_compile_error_shows_the_compilers_words(tiny_engine: tiny.Tiny, build: Build) -> None:
    machine = tiny_engine.native_patch / "overlay/machine.cpp"
    whole = machine.read_text()
    machine.write_text("int machine() { return nonsense; }\n")
    with pytest.raises(EngineToolError, match=r"(?s)compiling with ninja failed.*build\.log.*nonsense"):
        build()
    assert not list(tiny_engine.cache.engines.glob("*")) if tiny_engine.cache.engines.exists() else True
    machine.write_text(whole)
    assert build().manifest.build_number == 42


def test_a_program_that_names_another_source_is_no_engine(tiny_engine: tiny.Tiny, build: Build) -> None:
    """As when the tree stops passing the hash on: the build must fail, not lie."""
    tree = tiny.TREE | {"tools/server/version.h.in": '#define TINY_VERSION "build 42, commit unknown"\n'}
    archive = tiny.write_archive(tiny_engine.archive, {f"llama.cpp/{k}": v for k, v in tree.items()})
    tiny.write_upstream(tiny_engine.native_patch, archive)
    with pytest.raises(EngineToolError, match="does not say"):
        build()
    assert [path for path in tiny_engine.cache.engines.iterdir() if not path.name.startswith(".")] == []


def test_changed_flags_start_the_build_folder_anew(
    build: Build, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    build()
    monkeypatch.setenv("CXXFLAGS", "-O1")
    paths = build()
    assert any("anew" in note for note in recorder.notes)
    assert "CMAKE_CXX_FLAGS=-O1" in " ".join(paths.manifest.cmake)


def test_missing_tools_are_named_with_the_command(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    (empty / "apt-get").write_text("#!/bin/sh\n")
    (empty / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        EngineToolError, match=r"a C\+\+ compiler, git.*\n.*apt-get install -y g\+\+ git"
    ) as caught:
        build()
    assert caught.value.exit_code is ExitCode.MISSING_TOOL
    assert "apt-get" in install_hint(["git"])
    (empty / "apt-get").unlink()
    assert "package manager" in install_hint(["git"])


def test_a_compiler_that_is_set_but_missing_is_named(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EngineToolError, match="no-such-compiler"):
        build()


def test_a_place_that_cannot_be_written_is_named(tiny_engine: tiny.Tiny, build: Build) -> None:
    """As with a full disk or a read-only cache: no traceback, the place, and what to look at."""
    work = tiny_engine.cache.work / make_plan(OPTIONS, tiny_engine.native_patch).work_name
    work.mkdir(parents=True)
    (work / "configured.json").mkdir()
    with pytest.raises(EngineToolError, match=r"configured\.json.*check free space and permissions"):
        build()


def test_two_builders_of_one_engine_build_it_once(tiny_engine: tiny.Tiny) -> None:
    results: list[EnginePaths] = []
    recorders = [Recorder(), Recorder()]

    def work(recorder: Recorder) -> None:
        results.append(
            ensure_engine(OPTIONS, recorder, cache=tiny_engine.cache, native_patch=tiny_engine.native_patch)
        )

    threads = [threading.Thread(target=work, args=(recorder,)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(results) == 2
    assert results[0].dir == results[1].dir
    assert sum(1 for recorder in recorders if recorder.steps) == 1


BUILDER = """
import sys
from pathlib import Path
from proxy.engine import BuildOptions, ensure_engine
from proxy.engine.cache import Cache
ensure_engine(BuildOptions(jobs=1), cache=Cache(Path(sys.argv[1])), native_patch=Path(sys.argv[2]))
"""

# A compiler that says who it is and then never ends, until the file that stops it is gone.
SLOW_COMPILER = """#!{python}
import os, sys, time
stop = {stop!r}
if os.path.exists(stop) and any(argument.endswith("machine.cpp") for argument in sys.argv):
    with open({told!r}, "w") as stream:
        stream.write(str(os.getpid()))
    while os.path.exists(stop):
        time.sleep(0.05)
os.execvp("c++", ["c++", *sys.argv[1:]])
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_in_the_middle_of_compiling(
    tiny_engine: tiny.Tiny,
    tmp_path: Path,
    build: Build,
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
) -> None:
    """Whatever ends the tool also ends ninja and its compilers; no engine appears; the next run finishes."""
    stop, told, compiler = tmp_path / "stop", tmp_path / "told", tmp_path / "slow-c++"
    compiler.write_text(SLOW_COMPILER.format(python=sys.executable, stop=str(stop), told=str(told)))
    compiler.chmod(0o755)
    stop.write_text("")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(tiny_engine.cache.root), str(tiny_engine.native_patch)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: told.exists() and bool(told.read_text()), "the compiler never started")
        pid = int(told.read_text())
        assert alive(pid)
        process.send_signal(signum)
        assert process.wait(DEADLINE_S) != 0
        wait_for(lambda: not alive(pid), "a compiler outlived the tool")
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert not tiny_engine.cache.engines.exists()
    stop.unlink()
    with file_lock(next(tiny_engine.cache.work.iterdir()) / "lock", "test", timeout_s=10):
        pass
    paths = build()
    assert read_manifest(paths.dir).build_number == 42
    assert os.access(paths.server, os.X_OK)
