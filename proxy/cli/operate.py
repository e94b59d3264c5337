"""`llama-proxy models`, `load`, `unload`, `gate`: what an operator does to models."""

import json
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import click

from proxy.cli.follow import follow
from proxy.cli.remote import Exit, Remote, fail, find, quoted, remote_options, told, unwrap
from proxy.cli.tables import seconds, show

_FORCE_S: Final = 3600.0
"""A force-unload answers within the model's grace + 2 s; the proxy knows that grace, this side does not."""


@click.command()
@remote_options
def models(url: str | None, key: str | None, config_file: Path | None, as_json: bool) -> None:
    """List the models of a running proxy: state, process, slots, queue, gate, last error.

    Exit codes: 0 done, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers.
    """
    remote = find(url, key, config_file)
    with told(as_json=as_json):
        body = unwrap(remote.ask("GET", "/api/models"), as_json=as_json)
    if as_json:
        click.echo(json.dumps(body))
        return
    columns = ("model", "state", "since", "gate", "pid", "busy", "queued", "running", "note")
    show(
        columns,
        [_model_row(model) for model in body["models"]],
        "no models are configured",
        right=("since", "pid", "queued", "running", "busy"),
    )
    for warning in body.get("warnings", ()):
        click.secho(warning, fg="yellow", err=True)


@click.command()
@click.argument("model")
@click.option("--no-wait", is_flag=True, help="Return when the load has begun, and print its job.")
@remote_options
def load(
    model: str, no_wait: bool, url: str | None, key: str | None, config_file: Path | None, as_json: bool
) -> None:
    """Load MODEL and wait until it is ready.

    Ctrl-C ends the waiting, not the load.

    Exit codes: 0 ready, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers,
    4 no such model, 5 the load failed (its reason is shown).
    """
    remote = find(url, key, config_file)
    with told(as_json=as_json):
        answer = remote.ask("POST", f"/api/models/{quoted(model)}/load")
        if isinstance(answer.body, dict) and "job" in answer.body:
            job = answer.body["job"]
        else:
            job = unwrap(answer, as_json=as_json)["job"]
        if not no_wait:
            job = follow(remote, job, as_json=as_json)
    if as_json:
        click.echo(json.dumps({"ok": job["state"] in {"done", "running"}, "job": job}))
    elif not job["ended"]:
        click.echo(f"{job['model']} is being loaded: job {job['id']}")
    elif job["state"] == "done":
        result = job["result"]
        words = (
            f"build {result.get('build') or 'unknown'}, {result.get('slots')} slots, pid {result.get('pid')}"
        )
        click.echo(f"{job['model']} is ready after {seconds(job['seconds'])} ({words})")
    _end(job, as_json=as_json, hint=f"`llama-proxy logs {job['model']}` shows what the engine said")


