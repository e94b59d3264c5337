"""The command line: what people type, what they read, what scripts get."""

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy import __version__
from proxy.cli.config import config_path
from proxy.cli.main import cli
from proxy.config import load


@pytest.fixture
def run() -> CliRunner:
    return CliRunner()


def test_version_and_help(run: CliRunner) -> None:
    """`--version` tells the version; every command explains itself."""
    assert __version__ in run.invoke(cli, ["--version"]).output
    for words in (
        ["--help"],
        ["serve", "--help"],
        ["init", "--help"],
        ["config", "--help"],
        ["engine", "--help"],
    ):
        done = run.invoke(cli, words)
        assert done.exit_code == 0
        assert "Usage:" in done.output


def test_init_writes_a_configuration_that_loads(run: CliRunner, tmp_path: Path) -> None:
    """What init writes is valid; it never overwrites without being told to."""
    file = tmp_path / "c.yaml"
    assert run.invoke(cli, ["init", str(file)]).exit_code == 0
    load(file, {})
    again = run.invoke(cli, ["init", str(file)])
    assert again.exit_code == 1
    assert "--force" in again.output
    assert run.invoke(cli, ["init", "--force", str(file)]).exit_code == 0
    lost = run.invoke(cli, ["init", str(tmp_path / "no" / "c.yaml")])
    assert lost.exit_code == 1
    assert "No such file" in lost.output


def test_config_check_speaks_to_people_and_scripts(run: CliRunner, tmp_path: Path) -> None:
    """Exit code 2 and the field on an error; missing model files are a hint, not an error."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("server: {prot: 1}")
    done = run.invoke(cli, ["config", "check", str(bad)])
    assert done.exit_code == 2
    assert "server.prot" in done.output
    done = run.invoke(cli, ["config", "check", "--json", str(bad)])
    assert done.exit_code == 2
    assert json.loads(done.output)["ok"] is False
    good = tmp_path / "good.yaml"
    good.write_text("models: {a: {path: a.gguf}}")
    done = run.invoke(cli, ["config", "check", str(good)])
    assert done.exit_code == 0
    assert "does not exist (yet)" in done.output
    done = run.invoke(cli, ["config", "check", "--json", str(good)])
    assert json.loads(done.output) == {
        "ok": True, "file": str(good), "models": ["a"], "missing_files": {"a": str(tmp_path / "a.gguf")},
    }  # fmt: skip


def test_reserved_arguments_are_refused_before_anything_starts(run: CliRunner, tmp_path: Path) -> None:
    """What the engine may not be told is found by check and by serve, in one sentence."""
    file = tmp_path / "c.yaml"
    file.write_text("engine: {args: [--port, 99]}\nmodels: {a: {path: a.gguf}}")
    done = run.invoke(cli, ["config", "check", str(file)])
    assert done.exit_code == 2
    assert "--port" in done.output
    served = subprocess.run(
        [sys.executable, "-m", "proxy", "serve", "--config", str(file)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert served.returncode == 2
    assert "--port" in served.stderr
    assert "Traceback" not in served.stderr


def test_schema_is_json(run: CliRunner) -> None:
    """The schema can be piped into an editor."""
    assert json.loads(run.invoke(cli, ["config", "schema"]).output)["title"] == "llama-proxy configuration"


def test_where_the_configuration_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flag, then variable, then ./llama-proxy.yaml, then the user's own, then none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLAMA_PROXY_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert config_path(None) is None
    own = tmp_path / "xdg" / "llama-proxy" / "config.yaml"
    own.parent.mkdir(parents=True)
    own.touch()
    assert config_path(None) == own
    (tmp_path / "llama-proxy.yaml").touch()
    assert config_path(None) == Path("llama-proxy.yaml")
    monkeypatch.setenv("LLAMA_PROXY_CONFIG", "/named.yaml")
    assert config_path(None) == Path("/named.yaml")
    assert config_path(Path("flag.yaml")) == Path("flag.yaml")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "a.gguf", "--config", "b.yaml"], "exclude each other"),
        (["--alias", "x"], "--alias needs --model"),
        (["--engine", "/nowhere/llama-server"], "/nowhere/llama-server does not exist"),
        (["--config", "/nowhere/c.yaml"], "cannot be read"),
        (["--port", "70000"], "70000"),
        (["--engine", sys.executable, "--model", "/nowhere/m.gguf"], "/nowhere/m.gguf does not exist"),
        (["--engine", sys.executable, "--host", "0.0.0.0"], "insecure_no_keys"),
        (["--engine", "/etc/passwd"], "no llama-server program at /etc/passwd"),
        (["--model", "/nowhere/m.gguf"], "/nowhere/m.gguf does not exist"),
    ],
)
def test_serve_refuses_what_cannot_work(words: list[str], said: str) -> None:
    """A wrong flag is one clear sentence and exit code 2, before anything slow begins."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_PROXY_")}
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "serve", *words],
        capture_output=True, text=True, timeout=30, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    """No traceback when the port is taken."""
    engine = tmp_path / "llama-server"
    engine.write_text("#!/bin/sh\n")
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = tmp_path / "c.yaml"
        file.write_text(
            f"server: {{port: {port}}}\nengine: {{dir: {engine}}}\nmodels: {{a: {{path: a.gguf}}}}"
        )
        done = subprocess.run(
            [sys.executable, "-m", "proxy", "serve", "--config", str(file)],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
