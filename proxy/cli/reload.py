"""`llama-proxy reload`: let a running proxy read its configuration again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from proxy.cli.remote import find, remote_options, told, unwrap


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what would change; change nothing.")
@remote_options
def reload(dry_run: bool, url: str | None, key: str | None, config_file: Path | None, as_json: bool) -> None:
    """Let a running proxy read its configuration again.

    Models come, change and go while others serve; one that is loaded and has changed drains and is loaded again. What
    needs a restart of the proxy is named.

    Exit codes: 0 done, 1 the proxy refused (a mistake in the file, with the field's name), 2 wrong call or
    configuration, 3 no proxy answers.
    """
    remote = find(url, key, config_file)
    with told(as_json=as_json):
        body = unwrap(remote.ask("POST", "/api/reload", {"dry_run": dry_run}), as_json=as_json)
    if as_json:
        click.echo(json.dumps(body))
        return
    lines = list(_lines(body))
    for line in lines or ["nothing has changed"]:
        click.echo(line)
    if body["restart_needed"]:
        click.secho(
            f"needs a restart of the proxy: {', '.join(body['restart_needed'])}", fg="yellow", err=True
        )


def _lines(body: dict[str, Any]) -> Iterator[str]:
    for name in body["added"]:
        yield f"{name}: added"
    for one in body["changed"]:
        restart = "; restarted if it is loaded" if one["restart"] else ""
        yield f"{one['model']}: changed ({', '.join(one['fields'])}){restart}"
    for name in body["removed"]:
        yield f"{name}: removed; what runs may finish"
    if body["admission"]:
        yield f"changed: {', '.join(body['admission'])}"
    if body["jobs"]:
        yield f"jobs: {', '.join(body['jobs'])} (llama-proxy jobs)"
