"""`llama-proxy doctor`: what is wrong with a running proxy, what to do, and a bundle for whoever has to find out."""

import contextlib
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import click

from proxy import __version__
from proxy.cli.config import config_path
from proxy.cli.remote import (
    Exit,
    RefusedError,
    Remote,
    UnreachableError,
    fail,
    find,
    quoted,
    remote_options,
    told,
    unwrap,
)
from proxy.config import load
from proxy.settings import ConfigError

_LOG_LINES: Final = 5000
_HIDDEN: Final = "**********"
_SECRET: Final = re.compile(r"key|token|secret|password|passwd|credential|authorization", re.IGNORECASE)
_IN_WORDS: Final = (
    re.compile(rf"(--?[\w-]*(?:{_SECRET.pattern})[\w-]*[= ]\s*)\S+", re.IGNORECASE),
    re.compile(rf"(\b\w*(?:{_SECRET.pattern})\w*=)\S+", re.IGNORECASE),
    re.compile(r"(authorization:\s*(?:\w+\s+)?)[^\s'\"]+", re.IGNORECASE),
    re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@]+(?=@)", re.IGNORECASE),
)
"""Before a secret: a flag, an assignment, a header, the scheme of a URL with a name and password."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, and what to do next."""

    subject: str
    words: str
    hint: str


@click.command()
@click.option(
    "--reconcile", is_flag=True, help="Compare books, processes, sockets and slots of all models; mend."
)
@click.option(
    "--bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write state, metrics, engine logs and the configuration, its keys left out, to this new .tar.gz file.",
)
@remote_options
def doctor(
    reconcile: bool,
    bundle: Path | None,
    url: str | None,
    key: str | None,
    config_file: Path | None,
    as_json: bool,
) -> None:
    """Look a running proxy over and say what to do about what is found.

    Without --reconcile nothing is changed; with it only what is safe, and never a live request.

    Exit codes: 0 nothing was found, 1 the proxy refused, 2 wrong call or configuration, 3 no proxy answers,
    5 something was found.
    """
    if bundle is not None and bundle.exists():
        raise click.BadParameter(f"{bundle} exists already: name a new file", param_hint="--bundle")
    remote = find(url, key, config_file)
    with told(as_json=as_json):
        models = unwrap(remote.ask("GET", "/api/models"), as_json=as_json)
        findings = list(_looked_over(models))
        reports = []
        if reconcile:
            for model in models["models"]:
                path = f"/api/models/{quoted(model['id'])}/reconcile"
                reports.append(unwrap(remote.ask("POST", path, timeout_s=60.0), as_json=as_json))
            findings += [found for report in reports for found in _differences(report)]
    if bundle is not None:
        try:
            with told(as_json=as_json), _whole(bundle) as raw:
                _write(raw, remote, models, config_file, findings)
        except OSError as error:
            fail(f"{bundle} cannot be written: {error.strerror or error}", Exit.REFUSED, as_json=as_json)
    if as_json:
        told_ = [{"subject": f.subject, "words": f.words, "hint": f.hint} for f in findings]
        answer = {"ok": not findings, "findings": told_, "reconciled": reports}
        click.echo(json.dumps({**answer, "bundle": str(bundle) if bundle else None}))
    else:
        for found in findings:
            click.echo(click.style(found.subject, bold=True) + f": {found.words}")
            click.echo(f"    next: {found.hint}")
        if not findings:
            click.echo(f"nothing is wrong with {remote.url}: {len(models['models'])} models looked at")
        if reconcile and not any(report["found"] for report in reports):
            click.echo("books, processes, sockets and slots agree")
        if bundle is not None:
            click.echo(
                f"{bundle} was written for your eyes; keys are left out where they are known to be, and engines' logs "
                "say what engines say: read it before you send it"
            )
    sys.exit(int(Exit.FAILED) if findings else 0)


