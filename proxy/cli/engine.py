"""``llama-proxy engine``: build, find, verify and carry the patched llama-server."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import click
from rich.console import Console
from rich.table import Table

from proxy.cli.progress import progress_on
from proxy.engine import (
    BuildOptions,
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
from proxy.engine.bump import BumpReport, Outcome, bump_report
from proxy.engine.fetch import fetch, source_archive
from proxy.engine.manifest import to_json
from proxy.engine.pin import find_native_patch, read_upstream
from proxy.engine.series import PatchSet, read_patch_set
from proxy.engine.source import ArchiveSource
from proxy.engine.workflow import Problem, apply_series, check_files, check_round_trip, export_series, write_patch_set

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from proxy.engine.progress import Progress

P = ParamSpec("P")

_PIPE_WIDTH = 240

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
_series_option = click.option(
    "--series-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Patch directory instead of the one that came with this program.",
)


def _plain_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Show an EngineToolError as one message and end with its exit code; end a signal's work like Ctrl-C does."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        with contextlib.suppress(ValueError):  # not in the main thread: the caller's signals are not ours
            signal.signal(signal.SIGTERM, _interrupt)
        try:
            function(*args, **kwargs)
        except EngineToolError as error:
            _fail(error, as_json=bool(kwargs.get("as_json", False)))
        except KeyboardInterrupt:
            click.echo("interrupted; the next run continues", err=True)
            sys.exit(ExitCode.INTERRUPTED)

    return wrapper


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _fail(error: EngineToolError, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"ok": False, "error": error.message, "exit_code": int(error.exit_code)}))
    click.echo(f"error: {error.message}", err=True)
    sys.exit(error.exit_code)


def _flavour_options(function: Callable[P, None]) -> Callable[P, None]:
    """The options that choose an engine flavour; the command gets them as one ``options`` argument."""

    @click.option("--rpc", is_flag=True, help="Also build the RPC worker, ggml-rpc-server.")
    @click.option("--cuda/--no-cuda", default=None, help="Build for NVIDIA GPUs (or set CUDA=1).")
    @click.option("--cuda-arch", default="", help="CUDA architectures, such as '70' or '80;90'; default: this machine's.")
    @click.option("--release", is_flag=True, help="Use no features of this CPU that others may lack.")
    @click.option("--sanitize", default="", help="Sanitizers for tests: 'address,undefined' or 'thread'.")
    @click.option("--stock", is_flag=True, help="Leave the series out: the unpatched engine, for comparisons.")
    @click.option(
        "--llama-cpp-dir",
        type=click.Path(path_type=Path),
        help="Your own llama.cpp checkout instead of the pinned source (or set LLAMA_CPP_DIR). It is only read.",
    )
    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        taken: dict[str, Any] = {
            name: kwargs.pop(name) for name in ("rpc", "cuda", "cuda_arch", "release", "sanitize", "stock", "llama_cpp_dir")
        }
        try:
            kwargs["options"] = _options(**taken)
        except EngineToolError as error:
            raise click.UsageError(error.message) from error
        function(*args, **kwargs)

    return wrapper


def _options(
    *, rpc: bool, cuda: bool | None, cuda_arch: str, release: bool, sanitize: str, stock: bool, llama_cpp_dir: Path | None
) -> BuildOptions:
    base = options_from_environment()
    use_cuda = base.cuda if cuda is None else cuda
    return dataclasses.replace(
        base,
        rpc=rpc,
        cuda=use_cuda,
        cuda_architectures=cuda_arch or (base.cuda_architectures if use_cuda else ""),
        release=release,
        sanitize=parse_sanitizers(sanitize),
        stock=stock,
        llama_cpp_dir=llama_cpp_dir.expanduser().absolute() if llama_cpp_dir else base.llama_cpp_dir,
    )


def _stderr() -> Console:
    return Console(stderr=True)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print(table: Table) -> None:
    console = Console()
    # A pipe has no width: let no hash be folded there.
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    console.print(table)


@click.group()
def engine() -> None:
    """Build, find, verify and carry the patched llama-server."""


@engine.command()
@_flavour_options
@click.option("--jobs", type=click.IntRange(min=1), help="Compile jobs at once; default: one per core.")
@_series_option
@_json_option
@_plain_errors
def build(options: BuildOptions, jobs: int | None, series_dir: Path | None, as_json: bool) -> None:  # noqa: FBT001
    """Build the engine, or say where it is when nothing changed."""
    with progress_on(_stderr()) as progress:
        paths = ensure_engine(dataclasses.replace(options, jobs=jobs), progress, native_patch=series_dir)
    if as_json:
        click.echo(json.dumps({"ok": True, "server": str(paths.server), "dir": str(paths.dir), **_summary(paths.manifest)}))
        return
    click.echo(f"{paths.server}\n{paths.manifest.identity}\n{paths.manifest.version}\n{paths.manifest.flags}")


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
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
@_series_option
@_json_option
@_plain_errors
def path(options: BuildOptions, series_dir: Path | None, as_json: bool) -> None:  # noqa: FBT001
    """Print the built llama-server's path; fail when it is not built."""
    found = find_engine(make_plan(options, series_dir))
    if found is None:
        raise EngineToolError("this engine is not built, or its files were changed; run: llama-proxy engine build")
    if as_json:
        click.echo(json.dumps({"ok": True, "server": str(found.server), "dir": str(found.dir), **_summary(found.manifest)}))
    else:
        click.echo(str(found.server))


