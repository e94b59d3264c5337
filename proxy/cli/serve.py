"""`llama-proxy serve`: make sure there is an engine and a model, then serve."""

import asyncio
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click

from proxy import logs
from proxy.app import EngineBinary, Engines, Listening, server_at, with_overrides
from proxy.app import serve as serve_app
from proxy.backends import check_models, needs_engine
from proxy.cli.config import config_path, load_or_exit
from proxy.cli.progress import ConsoleProgress
from proxy.config import load
from proxy.engine import (
    BuildOptions,
    EngineToolError,
    ExitCode,
    ensure_demo_model,
    ensure_engine,
    options_from_environment,
)
from proxy.fields import model_id
from proxy.settings import ConfigError, Model, Settings, check_bind

DEMO_NAME = "smollm2-135m-instruct"
DEMO_ARGS = ("-np", "4", "-b", "512", "-c", "8192")


@click.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="Configuration file (YAML).")
@click.option(
    "--model", "model_file", type=click.Path(path_type=Path), help="Serve this GGUF, without a configuration."
)
@click.option("--alias", help="A second name for --model.")
@click.option("--engine", help="A llama-server file or folder to use instead of building one.")
@click.option("--cuda", is_flag=True, help="Build the engine for CUDA.")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.")
def serve(
    config_file: Path | None,
    model_file: Path | None,
    alias: str | None,
    engine: str | None,
    cuda: bool,
    host: str | None,
    port: int | None,
) -> None:
    """Serve models on one OpenAI-compatible port.

    Without a configuration and without --model a small demo model is fetched and served. Models load on
    their first request. Ctrl-C drains and stops; a second Ctrl-C cuts.
    """
    if model_file is not None and config_file is not None:
        raise click.UsageError(
            "--model and --config exclude each other; put the model into the configuration"
        )
    if alias is not None and model_file is None:
        raise click.UsageError("--alias needs --model")
    settings = load_or_exit(None if model_file is not None else config_path(config_file))
    logs.configure(settings.server.log_level, settings.server.log_format)
    file = None if model_file is not None else config_path(config_file)
    engine_path = _engine_path(engine)

    def reread() -> Settings:
        again = with_overrides(load(file), host=host, port=port, engine=engine_path)
        if not again.models:
            raise ConfigError(f"{file}: models: there is none any more; name at least one")
        return again

    try:
        settings = check_bind(with_overrides(settings, host=host, port=port, engine=engine_path))
        settings, default = _prepared(settings, model_file, alias, cuda=cuda)
    except EngineToolError as error:
        click.secho(error.message, fg="red", err=True)
        sys.exit(int(error.exit_code))
    except ConfigError as error:
        click.secho(str(error), fg="red", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo("\ninterrupted; what is done is kept, the next run goes on from there", err=True)
        sys.exit(int(ExitCode.INTERRUPTED))
    try:
        _run(settings, Engines(settings, default), reread if file is not None else None)
    except ConfigError as error:
        click.secho(str(error), fg="red", err=True)
        sys.exit(2)
    except OSError as error:
        _cannot_listen(settings, error)


def _cannot_listen(settings: Settings, error: OSError) -> NoReturn:
    where = f"{settings.server.host}:{settings.server.port}"
    text = f"cannot listen on {where}: {error.strerror or error}; choose another --port"
    click.secho(text, fg="red", err=True)
    sys.exit(1)


def _engine_path(text: str | None) -> str | None:
    """Check a given engine before anything slow begins."""
    if text is None:
        return None
    path = Path(text).expanduser().absolute()
    if not path.exists():
        raise click.BadParameter(f"{path} does not exist", param_hint="--engine")
    return str(path)


def _prepared(
    settings: Settings, model_file: Path | None, alias: str | None, *, cuda: bool
) -> tuple[Settings, EngineBinary | None]:
    """Return settings with at least one model, and the built engine where one is needed."""
    models = settings.models
    if model_file is not None:
        path = model_file.expanduser().absolute()
        if not path.is_file():
            raise ConfigError(f"--model: {model_file} does not exist")
        names = {"the name of --model": path.stem} | ({"--alias": alias} if alias else {})
        for flag, name in names.items():
            try:
                model_id(name)
            except ValueError as error:
                raise ConfigError(f"{flag}: {error}") from None
        models = {path.stem: Model(path=path, aliases=(alias,) if alias and alias != path.stem else ())}
    settings = settings.model_copy(update={"models": models})
    _check_early(settings)
    with ConsoleProgress() as progress:
        default = None
        if settings.engine.dir == "auto" and _needs_engine(settings, model_file):
            paths = ensure_engine(_options(cuda=cuda), progress)
            default = EngineBinary(path=paths.server, patched=True, dir=paths.dir)
        if not settings.models:
            path = ensure_demo_model(progress)
            click.echo(f"no model configured: serving the demo model {DEMO_NAME}", err=True)
            text = "Demo model: tiny, often wrong, here to see things move."
            model = Model(path=path, args=DEMO_ARGS, aliases=("default",), description=text)
            settings = settings.model_copy(update={"models": {DEMO_NAME: model}})
    return settings, default


def _check_early(settings: Settings) -> None:
    """Find what cannot work before a long build: reserved arguments, a missing engine, a taken port."""
    check_models(settings.models, settings.engine)
    named = {"engine.dir": settings.engine.dir} if settings.engine.dir != "auto" else {}
    named |= {
        f"models.{name}.engine": m.engine for name, m in settings.models.items() if m.engine is not None
    }
    for field, text in named.items():
        if server_at(text) is None:
            raise ConfigError(f"{field}: there is no llama-server program at {text}")
    for name, model in settings.models.items():
        if model.path is not None and not model.path.is_file():
            click.secho(f"models.{name}.path: {model.path} does not exist (yet)", fg="yellow", err=True)
    if settings.server.port:
        family = socket.AF_INET6 if ":" in settings.server.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.server.host.strip("[]"), settings.server.port))
            except OSError as error:
                _cannot_listen(settings, error)


def _options(*, cuda: bool) -> BuildOptions:
    """Return the build options of the environment (`LLAMA_CPP_DIR`, …), with CUDA where it was asked for."""
    options = options_from_environment()
    return replace(options, cuda=True) if cuda else options


def _needs_engine(settings: Settings, model_file: Path | None) -> bool:
    models = settings.models.values()
    ours = any(model.engine is None and needs_engine(model, settings.engine) for model in models)
    return model_file is not None or not settings.models or ours


def _run(settings: Settings, engines: Engines, reread: Callable[[], Settings] | None) -> None:
    def told(where: Listening) -> None:
        if sys.stderr.isatty():
            names = ", ".join(f"{n} (demo model)" if n == DEMO_NAME else n for n in settings.models)
            text = f"\nllama-proxy is ready: {where.url}/v1   models: {names}   Ctrl-C stops, twice cuts\n"
            click.secho(text, fg="green", err=True)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve_app(settings, engines, told, reread))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop  # noqa: PLC0415 - optional: not on every platform
    except ImportError:
        return None
    return uvloop.new_event_loop
