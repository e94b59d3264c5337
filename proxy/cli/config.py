"""`llama-proxy init` and `llama-proxy config`: write, check and describe the configuration."""

import json
import os
import sys
from pathlib import Path

import click

from proxy.config import load
from proxy.settings import ConfigError, Settings, json_schema

DEFAULT_NAME = "llama-proxy.yaml"

STARTER = """\
# llama-proxy configuration. Every field: config.example.yaml, or `llama-proxy config schema`.
# Durations and sizes carry their unit in the name; 0 or null means "off".

server:
  host: 127.0.0.1 # other machines need server.api_keys and server.admin_keys
  port: 8082

engine:
  phase_policy: drain # mixed | drain | yield
  args: [-np, "4"] # for every model: four requests at once

# Every GGUF in this folder is a model; entries under `models` refine or add.
# models_dir: models/

models:
  # qwen:
  #   path: models/qwen.gguf
  #   aliases: [default]
  #   args: [-c, "32768", -ngl, all]
"""


def config_path(given: Path | None) -> Path | None:
    """Find the configuration: the flag, `LLAMA_PROXY_CONFIG`, ./llama-proxy.yaml, then the user's own.

    Returns None when there is none, which means the embedded default.
    """
    if given is not None:
        return given
    named = os.environ.get("LLAMA_PROXY_CONFIG")
    if named:
        return Path(named)
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    for candidate in (Path(DEFAULT_NAME), home / "llama-proxy" / "config.yaml"):
        if candidate.is_file():
            return candidate
    return None


def load_or_exit(path: Path | None) -> Settings:
    """Load the configuration; on an error print every line of it and exit with 2."""
    try:
        return load(path)
    except ConfigError as error:
        for line in str(error).splitlines():
            click.secho(line, fg="red", err=True)
        sys.exit(2)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=DEFAULT_NAME)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(file: Path, force: bool) -> None:
    """Write a commented starting configuration to FILE (default ./llama-proxy.yaml)."""
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(STARTER)
    except FileExistsError:
        raise click.ClickException(f"{file} exists; use --force to overwrite it") from None
    except OSError as error:
        raise click.ClickException(f"{file}: {error.strerror}") from None
    click.echo(f"wrote {file}; next: add a model, then `llama-proxy serve`")


@click.group()
def config() -> None:
    """Check or describe the configuration."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def check(file: Path | None, as_json: bool) -> None:
    """Validate FILE (default: the one `serve` would use) and the environment. Exit code 2 on an error."""
    from proxy.backends import check_models  # noqa: PLC0415 - every other command reads a configuration, too

    path = config_path(file)
    try:
        settings = load(path)
        check_models(settings.models, settings.engine)
    except ConfigError as error:
        if as_json:
            click.echo(
                json.dumps(
                    {"ok": False, "file": str(path) if path else None, "errors": str(error).splitlines()}
                )
            )
        else:
            for line in str(error).splitlines():
                click.secho(line, fg="red", err=True)
        sys.exit(2)
    missing = {
        name: str(model.path)
        for name, model in settings.models.items()
        if model.path is not None and not model.path.is_file()
    }
    if as_json:
        click.echo(
            json.dumps(
                {
                    "ok": True,
                    "file": str(path) if path else None,
                    "models": list(settings.models),
                    "missing_files": missing,
                }
            )
        )
        return
    click.echo(f"{path or 'no file: the embedded default'}: valid, {len(settings.models)} model(s)")
    for name, where in missing.items():
        click.secho(f"  models.{name}.path: {where} does not exist (yet)", fg="yellow")


@config.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    click.echo(json.dumps(json_schema(), indent=2))
