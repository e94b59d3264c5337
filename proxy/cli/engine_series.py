"""The engine commands that carry the patch series: apply, export, check, bump."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from proxy.cli.engine_shared import json_option, new_table, plain_errors, print_table, series_option
from proxy.cli.progress import ConsoleProgress
from proxy.engine import ExitCode, cache_from_environment
from proxy.engine.bump import BumpReport, Outcome, bump_report
from proxy.engine.fetch import fetch, source_archive
from proxy.engine.pin import find_native_patch, read_upstream
from proxy.engine.series import PatchSet, read_patch_set
from proxy.engine.source import ArchiveSource
from proxy.engine.workflow import (
    Problem,
    apply_series,
    check_files,
    check_round_trip,
    export_series,
    write_patch_set,
)

if TYPE_CHECKING:
    from rich.table import Table


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@series_option
@plain_errors
def apply(directory: Path, series_dir: Path | None) -> None:
    """Make DIR a development tree: the pinned source, one commit per patch, and the overlay in its place."""
    patch_dir = series_dir or find_native_patch()
    pin = read_upstream(patch_dir)
    patch_set = read_patch_set(patch_dir)
    with ConsoleProgress() as progress:
        source = ArchiveSource(fetch(cache_from_environment(), source_archive(pin), progress))
        progress.step(0, 0, f"writing {directory}")
        apply_series(source.files(), patch_set, directory.absolute(), pin.identity)
    click.echo(
        f"{directory}: {pin.identity}, {len(patch_set.patches)} patches, {len(patch_set.overlay)} overlay files"
    )


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@series_option
@json_option
@plain_errors
def export(directory: Path, series_dir: Path | None, as_json: bool) -> None:
    """Write series, patches and overlay from the development tree DIR."""
    patch_dir = series_dir or find_native_patch()
    exported = export_series(directory.absolute())
    changed = write_patch_set(patch_dir, exported)
    if as_json:
        click.echo(
            json.dumps(
                {"ok": True, "dir": str(patch_dir), "changed": changed, "series": exported.series_hash}
            )
        )
        return
    for name in changed:
        click.echo(f"wrote {patch_dir / name}")
    click.echo(
        f"series {exported.series_hash}: {len(exported.patches)} patches, {len(changed)} files changed"
    )


@click.command()
@click.option("--files-only", is_flag=True, help="Leave out apply and export, which need the source and git.")
@series_option
@json_option
@plain_errors
def check(files_only: bool, series_dir: Path | None, as_json: bool) -> None:
    """Check the series: files, trailers, and apply then export giving the same bytes; exit 3 when not."""
    patch_dir = series_dir or find_native_patch()
    problems: list[Problem] = check_files(patch_dir)
    if not files_only and not problems:
        with ConsoleProgress() as progress:
            pin = read_upstream(patch_dir)
            source = ArchiveSource(fetch(cache_from_environment(), source_archive(pin), progress))
            problems = check_round_trip(patch_dir, source, pin.identity)
    patch_set = None if problems else read_patch_set(patch_dir)
    if as_json:
        click.echo(
            json.dumps(
                {"ok": not problems, "problems": [dataclasses.asdict(problem) for problem in problems]}
            )
        )
    else:
        for problem in problems:
            click.echo(str(problem), err=True)
        if patch_set is not None:
            print_table(_touch_table(patch_set))
    if problems:
        sys.exit(ExitCode.MISMATCH)


def _touch_table(patch_set: PatchSet) -> Table:
    table = new_table("patch", "file", "lines")
    for patch in patch_set.patches:
        for touch in patch.mail.touches:
            table.add_row(patch.name, touch.path, f"+{touch.added}/-{touch.removed}")
    added = sum(touch.added for patch in patch_set.patches for touch in patch.mail.touches)
    removed = sum(touch.removed for patch in patch_set.patches for touch in patch.mail.touches)
    table.add_row(
        "all", f"{len(patch_set.touched)} files, series {patch_set.series_hash}", f"+{added}/-{removed}"
    )
    return table


@click.command()
@click.option("--to", "version", help="Version of the source package; default: the newest.")
@series_option
@json_option
@plain_errors
def bump(version: str | None, series_dir: Path | None, as_json: bool) -> None:
    """Report which patches apply to another version; writes nothing. Exit 3 when one does not."""
    patch_dir = series_dir or find_native_patch()
    with ConsoleProgress() as progress:
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
    table = new_table("patch", "result", "what moved")
    for row in report.rows:
        table.add_row(row.patch, row.outcome, "\n".join(row.details))
    print_table(table)
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
