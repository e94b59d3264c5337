"""Talking to a running proxy from the command line: where it is, with which key, and what went wrong."""

import contextlib
import http.client
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from proxy.cli.config import config_path, load_or_exit
from proxy.settings import Server

TIMEOUT_S = 10.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - an address to translate, not to bind
_F = TypeVar("_F", bound=Callable[..., None])


class Exit(IntEnum):
    """Exit codes of the commands that talk to a running proxy (2 is a wrong call or configuration)."""

    REFUSED = 1
    UNREACHABLE = 3
    UNKNOWN = 4
    """Something that was named does not exist (any more)."""
    FAILED = 5
    """What was ordered came to nothing: a load that failed, a process that would not end, a check with findings."""
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and decoded body of an answer (None: it was no JSON)."""

    status: int
    body: Any

    @property
    def problem(self) -> str:
        """The words of an error answer."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("message")) if isinstance(error, dict) else f"status {self.status}"


class UnreachableError(Exception):
    """Nobody answers there, or not in HTTP."""


class RefusedError(Exception):
    """The proxy answered with an error."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.problem)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Remote:
    """A running proxy's operator API."""

    url: str
    key: str = ""

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S
    ) -> Answer:
        """Send a request; raises `UnreachableError`. Error answers are returned, not raised."""
        try:
            with self._opened(method, path, body, timeout_s) as answer:
                return Answer(answer.status, _decoded(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, _decoded(error.read()))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def text(self, path: str, timeout_s: float = TIMEOUT_S) -> str:
        """Return what a path answers as text; raises `RefusedError` and `UnreachableError`."""
        return "".join(self.lines(path, timeout_s))

    def lines(self, path: str, timeout_s: float | None = TIMEOUT_S) -> Iterator[str]:
        """Yield the lines of an answer as they come (None: however long that takes), each with its end.

        Raises `RefusedError` for an error answer, `UnreachableError` when nobody answers or the answer breaks off.
        """
        try:
            with self._opened("GET", path, None, timeout_s) as answer:
                for line in answer:
                    yield line.decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            with error:
                raise RefusedError(Answer(error.code, _decoded(error.read()))) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None

    def _opened(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        headers = {"Accept": "application/json" if timeout_s is not None else "*/*"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None
        if method == "POST":
            headers["Content-Type"] = "application/json"
            data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)  # noqa: S310 - see find
        # the proxy is asked itself, whatever http_proxy says
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return opener.open(request, timeout=timeout_s)

    def _unreachable(self, error: Exception) -> UnreachableError:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        return UnreachableError(
            f"no proxy answers at {self.url}: {reason}\n"
            "start one with `llama-proxy serve`, or name it with --url or $LLAMA_PROXY_URL"
        )


def find(url: str | None, key: str | None, config_file: Path | None) -> Remote:
    """Return the proxy that is meant: by flag, environment, then the configuration `serve` would use.

    The key is taken from the same places; of a configuration the first of `server.admin_keys`, and only where its
    proxy is meant: a key is not sent to an address that was named otherwise, unless the configuration was named, too.
    """
    url = url or os.environ.get("LLAMA_PROXY_URL") or None
    key = key or os.environ.get("LLAMA_PROXY_ADMIN_KEY") or None
    server = Server()
    if url is None or (key is None and config_file is not None):
        server = load_or_exit(config_path(config_file)).server
    if url is None:
        host = _ANYWHERE.get(server.host.strip("[]"), server.host.strip("[]"))
        url = f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"
    if not url.startswith(("http://", "https://")) or not urllib.parse.urlsplit(url).hostname:
        raise click.BadParameter(f"{url!r} is not http://host:port", param_hint="--url")
    if key is None and server.admin_keys:
        key = server.admin_keys[0].key.get_secret_value()
    return Remote(url.rstrip("/"), key or "")


def remote_options(function: _F) -> _F:
    """Add the options that say which proxy is meant."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output."),
        click.option(
            "--config",
            "config_file",
            type=click.Path(path_type=Path),
            help="Configuration to take address and admin key from.",
        ),
        click.option(
            "--key",
            help="Admin key (default: $LLAMA_PROXY_ADMIN_KEY, then the configuration's, where it says the address, too).",
        ),
        click.option("--url", help="Base URL (default: $LLAMA_PROXY_URL, then the configuration's)."),
    ):
        function = option(function)
    return function


def fail(text: str, code: Exit, *, as_json: bool) -> NoReturn:
    """Say what went wrong and end with the code."""
    if as_json:
        click.echo(json.dumps({"ok": False, "error": text, "exit_code": int(code)}))
    click.secho(text, fg="red", err=True)
    sys.exit(int(code))


def unwrap(answer: Answer, *, as_json: bool, unknown: bool = True) -> dict[str, Any]:
    """Return the body of a success; end with the proxy's words otherwise (`unknown`: a 404 means what was named)."""
    if answer.status < 300 and isinstance(answer.body, dict):
        return answer.body
    code = Exit.UNKNOWN if answer.status == 404 and unknown else Exit.REFUSED
    hint = ""
    if answer.status == 401:
        hint = "\ngive the admin key with --key, $LLAMA_PROXY_ADMIN_KEY or --config"
    fail(answer.problem + hint, code, as_json=as_json)


@contextlib.contextmanager
def told(*, as_json: bool) -> Iterator[None]:
    """End with words and an exit code for a proxy that does not answer, refuses a stream, or Ctrl-C."""
    try:
        yield
    except UnreachableError as error:
        fail(str(error), Exit.UNREACHABLE, as_json=as_json)
    except RefusedError as error:
        code = Exit.UNKNOWN if error.answer.status == 404 else Exit.REFUSED
        fail(error.answer.problem, code, as_json=as_json)
    except KeyboardInterrupt:
        sys.exit(int(Exit.INTERRUPTED))


def quoted(name: str) -> str:
    """Return a name as one part of a path."""
    return urllib.parse.quote(name, safe="")


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None
