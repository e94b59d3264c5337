"""`llama-proxy requests` and `llama-proxy cancel`: who is being served, who waits for what, end one."""

import json
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from proxy.cli.remote import Exit, Remote, UnreachableError, fail, find, remote_options

_COLUMNS = ("id", "model", "key", "class", "state", "why", "place", "tokens", "age", "cohort", "waited")
_PIPE_WIDTH = 200


@click.command()
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C; with --json one line of JSON per look.")
@click.option("--interval", type=click.FloatRange(0.1, 3600), default=1.0, help="Seconds between two looks.")
@click.option("--model", help="Show this model's requests alone.")
@remote_options
def requests(
    watch: bool,
    interval: float,
    model: str | None,
    url: str | None,
    key: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """List the live requests of a running proxy: where each is, and why it waits.

    Exit codes: 0 done, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers,
    4 no such model.
    """
    remote = find(url, key, config_file)
    try:
        if not watch:
            listed = _listed(remote, model, as_json=as_json)
            if as_json:
                click.echo(json.dumps({"requests": listed}))
            else:
                _console().print(_table(listed))
        elif as_json:
            _watch_json(remote, model, interval)
        else:
            _watch_table(remote, model, interval)
    except UnreachableError as error:
        fail(str(error), Exit.UNREACHABLE, as_json=as_json)
    except KeyboardInterrupt:
        sys.exit(int(Exit.INTERRUPTED))


@click.command()
@click.argument("ids", nargs=-1, required=True, metavar="ID…")
@remote_options
def cancel(
    ids: tuple[str, ...], url: str | None, key: str | None, config_file: Path | None, as_json: bool
) -> None:
    """End requests of a running proxy; their clients are told that an operator did it.

    Exit codes: 0 all were ended, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers,
    4 some were not there (any more); the others were ended.
    """
    remote = find(url, key, config_file)
    results: list[dict[str, Any]] = []
    code = 0
    try:
        for name in ids:
            answer = remote.ask("DELETE", f"/api/requests/{urllib.parse.quote(name, safe='')}")
            if answer.status == 200:
                results.append({"id": name, "status": "cancelled", "was": answer.body.get("was")})
            elif answer.status == 404:
                results.append({"id": name, "status": "unknown"})
                code = int(Exit.UNKNOWN)
            else:
                fail(answer.problem, Exit.REFUSED, as_json=as_json)
    except UnreachableError as error:
        fail(str(error), Exit.UNREACHABLE, as_json=as_json)
    if as_json:
        click.echo(json.dumps({"ok": code == 0, "requests": results}))
    else:
        for result in results:
            click.echo(f"{result['id']}: {result['status']}", err=result["status"] == "unknown")
    sys.exit(code)


def _listed(remote: Remote, model: str | None, *, as_json: bool) -> list[dict[str, Any]]:
    query = f"?model={urllib.parse.quote(model, safe='')}" if model else ""
    answer = remote.ask("GET", "/api/requests" + query)
    if answer.status != 200 or not isinstance(answer.body, dict):
        code = Exit.UNKNOWN if answer.status == 404 and model else Exit.REFUSED
        fail(answer.problem, code, as_json=as_json)
    return list(answer.body.get("requests", ()))


def _watch_json(remote: Remote, model: str | None, interval_s: float) -> None:
    while True:
        click.echo(json.dumps({"at": time.time(), "requests": _listed(remote, model, as_json=True)}))
        time.sleep(interval_s)


def _watch_table(remote: Remote, model: str | None, interval_s: float) -> None:
    with Live(_table(_listed(remote, model, as_json=False)), console=_console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(_table(_listed(remote, model, as_json=False)), refresh=True)


def _table(listed: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, caption=None if listed else "no live requests")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold", justify="right" if column in {"tokens", "age"} else "left")
    for one in listed:
        waited = ", ".join(f"{reason} {seconds:.1f}s" for reason, seconds in one["waits_s"].items())
        table.add_row(
            one["id"],
            one["model"],
            one["key"],
            one["class"],
            one["state"],
            one["reason"] or "",
            str(one["position"] or ""),
            str(one["tokens"]),
            f"{one['age_s']:.1f}s",
            "" if one["cohort"] is None else str(one["cohort"]),
            waited,
        )
    return table


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)