def _engine_dir(directory: Path | None, options: BuildOptions, series_dir: Path | None) -> Path:
    """The directory to look at: the one given, else where the chosen flavour lies in the cache, whole or not."""
    if directory is not None:
        return directory
    found = cache_from_environment().engines / make_plan(options, series_dir).key
    if not found.is_dir():
        raise EngineToolError("this engine is not built; run: llama-proxy engine build")
    return found


_dir_argument = click.argument(
    "directory", required=False, metavar="[DIR]", type=click.Path(exists=True, file_okay=False, path_type=Path)
)


@engine.command()
@_dir_argument
@_flavour_options
@_series_option
@_json_option
@_plain_errors
def manifest(directory: Path | None, options: BuildOptions, series_dir: Path | None, as_json: bool) -> None:  # noqa: FBT001
    """Print the manifest of the built engine, or of the engine in DIR."""
    found = read_manifest(_engine_dir(directory, options, series_dir))
    if as_json:
        click.echo(to_json(found), nl=False)
        return
    click.echo(f"{found.identity}\n{found.version}\n{found.compiler}\n{found.flags}\nbuilt {found.built_at}")
    table = _table("file", "kind", "required", "size", "mode", "SHA-256 or target")
    for entry in found.files:
        size = str(entry.size_bytes) if entry.sha256 else ""
        table.add_row(entry.path, entry.kind, "yes" if entry.required else "no", size, entry.mode, entry.sha256 or entry.target)
    _print(table)


