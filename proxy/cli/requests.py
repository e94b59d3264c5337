"""`llama-proxy requests` and `llama-proxy cancel`: who is being served, who waits for what, end one."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
from rich.live import Live
from rich.table import Table
from rich.text import Text

from proxy.cli.remote import Exit, Remote, find, quoted, remote_options, told, unwrap
from proxy.cli.tables import console, drawn, show

_COLUMNS: Final = (
    "id",
    "model",
    "key",
    "class",
    "state",
    "why",
    "place",
    "tokens",
    "age",
    "cohort",
    "waited",
)
_RIGHT: Final = ("tokens", "age")
_NONE: Final = "no live requests"


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
    with told(as_json=as_json):
        if watch and as_json:
            _watch_json(remote, model, interval)
        elif watch:
            _watch_table(remote, model, interval)
        else:
            listed = _listed(remote, model, as_json=as_json)
            if as_json:
                click.echo(json.dumps({"requests": listed}))
            else:
                show(_COLUMNS, _rows(listed), _NONE, _RIGHT)


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
    try:
        with told(as_json=as_json):
            for name in ids:
                answer = remote.ask("DELETE", f"/api/requests/{quoted(name)}")
                if answer.status == 404:
                    results.append({"id": name, "status": "unknown"})
                else:
                    ended = unwrap(answer, as_json=as_json)
                    results.append({"id": name, "status": "cancelled", "was": ended.get("was")})
    finally:
        # whatever ended this early: what was done was done
        unknown = any(result["status"] == "unknown" for result in results)
        if as_json and len(results) == len(ids):
            click.echo(json.dumps({"ok": not unknown, "requests": results}))
        else:
            for result in results:
                left = as_json or result["status"] == "unknown"
                click.echo(f"{result['id']}: {result['status']}", err=left)
    sys.exit(int(Exit.UNKNOWN) if unknown else 0)


def _listed(remote: Remote, model: str | None, *, as_json: bool) -> list[dict[str, Any]]:
    answer = remote.ask("GET", "/api/requests" + (f"?model={quoted(model)}" if model else ""))
    return list(unwrap(answer, as_json=as_json, unknown=model is not None).get("requests", ()))


def _watch_json(remote: Remote, model: str | None, interval_s: float) -> None:
    while True:
        click.echo(json.dumps({"at": time.time(), "requests": _listed(remote, model, as_json=True)}))
        time.sleep(interval_s)


def _watch_table(remote: Remote, model: str | None, interval_s: float) -> None:
    target = console()

    def look() -> Table | Text:
        return drawn(_COLUMNS, _rows(_listed(remote, model, as_json=False)), _NONE, _RIGHT, target.width)

    with Live(look(), console=target, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(look(), refresh=True)


def _rows(listed: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for one in listed:
        yield (
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
            ", ".join(f"{reason} {seconds:.1f}s" for reason, seconds in one["waits_s"].items()),
        )