def _looked_over(body: dict[str, Any]) -> Iterator[Finding]:
    for warning in body.get("warnings", ()):
        yield Finding(
            "state folder", warning, "see docs/operating.md; until then gates and leases end with the proxy"
        )
    for model in body["models"]:
        name, backend, admission = model["id"], model["backend"], model["admission"]
        if model["state"] == "failed":
            words = (backend["last_error"] or "no reason is known").splitlines()[0]
            yield Finding(
                name, f"does not load: {words}", f"llama-proxy logs {name}; then llama-proxy load {name}"
            )
        if model["gate"]["state"] != "open":
            reason = f": {model['gate']['reason']}" if model["gate"]["reason"] else ""
            words = f"its gate is blocked{reason}, {admission['queued']} wait"
            yield Finding(name, words, f"llama-proxy gate open {name}")
        if (host := model.get("host")) and host["last_error"]:
            yield Finding(
                f"host {host['name']}",
                f"a hook failed: {host['last_error']}",
                "correct hosts in the configuration",
            )
        if any(one["mirror"] == "stale" for one in admission["backends"]):
            yield Finding(
                name, "its slots cannot be seen", f"llama-proxy logs {name}; unload --force if it hangs"
            )
        if foreign := sum(one["foreign"] for one in admission["backends"]):
            yield Finding(name, f"{foreign} slots work for somebody else", "llama-proxy doctor --reconcile")


def _differences(report: dict[str, Any]) -> Iterator[Finding]:
    for one in report["found"]:
        yield Finding(report["model"], one["words"], one["repair"] or "not mended: see docs/operating.md")


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[IO[bytes]]:
    """Open a new file that only its owner reads; what is not written to its end does not stay."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as raw:
            yield raw
    except BaseException:
        # half a bundle would be taken for a whole one
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        raise


def _write(
    raw: IO[bytes], remote: Remote, models: dict[str, Any], config_file: Path | None, findings: list[Finding]
) -> None:
    """Write the bundle; what cannot be had is named in it instead."""
    about = {
        "version": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "url": remote.url,
        "at": time.time(),
        "findings": [{"subject": f.subject, "words": f.words, "hint": f.hint} for f in findings],
    }
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:

        def add(name: str, get: Callable[[], Any]) -> None:
            try:
                found = get()
            except (UnreachableError, RefusedError, ConfigError, OSError, ValueError) as error:
                name, found = f"{name}.missing.txt", f"{error}\n"
            text = found if isinstance(found, str) else json.dumps(found, indent=1, default=str)
            data = text.encode()
            entry = tarfile.TarInfo(f"llama-proxy-bundle/{name}")
            entry.size, entry.mtime = len(data), int(time.time())
            tar.addfile(entry, io.BytesIO(data))

        add("about.json", lambda: about)
        add("models.json", lambda: models)
        add("config-found-here.json", lambda: _configured(config_file))
        for name in ("requests", "jobs", "leases"):
            add(f"{name}.json", lambda name=name: json.loads(remote.text(f"/api/{name}")))  # type: ignore[misc]
        add("readyz.json", lambda: json.loads(remote.text("/readyz")))
        add("metrics.txt", lambda: remote.text("/metrics"))
        for number, model in enumerate(models["models"]):
            path = f"/api/models/{quoted(model['id'])}/logs?lines={_LOG_LINES}"
            safe = re.sub(r"[^A-Za-z0-9._-]", "_", model["id"])
            add(f"logs/{number}-{safe}.txt", lambda path=path: remote.text(path))  # type: ignore[misc]


def _configured(config_file: Path | None) -> Any:
    path = config_path(config_file)
    if path is None:
        raise ConfigError("there is no configuration file here; give --config")
    settings = load(path)
    return without_secrets(json.loads(settings.model_dump_json()))


def without_secrets(value: Any, name: str = "") -> Any:
    """Return JSON values without what may be a secret: environments, and all that is named or flagged like one."""
    match value:
        case dict():
            hide = name == "env"
            return {key: _HIDDEN if hide else without_secrets(item, key) for key, item in value.items()}
        case list():
            return [
                _HIDDEN
                if number and isinstance(item, str) and _flagged(value[number - 1])
                else without_secrets(item, "")
                for number, item in enumerate(value)
            ]
        case str() if value and _SECRET.search(name):
            return _HIDDEN
        case str():
            for pattern in _IN_WORDS:
                value = pattern.sub(rf"\1{_HIDDEN}", value)
            return value
        case _:
            return value


def _flagged(before: Any) -> bool:
    return isinstance(before, str) and before.startswith("-") and bool(_SECRET.search(before))