@click.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="End all its requests and its process now.")
@click.option(
    "--block", is_flag=True, help="Leave its gate blocked: nothing loads it again until `gate open`."
)
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(0, 86_400),
    help="Seconds for running requests to finish (default: the model's stop.drain_s).",
)
@click.option("--reason", default="", help="Told to clients whose requests are ended or refused.")
@click.option(
    "--mode", type=click.Choice(["hold", "reject"]), help="What becomes of requests that come meanwhile."
)
@click.option("--dry-run", is_flag=True, help="Say what --force would end now; change nothing.")
@click.option("--no-wait", is_flag=True, help="Return when the drain has begun, and print its job.")
@remote_options
def unload(
    model: str,
    force: bool,
    block: bool,
    deadline_s: float | None,
    reason: str,
    mode: str | None,
    dry_run: bool,
    no_wait: bool,
    url: str | None,
    key: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Unload MODEL: let running requests finish until the deadline, then stop its process.

    With --force they are ended at once, each with an explanation. Requests that come later load the model again,
    unless --block. A model that is not loaded is a success. Ctrl-C ends the waiting, not the unload.

    Exit codes: 0 unloaded (requests that were cut are named), 1 the proxy refused, 2 wrong call or configuration,
    3 no proxy answers, 4 no such model, 5 something is left of it.
    """
    if force and deadline_s is not None:
        raise click.UsageError("--force and --deadline exclude each other: a forced unload does not wait")
    if force and no_wait:
        raise click.UsageError(
            "--force and --no-wait exclude each other: a forced unload is over when it answers"
        )
    remote = find(url, key, config_file)
    order: dict[str, Any] = {"force": force, "then": "block" if block else "open", "reason": reason}
    order |= {"deadline_s": deadline_s} if deadline_s is not None else {}
    order |= {"mode": mode} if mode is not None else {}
    order |= {"dry_run": True} if dry_run else {}
    path = f"/api/models/{quoted(model)}/unload"
    with told(as_json=as_json):
        answer = remote.ask("POST", path, order, _FORCE_S if force else 30.0)
        body = answer.body if isinstance(answer.body, dict) else {}
        if dry_run:
            _would_cut(unwrap(answer, as_json=as_json), as_json=as_json)
        elif force:
            _forced(body if "cancelled" in body else unwrap(answer, as_json=as_json), as_json=as_json)
        else:
            job = body["job"] if "job" in body else unwrap(answer, as_json=as_json)["job"]
            _unloaded(remote, job, no_wait=no_wait, as_json=as_json)


def _would_cut(body: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(body))
        return
    cut, names = body["cancelled"], body["requests"]
    process = f", process {body['pid']}" if body["pid"] else ""
    click.echo(f"{body['model']} is {body['state']}{process}; a forced unload would end")
    for kind in ("running", "queued"):
        click.echo(f"  {cut[kind]} {kind}{': ' if names[kind] else ''}{' '.join(names[kind])}")


def _forced(body: dict[str, Any], *, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps(body))
    else:
        cut = body["cancelled"]
        click.echo(
            f"{body['model']} is {body['status']} after {seconds(body['seconds'])}: "
            f"{cut['running']} running and {cut['queued']} queued requests were ended"
        )
        if body.get("warning"):
            click.secho(body["warning"], fg="yellow", err=True)
    if not body["ok"]:
        left = " ".join(map(str, [*body["left"], *body["unsettled"]]))
        click.secho(f"left behind: {left}; run `llama-proxy doctor --reconcile`", fg="red", err=True)
        sys.exit(int(Exit.FAILED))
    sys.exit(0)


def _unloaded(remote: Remote, job: dict[str, Any], *, no_wait: bool, as_json: bool) -> None:
    if not no_wait:
        job = follow(remote, job, as_json=as_json)
    if as_json:
        click.echo(json.dumps({"ok": job["state"] in {"done", "running"}, "job": job}))
    elif not job["ended"]:
        click.echo(f"{job['model']} drains: job {job['id']}")
    elif job["state"] == "done":
        click.echo(f"{job['model']} is unloaded after {seconds(job['seconds'])}")
        if job["cut"]:
            click.echo(f"cut at the deadline: {len(job['cut'])} ({' '.join(job['cut'])})")
        if job["result"].get("warning"):
            click.secho(job["result"]["warning"], fg="yellow", err=True)
    _end(job, as_json=as_json, hint=f"`llama-proxy unload --force {job['model']}` does not wait for anything")


@click.group()
def gate() -> None:
    """Block or open models for new requests; running ones go on."""


@gate.command("block")
@click.argument("model", required=False)
@click.option("--all", "everything", is_flag=True, help="All models.")
@click.option("--reason", default="", help="Told to clients that are refused.")
@click.option(
    "--mode",
    type=click.Choice(["hold", "reject"]),
    default="hold",
    show_default=True,
    help="Requests that come wait (up to admission.gate_hold_max_s), or get 503 gate_blocked.",
)
@click.option("--dry-run", is_flag=True, help="Say what it would meet; change nothing.")
@remote_options
def block(
    model: str | None,
    everything: bool,
    reason: str,
    mode: str,
    dry_run: bool,
    url: str | None,
    key: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Let no new request of MODEL (or of --all) through. The gate survives a restart of the proxy.

    Exit codes: 0 done, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers, 4 no such model.
    """
    order = {"state": "blocked", "mode": mode, "reason": reason, "dry_run": dry_run}
    _gate(find(url, key, config_file), model, order, everything=everything, as_json=as_json)


@gate.command("open")
@click.argument("model", required=False)
@click.option("--all", "everything", is_flag=True, help="All models.")
@click.option("--dry-run", is_flag=True, help="Say what it would meet; change nothing.")
@remote_options
def open_(
    model: str | None,
    everything: bool,
    dry_run: bool,
    url: str | None,
    key: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Let requests of MODEL (or of --all) through again; those that were held go on.

    Exit codes: 0 done, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers, 4 no such model.
    """
    order = {"state": "open", "dry_run": dry_run}
    _gate(find(url, key, config_file), model, order, everything=everything, as_json=as_json)


def _gate(
    remote: Remote, model: str | None, order: dict[str, Any], *, everything: bool, as_json: bool
) -> None:
    if (model is None) is not everything:
        raise click.UsageError("name one MODEL, or give --all")
    path = "/api/gate" if model is None else f"/api/models/{quoted(model)}/gate"
    with told(as_json=as_json):
        body = unwrap(remote.ask("POST", path, order), as_json=as_json)
    if as_json:
        click.echo(json.dumps(body))
        return
    show(
        (
            "model",
            "was",
            "gate" if not body["dry_run"] else "would be",
            "mode",
            "queued",
            "running",
            "reason",
        ),
        [
            (
                one["model"],
                one["was"]["state"],
                one["gate"]["state"],
                one["gate"]["mode"] if one["gate"]["state"] == "blocked" else "",
                str(one["queued"]),
                str(one["running"]),
                one["gate"]["reason"],
            )
            for one in body["models"]
        ],
        "no models are configured",
        right=("queued", "running"),
    )
    if body["warning"]:
        click.secho(body["warning"], fg="yellow", err=True)


def _model_row(model: dict[str, Any]) -> tuple[str, ...]:
    backend, admission, gate_ = model["backend"], model["admission"], model["gate"]
    notes = []
    if gate_["state"] != "open" and gate_["reason"]:
        notes.append(gate_["reason"])
    if backend["stage"]:
        notes.append(backend["stage"] + (f" for {backend['waits_for']}" if backend["waits_for"] else ""))
    if backend["kind"] == "dns" and model["state"] == "ready":
        there = admission["backends"]
        leaving = sum(one["draining"] for one in there)
        notes.append(f"{len(there)} engines" + (f", {leaving} leaving" if leaving else ""))
    if backend["last_error"] and model["state"] in {"failed", "unloaded"}:
        notes.append(backend["last_error"].splitlines()[0])
    if backend["retry_in_s"]:
        notes.append(f"again in {seconds(backend['retry_in_s'])}")
    if (why := model.get("why")) and gate_["state"] == "open" and model["state"] != "failed":
        notes.append(f"{why['head']['id']} waits: {why['words']}")
    slots = admission["slots"]
    return (
        model["id"],
        model["state"],
        seconds(backend["since_s"]),
        gate_["state"] if model["admin"] != "draining" else "draining",
        str(backend["pid"] or ""),
        f"{admission['charged']}/{slots}" if slots else "",
        str(admission["queued"]),
        str(admission["running"]),
        "; ".join(notes),
    )


def _end(job: dict[str, Any], *, as_json: bool, hint: str) -> None:
    """End with the error of a job that came to nothing."""
    if not job["ended"] or job["state"] == "done":
        return
    text = f"{job['kind']} of {job['model']} {job['state']}: {job['error'] or 'no reason was given'}"
    if as_json:
        sys.exit(int(Exit.FAILED))
    fail(f"{text}\n{hint}", Exit.FAILED, as_json=False)
