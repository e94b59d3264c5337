"""`llama-proxy jobs`, `leases`, `logs`: what is going on, what is held, what engines say."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from proxy.cli.remote import Exit, find, quoted, remote_options, told, unwrap
from proxy.cli.tables import seconds, show, size


@click.command()
@click.argument("job_id", required=False, metavar="[ID]")
@click.option("--model", help="Show this model's jobs alone.")
@remote_options
def jobs(
    job_id: str | None,
    model: str | None,
    url: str | None,
    key: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """List loads, unloads and force-unloads, the newest first; or show one whole, as JSON.

    Exit codes: 0 done, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers,
    4 no such job or model.
    """
    remote = find(url, key, config_file)
    path = f"/api/jobs/{quoted(job_id)}" if job_id else "/api/jobs"
    path += f"?model={quoted(model)}" if model and not job_id else ""
    with told(as_json=as_json):
        body = unwrap(remote.ask("GET", path), as_json=as_json)
    if as_json or job_id:
        click.echo(json.dumps(body, indent=None if as_json else 2))
        return
    show(
        ("id", "kind", "model", "state", "took", "cause", "by", "note"),
        [_row(job) for job in body["jobs"]],
        "no jobs yet",
        right=("took",),
    )


@click.group(invoke_without_command=True)
@remote_options
@click.pass_context
def leases(
    ctx: click.Context, url: str | None, key: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Keep models and hosts awake: while a lease is held, nothing is unloaded for being idle. Alone it lists them.

    The options here are those of the list; the other commands take their own.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_leases, url=url, key=key, config_file=config_file, as_json=as_json)


@leases.command("list")
@remote_options
def list_leases(
    url: str | None = None, key: str | None = None, config_file: Path | None = None, as_json: bool = False
) -> None:
    """List the leases that are held.

    Exit codes: 0 done, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers.
    """
    remote = find(url, key, config_file)
    with told(as_json=as_json):
        body = unwrap(remote.ask("GET", "/api/leases"), as_json=as_json)
    if as_json:
        click.echo(json.dumps(body))
        return
    show(
        ("id", "left", "of", "by", "reason"),
        [
            (one["id"], seconds(one["left_s"]), seconds(one["ttl_s"]), _who(one["by"]), one["reason"])
            for one in body["leases"]
        ],
        "no leases are held",
        right=("left", "of"),
    )


@leases.command("hold")
@click.option(
    "--ttl", "ttl_s", type=click.FloatRange(0, min_open=True), required=True, help="Seconds to hold it."
)
@click.option("--reason", default="", help="Why; shown to other operators.")
@remote_options
def hold(
    ttl_s: float, reason: str, url: str | None, key: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Hold everything awake for a time; prints the lease's id.

    Exit codes: 0 held, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers.
    """
    remote = find(url, key, config_file)
    with told(as_json=as_json):
        body = unwrap(remote.ask("POST", "/api/leases", {"ttl_s": ttl_s, "reason": reason}), as_json=as_json)
    click.echo(json.dumps(body) if as_json else body["id"])
    _warn(body, as_json=as_json)


@leases.command("release")
@click.argument("lease_id", metavar="ID")
@remote_options
def release(lease_id: str, url: str | None, key: str | None, config_file: Path | None, as_json: bool) -> None:
    """Let go of a lease before its time.

    Exit codes: 0 released, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers,
    4 no such lease (any more).
    """
    remote = find(url, key, config_file)
    with told(as_json=as_json):
        body = unwrap(remote.ask("DELETE", f"/api/leases/{quoted(lease_id)}"), as_json=as_json)
    click.echo(json.dumps(body) if as_json else f"{lease_id}: released")
    _warn(body, as_json=as_json)


@click.command("logs")
@click.argument("model")
@click.option(
    "--lines", type=click.IntRange(0, 100_000), default=100, show_default=True, help="Last lines to show."
)
@click.option("--follow", "-f", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@remote_options
def engine_logs(
    model: str,
    lines: int,
    follow: bool,
    url: str | None,
    key: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Print what the engine of MODEL says. With --json one object per line.

    Exit codes: 0 done, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers (any more),
    4 no such model, 130 interrupted.
    """
    remote = find(url, key, config_file)
    path = f"/api/models/{quoted(model)}/logs?lines={lines}" + ("&follow=1" if follow else "")
    with told(as_json=as_json):
        for line in remote.lines(path, None if follow else 10.0):
            text = line.removesuffix("\n")
            try:
                click.echo(json.dumps({"line": text}) if as_json else text)
            except BrokenPipeError:
                # `| head` has enough
                sys.stderr.close()
                sys.exit(int(Exit.REFUSED))
    if follow:
        # the reason was its last line
        sys.exit(int(Exit.UNREACHABLE))


def _warn(body: dict[str, Any], *, as_json: bool) -> None:
    if body["warning"] and not as_json:
        click.secho(body["warning"], fg="yellow", err=True)


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    progress = job["progress"]
    notes = []
    if job["error"]:
        notes.append(job["error"].splitlines()[0])
    elif not job["ended"]:
        notes.append(progress["stage"])
        if progress["bytes_read"] is not None:
            notes.append(f"{size(progress['bytes_read'])} of {size(progress['bytes_total'])}")
        if progress["requests_left"]:
            notes.append(f"{progress['requests_left']} left")
    if job["cut"]:
        notes.append(f"{len(job['cut'])} cut")
    return (
        job["id"],
        job["kind"],
        job["model"],
        job["state"],
        seconds(job["seconds"]),
        job["cause"],
        _who(job["by"]),
        ", ".join(notes),
    )


def _who(by: dict[str, str] | None) -> str:
    return (by["key"] or by["address"]) if by else ""
