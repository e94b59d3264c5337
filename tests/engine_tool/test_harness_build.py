"""The harness beside the engine: in the same tree, in nobody's identity, found by name."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli.engine import engine
from proxy.engine import BuildOptions, EngineToolError, ensure_engine, find_engine, make_plan, verify_files
from proxy.engine.pin import find_native_patch
from tests.engine_tool import tiny
from tests.engine_tool.conftest import Recorder

PLAIN, WITH = BuildOptions(jobs=1), BuildOptions(jobs=1, harness=True)


@pytest.fixture
def tiny_harness(tiny_engine: tiny.Tiny) -> tiny.Tiny:
    """The small engine with a small harness; what attaches it to the tree is the real file."""
    folder = tiny_engine.native_patch / "harness"
    tiny.write_files(folder, tiny.HARNESS)
    shutil.copyfile(find_native_patch() / "harness" / "attach.cmake", folder / "attach.cmake")
    return tiny_engine


def test_it_is_one_more_program_of_the_same_build(tiny_harness: tiny.Tiny, recorder: Recorder) -> None:
    """Built after the plain engine it costs its own compilation and no other, and the plain engine stays what it is."""
    made = tiny_harness
    plain = ensure_engine(PLAIN, recorder, cache=made.cache, native_patch=made.native_patch)
    assert plain.harness is None
    recorder.steps.clear()
    both = ensure_engine(WITH, recorder, cache=made.cache, native_patch=made.native_patch)
    assert max(done for done, _, text in recorder.steps if text == "compile") <= 3
    assert both.dir != plain.dir
    assert both.manifest.identity == plain.manifest.identity
    assert verify_files(both.dir) == []
    assert both.harness is not None
    subprocess.run([str(both.harness)], check=True, timeout=60)
    entries = {entry.path: entry for entry in both.manifest.files}
    assert not entries["llama-phase-harness"].required
    assert entries["llama-phase-harness"].used_by == ("llama-phase-harness",)
    assert entries["llama-server"].required
    assert find_engine(make_plan(PLAIN, made.native_patch), made.cache) == plain


def test_the_engine_is_built_again_without_it(tiny_harness: tiny.Tiny, recorder: Recorder) -> None:
    """A build folder that knew the harness forgets it."""
    made = tiny_harness
    ensure_engine(WITH, recorder, cache=made.cache, native_patch=made.native_patch)
    plain = ensure_engine(PLAIN, recorder, cache=made.cache, native_patch=made.native_patch)
    assert plain.harness is None
    assert verify_files(plain.dir) == []


def test_its_sources_are_in_no_other_key(tiny_harness: tiny.Tiny) -> None:
    patch = tiny_harness.native_patch

    def keys() -> tuple[str, str]:
        return make_plan(PLAIN, patch).key, make_plan(WITH, patch).key

    before = keys()
    assert before[0] != before[1]
    tiny.write_files(patch / "harness", {"main.cpp": "int main() { return 0; }\n"})
    after = keys()
    assert after[0] == before[0]
    assert after[1] != before[1]
    shutil.rmtree(patch / "harness")
    assert make_plan(PLAIN, patch).key == before[0]
    with pytest.raises(EngineToolError, match=r"attach\.cmake"):
        make_plan(WITH, patch)


def test_the_command_line_finds_it(tiny_harness: tiny.Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_PROXY_CACHE", str(tiny_harness.cache.root))
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    monkeypatch.delenv("CUDA", raising=False)
    series = ("--series-dir", str(tiny_harness.native_patch))

    def run(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(engine, [*arguments, *series])
        return result.exit_code, result.stdout.strip(), result.stderr

    code, _, said = run("path", "--harness")
    assert code == 1
    assert "llama-proxy engine build --harness" in said
    code, text, said = run("build", "--harness", "--json", "--jobs", "1")
    assert code == 0, said
    harness = json.loads(text)["harness"]
    assert run("path", "--harness")[1] == harness
    assert Path(harness).name == "llama-phase-harness"
    assert run("path")[0] == 1