@engine.command()
@_dir_argument
@click.option("--pid", type=click.IntRange(min=1), help="Also check what this running process has mapped.")
@_flavour_options
@_series_option
@_json_option
@_plain_errors
def verify(
    directory: Path | None,
    pid: int | None,
    options: BuildOptions,
    series_dir: Path | None,
    as_json: bool,  # noqa: FBT001
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
        _print(_verify_table(found, lies, running, pid))
        for lie in (*lies, *running):
            click.echo(str(lie), err=True)
        verdict = "does not match its manifest" if lies or running else "is what its manifest says"
        click.echo(f"{where} ({found.identity}) {verdict}")
    if lies or running:
        sys.exit(ExitCode.MISMATCH)


def _verify_table(found: Manifest, lies: list[Mismatch], running: list[Mismatch], pid: int | None) -> Table:
    table = _table("file", "result", "expected", "found")
    by_path = {lie.path: lie for lie in lies}
    for entry in found.files:
        lie = by_path.pop(entry.path, None)
        expected = entry.sha256 or f"-> {entry.target}"
        table.add_row(entry.path, *(("ok", expected, "same") if lie is None else (lie.reason, lie.expected, lie.actual)))
    for lie in by_path.values():
        table.add_row(lie.path, lie.reason, lie.expected, lie.actual)
    if pid is not None and not running:
        table.add_row(f"process {pid}", "ok", found.identity, "same")
    for lie in running:
        table.add_row(f"process {pid}: {lie.path}", lie.reason, lie.expected, lie.actual)
    return table


@engine.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@_series_option
@_plain_errors
def apply(directory: Path, series_dir: Path | None) -> None:
    """Make DIR a development tree: the pinned source, one commit per patch, and the overlay in its place."""
    patch_dir = series_dir or find_native_patch()
    pin = read_upstream(patch_dir)
    patch_set = read_patch_set(patch_dir)
    with progress_on(_stderr()) as progress:
        source = ArchiveSource(fetch(cache_from_environment(), source_archive(pin), progress))
        progress.step(0, 0, f"writing {directory}")
        apply_series(source.files(), patch_set, directory.absolute(), pin.identity)
    click.echo(f"{directory}: {pin.identity}, {len(patch_set.patches)} patches, {len(patch_set.overlay)} overlay files")


@engine.command()
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_series_option
@_json_option
@_plain_errors
def export(directory: Path, series_dir: Path | None, as_json: bool) -> None:  # noqa: FBT001
    """Write series, patches and overlay from the development tree DIR."""
    patch_dir = series_dir or find_native_patch()
    exported = export_series(directory.absolute())
    changed = write_patch_set(patch_dir, exported)
    if as_json:
        click.echo(json.dumps({"ok": True, "dir": str(patch_dir), "changed": changed, "series": exported.series_hash}))
        return
    for name in changed:
        click.echo(f"wrote {patch_dir / name}")
    click.echo(f"series {exported.series_hash}: {len(exported.patches)} patches, {len(changed)} files changed")


@engine.command()
@click.option("--files-only", is_flag=True, help="Leave out apply and export, which need the source and git.")
@_series_option
@_json_option
@_plain_errors
def check(files_only: bool, series_dir: Path | None, as_json: bool) -> None:  # noqa: FBT001
    """Check the series: files, trailers, and apply then export giving the same bytes; exit 3 when not."""
    patch_dir = series_dir or find_native_patch()
    problems: list[Problem] = check_files(patch_dir)
    if not files_only and not problems:
        with progress_on(_stderr()) as progress:
            pin = read_upstream(patch_dir)
            source = ArchiveSource(fetch(cache_from_environment(), source_archive(pin), progress))
            problems = check_round_trip(patch_dir, source, pin.identity)
    patch_set = None if problems else read_patch_set(patch_dir)
    if as_json:
        click.echo(json.dumps({"ok": not problems, "problems": [dataclasses.asdict(problem) for problem in problems]}))
    else:
        for problem in problems:
            click.echo(str(problem), err=True)
        if patch_set is not None:
            _print(_touch_table(patch_set))
    if problems:
        sys.exit(ExitCode.MISMATCH)


def _touch_table(patch_set: PatchSet) -> Table:
    table = _table("patch", "file", "lines")
    for patch in patch_set.patches:
        for touch in patch.mail.touches:
            table.add_row(patch.name, touch.path, f"+{touch.added}/-{touch.removed}")
    added = sum(touch.added for patch in patch_set.patches for touch in patch.mail.touches)
    removed = sum(touch.removed for patch in patch_set.patches for touch in patch.mail.touches)
    table.add_row("all", f"{len(patch_set.touched)} files, series {patch_set.series_hash}", f"+{added}/-{removed}")
    return table


@engine.command()
@click.option("--to", "version", help="Version of the source package; default: the newest.")
@_series_option
@_json_option
@_plain_errors
def bump(version: str | None, series_dir: Path | None, as_json: bool) -> None:  # noqa: FBT001
    """Report which patches apply to another version; writes nothing. Exit 3 when one does not."""
    patch_dir = series_dir or find_native_patch()
    with progress_on(_stderr()) as progress:
        report = bump_report(
            cache_from_environment(), read_upstream(patch_dir), read_patch_set(patch_dir), version, progress
        )
    if as_json:
        click.echo(json.dumps({"ok": report.applies, **dataclasses.asdict(report)}))
    else:
        _show_bump(report, patch_dir)
    if not report.applies:
        sys.exit(ExitCode.MISMATCH)


def _show_bump(report: BumpReport, patch_dir: Path) -> None:
    table = _table("patch", "result", "what moved")
    for row in report.rows:
        table.add_row(row.patch, row.outcome, "\n".join(row.details))
    _print(table)
    for clash in report.overlay_clash:
        click.echo(f"the source has {clash}, where the overlay goes", err=True)
    conflicts = sum(row.outcome is Outcome.CONFLICT for row in report.rows)
    if report.version == report.pinned:
        click.echo(f"{report.version} is the pinned version")
    elif report.applies:
        click.echo(
            f"the whole series applies to {report.version}; to move, write into {patch_dir / 'UPSTREAM'}:\n"
            f"version: {report.version}\nsha256: {report.sha256}\n"
            f"size_bytes: {report.size_bytes}\nbuild_number: {report.build_number}\n"
            "then apply, build, test, and export"
        )
    else:
        click.echo(f"{conflicts} of {len(report.rows)} patches do not apply to {report.version}", err=True)


@engine.command()
@_json_option
@_plain_errors
def model(as_json: bool) -> None:  # noqa: FBT001
    """Fetch the demo model (small, for trying things out) and print its path."""
    with progress_on(_stderr()) as progress:
        found = ensure_demo_model(progress)
    if as_json:
        click.echo(json.dumps({"ok": True, "path": str(found), "demo": True}))
    else:
        click.echo(str(found))
