"""``llama-proxy engine``: build, find, verify and carry the patched llama-server."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click

from proxy.cli.engine_series import apply, bump, check, export
from proxy.cli.engine_shared import json_option, new_table, plain_errors, print_table, series_option
from proxy.cli.progress import ConsoleProgress
from proxy.engine import (
    BuildOptions,
    EnginePaths,
    EngineToolError,
    ExitCode,
    Manifest,
    Mismatch,
    cache_from_environment,
    ensure_demo_model,
    ensure_engine,
    find_engine,
    make_plan,
    options_from_environment,
    parse_sanitizers,
    read_manifest,
    verify_files,
    verify_process,
)
from proxy.engine.manifest import to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

P = ParamSpec("P")


def _flavour_options(function: Callable[P, None]) -> Callable[P, None]:
    """The options that choose an engine flavour; the command gets them as one ``options`` argument."""

    @click.option("--rpc", is_flag=True, help="Also build the RPC worker, ggml-rpc-server.")
    @click.option("--cuda/--no-cuda", default=None, help="Build for NVIDIA GPUs (or set CUDA=1).")
    @click.option(
        "--cuda-arch",
        default="",
        help="CUDA architectures, such as '70' or '80;90'; default: this machine's.",
    )
    @click.option("--release", is_flag=True, help="Use no features of this CPU that others may lack.")
    @click.option("--sanitize", default="", help="Sanitizers for tests: 'address,undefined' or 'thread'.")
    @click.option("--harness", is_flag=True, help="Also the scheduling harness, llama-phase-harness.")
    @click.option(
        "--stock", is_flag=True, help="Leave the series out: the unpatched engine, for comparisons."
    )
    @click.option(
        "--llama-cpp-dir",
        type=click.Path(path_type=Path),
        help="Your own llama.cpp checkout instead of the pinned source (or set LLAMA_CPP_DIR). It is only read.",
    )
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        taken: dict[str, Any] = {
            name: kwargs.pop(name)
            for name in (
                *("rpc", "harness", "cuda", "cuda_arch", "release", "sanitize", "stock"),
                "llama_cpp_dir",
            )
        }
        try:
            kwargs["options"] = _options(**taken)
        except EngineToolError as error:
            raise click.UsageError(error.message) from error
        function(*args, **kwargs)

    return wrapper


def _options(
    *,
    rpc: bool,
    harness: bool,
    cuda: bool | None,
    cuda_arch: str,
    release: bool,
    sanitize: str,
    stock: bool,
    llama_cpp_dir: Path | None,
) -> BuildOptions:
    base = options_from_environment()
    use_cuda = base.cuda if cuda is None else cuda
    return dataclasses.replace(
        base,
        rpc=rpc,
        harness=harness,
        cuda=use_cuda,
        cuda_architectures=cuda_arch or (base.cuda_architectures if use_cuda else ""),
        release=release,
        sanitize=parse_sanitizers(sanitize),
        stock=stock,
        llama_cpp_dir=llama_cpp_dir.expanduser().absolute() if llama_cpp_dir else base.llama_cpp_dir,
    )


@click.group()
def engine() -> None:
    """Build, find, verify and carry the patched llama-server."""


for _command in (apply, export, check, bump):
    engine.add_command(_command)


@engine.command()
@_flavour_options
@click.option("--jobs", type=click.IntRange(min=1), help="Compile jobs at once; default: one per core.")
@series_option
@json_option
@plain_errors
def build(options: BuildOptions, jobs: int | None, series_dir: Path | None, as_json: bool) -> None:
    """Build the engine, or say where it is when nothing changed."""
    with ConsoleProgress() as progress:
        paths = ensure_engine(dataclasses.replace(options, jobs=jobs), progress, native_patch=series_dir)
    if as_json:
        click.echo(json.dumps(_summary(paths)))
        return
    click.echo(f"{paths.server}\n{paths.manifest.identity}\n{paths.manifest.version}\n{paths.manifest.flags}")
    if paths.harness:
        click.echo(str(paths.harness))


def _summary(paths: EnginePaths) -> dict[str, Any]:
    manifest = paths.manifest
    return {
        "ok": True,
        "server": str(paths.server),
        "harness": str(paths.harness) if paths.harness else None,
        "dir": str(paths.dir),
        "identity": manifest.identity,
        "pin": manifest.pin,
        "series": manifest.series,
        "build_number": manifest.build_number,
        "flags": manifest.flags,
        "key": manifest.key,
        "version": manifest.version,
    }


@engine.command()
@_flavour_options
@series_option
@json_option
@plain_errors
def path(options: BuildOptions, series_dir: Path | None, as_json: bool) -> None:
    """Print the path of the built llama-server, with --harness that of the harness; fail when it is not built."""
    found = find_engine(make_plan(options, series_dir))
    if found is None:
        raise EngineToolError(
            "this engine is not built, or its files were changed; run: llama-proxy engine build"
            + (" --harness" if options.harness else "")
        )
    click.echo(json.dumps(_summary(found)) if as_json else str(found.harness or found.server))


def _engine_dir(directory: Path | None, options: BuildOptions, series_dir: Path | None) -> Path:
    """The directory to look at: the one given, else where the chosen flavour lies in the cache, whole or not."""
    if directory is not None:
        return directory
    found = cache_from_environment().engines / make_plan(options, series_dir).key
    if not found.is_dir():
        raise EngineToolError("this engine is not built; run: llama-proxy engine build")
    return found


_dir_argument = click.argument(
    "directory",
    required=False,
    metavar="[DIR]",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)


@engine.command()
@_dir_argument
@_flavour_options
@series_option
@json_option
@plain_errors
def manifest(directory: Path | None, options: BuildOptions, series_dir: Path | None, as_json: bool) -> None:
    """Print the manifest of the built engine, or of the engine in DIR."""
    found = read_manifest(_engine_dir(directory, options, series_dir))
    if as_json:
        click.echo(to_json(found), nl=False)
        return
    click.echo(f"{found.identity}\n{found.version}\n{found.compiler}\n{found.flags}\nbuilt {found.built_at}")
    table = new_table("file", "kind", "required", "size", "mode", "SHA-256 or target")
    for entry in found.files:
        size = str(entry.size_bytes) if entry.sha256 else ""
        table.add_row(
            entry.path,
            entry.kind,
            "yes" if entry.required else "no",
            size,
            entry.mode,
            entry.sha256 or entry.target,
        )
    print_table(table)


@engine.command()
@_dir_argument
@click.option("--pid", type=click.IntRange(min=1), help="Also check what this running process has mapped.")
@_flavour_options
@series_option
@json_option
@plain_errors
def verify(
    directory: Path | None,
    pid: int | None,
    options: BuildOptions,
    series_dir: Path | None,
    as_json: bool,
) -> None:
    """Check the engine's files, and a running process, against the manifest; exit 3 when anything lies."""
    where = _engine_dir(directory, options, series_dir)
    found = read_manifest(where)
    lies = verify_files(where)
    running = verify_process(pid, where) if pid is not None else []
    if as_json:
        report = {"ok": not (lies or running), "dir": str(where), "identity": found.identity}
        report["files"] = [dataclasses.asdict(lie) for lie in lies]
        report["process"] = [dataclasses.asdict(lie) for lie in running]
        click.echo(json.dumps(report))
    else:
        print_table(_verify_table(found, lies, running, pid))
        for lie in (*lies, *running):
            click.echo(str(lie), err=True)
        verdict = "does not match its manifest" if lies or running else "is what its manifest says"
        click.echo(f"{where} ({found.identity}) {verdict}")
    if lies or running:
        sys.exit(ExitCode.MISMATCH)


def _verify_table(found: Manifest, lies: list[Mismatch], running: list[Mismatch], pid: int | None) -> Table:
    table = new_table("file", "result", "expected", "found")
    by_path = {lie.path: lie for lie in lies}
    for entry in found.files:
        lie = by_path.pop(entry.path, None)
        expected = entry.sha256 or f"-> {entry.target}"
        table.add_row(
            entry.path, *(("ok", expected, "same") if lie is None else (lie.reason, lie.expected, lie.actual))
        )
    for lie in by_path.values():
        table.add_row(lie.path, lie.reason, lie.expected, lie.actual)
    if pid is not None and not running:
        table.add_row(f"process {pid}", "ok", found.identity, "same")
    for lie in running:
        table.add_row(f"process {pid}: {lie.path}", lie.reason, lie.expected, lie.actual)
    return table


@engine.command()
@json_option
@plain_errors
def model(as_json: bool) -> None:
    """Fetch the demo model (small, for trying things out) and print its path."""
    with ConsoleProgress() as progress:
        found = ensure_demo_model(progress)
    if as_json:
        click.echo(json.dumps({"ok": True, "path": str(found), "demo": True}))
    else:
        click.echo(str(found))
