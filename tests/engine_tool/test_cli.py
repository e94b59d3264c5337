"""The engine commands as a person and a script see them."""

import io
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from proxy.cli.engine import engine
from proxy.cli.progress import ConsoleProgress, LineProgress
from proxy.engine.errors import ExitCode
from tests.engine_tool import tiny
from tests.support.wait import until


class Cli:
    """Runs engine commands on the small engine."""

    def __init__(self, made: tiny.Tiny) -> None:
        self.series = str(made.native_patch)

    def __call__(self, *arguments: str) -> Result:
        result = CliRunner().invoke(engine, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def of_series(self, command: str, *arguments: str) -> Result:
        return self(command, "--series-dir", self.series, *arguments)


@pytest.fixture
def cli(tiny_engine: tiny.Tiny, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("LLAMA_PROXY_CACHE", str(tiny_engine.cache.root))
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    monkeypatch.delenv("CUDA", raising=False)
    return Cli(tiny_engine)


def test_build_path_manifest_verify(cli: Cli) -> None:
    before = cli.of_series("path")
    assert before.exit_code == ExitCode.FAILED
    assert "llama-proxy engine build" in before.stderr

    built = cli.of_series("build", "--json", "--jobs", "1")
    assert built.exit_code == 0, built.stderr
    said = json.loads(built.stdout)
    assert said["ok"] is True
    assert "compile" in built.stderr

    assert cli.of_series("path").stdout.strip() == said["server"]
    assert cli.of_series("manifest").stdout.startswith(said["identity"])
    raw = json.loads(cli.of_series("manifest", "--json").stdout)
    assert raw["identity"] == said["identity"]

    good = cli.of_series("verify")
    assert good.exit_code == 0
    assert "is what its manifest says" in good.stdout

    library = Path(said["dir"]) / "libllama-common.so.0.1.0"
    library.write_bytes(library.read_bytes() + b"x")
    bad = cli("verify", said["dir"])
    assert bad.exit_code == ExitCode.MISMATCH
    listed = next(entry for entry in raw["files"] if entry["path"] == library.name)
    assert listed["sha256"] in bad.stderr
    report = json.loads(cli("verify", said["dir"], "--json").stdout)
    assert (report["ok"], [lie["reason"] for lie in report["files"]]) == (False, ["sha256"])
    assert cli.of_series("path").exit_code == ExitCode.FAILED
    # Without a directory the damaged engine is looked at, not called missing.
    assert cli.of_series("verify").exit_code == ExitCode.MISMATCH


def test_verify_looks_into_a_running_process(cli: Cli) -> None:
    said = json.loads(cli.of_series("build", "--json").stdout)
    with subprocess.Popen([said["server"]], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            # the loader needs a moment to map the libraries of a process that has just started
            maps = Path(f"/proc/{process.pid}/maps")
            libraries = [f.name for f in Path(said["dir"]).glob("lib*.so*") if not f.is_symlink()]
            assert libraries
            until("all libraries are mapped", lambda: all(name in maps.read_text() for name in libraries))
            good = cli("verify", said["dir"], "--pid", str(process.pid))
            bad = cli("verify", said["dir"], "--pid", "1")
        finally:
            process.kill()
    assert good.exit_code == 0, good.stderr
    assert f"process {process.pid}" in good.stdout
    assert bad.exit_code in (ExitCode.MISMATCH, ExitCode.FAILED)


def test_apply_export_check(cli: Cli, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    applied = cli.of_series("apply", str(tree))
    assert applied.exit_code == 0, applied.stderr
    assert "1 patches, 2 overlay files" in applied.stdout
    assert cli.of_series("apply", str(tree)).exit_code == ExitCode.FAILED
    assert json.loads(cli.of_series("export", str(tree), "--json").stdout)["changed"] == []
    good = cli.of_series("check")
    assert good.exit_code == 0, good.stderr
    assert "hook" in good.stdout
    (Path(cli.series) / "patches/lost.patch").write_text("x")
    bad = cli.of_series("check", "--files-only")
    assert bad.exit_code == ExitCode.MISMATCH
    assert "lost.patch" in bad.stderr
    assert json.loads(cli.of_series("check", "--json").stdout)["problems"][0]["where"] == "patches/lost.patch"


def test_bump_to_the_pinned_version_needs_no_network(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    said = cli.of_series("bump", "--to", tiny.VERSION, "--json")
    assert said.exit_code == 0, said.stderr
    report = json.loads(said.stdout)
    assert [(row["patch"], row["outcome"]) for row in report["rows"]] == [("hook", "clean")]
    assert report["version"] == tiny.VERSION
    assert cli.of_series("bump", "--to", "1; rm").exit_code == ExitCode.FAILED


def test_a_failure_is_one_json_object_too(cli: Cli) -> None:
    (Path(cli.series) / "series").write_text("gone.patch\n")
    result = cli.of_series("build", "--json")
    assert result.exit_code == ExitCode.FAILED
    said = json.loads(result.stdout)
    assert said["ok"] is False
    assert "gone.patch" in said["error"]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "--sanitize", "thread,address"],
        ["build", "--sanitize", "everything"],
        ["build", "--cuda-arch", "70"],
        ["build", "--jobs", "0"],
        ["verify", "/nonexistent"],
    ],
)
def test_wrong_usage_exits_with_two(cli: Cli, arguments: list[str]) -> None:
    assert cli(*arguments).exit_code == 2


def test_lines_are_printed_when_due_and_at_the_end() -> None:
    now = [0.0]
    console = Console(record=True, width=200, file=io.StringIO())
    progress = LineProgress(console, interval_s=5, clock=lambda: now[0])
    for step in range(101):
        now[0] = step * 0.5
        progress.step(step, 100, "compile")
    progress.step(100, 100, "compile")
    progress.note("done")
    lines = console.export_text().splitlines()
    assert lines[0] == "compile 0/100"
    assert lines[1] == "compile 10/100, about 45 s left"
    assert lines[-2:] == ["compile 100/100", "done"]
    assert len(lines) == 12


def test_a_terminal_gets_a_bar() -> None:
    console = Console(
        force_terminal=True, force_interactive=True, width=100, record=True, file=io.StringIO(), _environ={}
    )
    with ConsoleProgress(console) as progress:
        progress.step(3, 10, "compile")
        progress.note("a note [with brackets]")
    text = console.export_text()
    assert "3/10" in text
    assert "a note [with brackets]" in text
