"""`llama-proxy watch`: see what running engines do, record it, add it up."""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console
from rich.live import Live

from proxy.cli.watch_report import print_summary
from proxy.cli.watch_view import plain_lines, view
from proxy.observe.account import Account
from proxy.observe.recording import Recorder, Recording, RecordingError, line_of
from proxy.observe.records import Header, Record
from proxy.observe.session import INTERVAL_S, MIN_INTERVAL_S, begin, observe
from proxy.observe.summary import summarize
from proxy.observe.target import DEFAULT_URL, Target, TargetError, parse_target

_REDRAW_S = 0.25
_PLAIN_S = 5.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command()
@click.argument("urls", nargs=-1, metavar="[URL ...]")
@click.option(
    "--record",
    "record_file",
    type=click.Path(path_type=Path),
    help="Write everything that is seen to this new file, as JSON lines.",
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(MIN_INTERVAL_S, 3600),
    default=INTERVAL_S,
    show_default=True,
    help="Seconds between two samples.",
)
@click.option(
    "--for",
    "for_s",
    type=click.FloatRange(0),
    default=0.0,
    help="End after this many seconds; 0 watches until Ctrl-C.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Follow this engine's log file too, on the same clock; may be given again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print records as JSON lines, the summary last.")
@click.option(
    "--api-key",
    envvar="LLAMA_API_KEY",
    show_envvar=True,
    default="",
    help="Key for the servers; is not recorded.",
)
@click.option(
    "--no-counters",
    is_flag=True,
    help="Do not read the engines' /metrics: reading starts the averages of its gauges anew.",
)
@click.option(
    "--summary",
    "summary_file",
    type=click.Path(path_type=Path),
    help="Add up a recording instead of watching.",
)
def watch(
    urls: tuple[str, ...],
    record_file: Path | None,
    interval_s: float,
    for_s: float,
    logs: tuple[Path, ...],
    as_json: bool,
    api_key: str,
    no_counters: bool,
    summary_file: Path | None,
) -> None:
    """Watch what running llama-servers do: phases, cohorts, slots, and tokens per second of all together.

    URL is a llama-server (http://host:8080) or a model behind a llama-proxy (http://host:8082/?model=NAME;
    the default is http://127.0.0.1:8082, for a proxy with one model). Servers may come, go and restart
    meanwhile. A stock llama-server shows no phases. Nothing is changed on a server, but a server that is
    watched does not fall asleep.

    \b
    Examples:
      llama-proxy watch http://127.0.0.1:8080
      llama-proxy watch :8080 :8081 --record run.jsonl --log engine.log --for 60
      llama-proxy watch --summary run.jsonl

    Combined progress is the difference of the servers' token counts between samples that were taken at most
    0.5 s apart, divided by the time between them, and never a sum of rates. Exit code 1: nothing was seen.
    """  # noqa: D301 - click's mark for lines to keep
    if summary_file is not None:
        if urls or logs or record_file is not None:
            raise click.UsageError("--summary reads a recording: it takes no URL, --record or --log")
        _summary(summary_file, as_json=as_json)
        return
    targets = _targets(urls)
    header = begin(targets, logs, interval_s)
    account = Account(header)
    with ExitStack() as stack:
        try:
            recorder = stack.enter_context(Recorder(record_file)) if record_file is not None else None
            show = _Show(account, recorder, as_json=as_json)
            show.take(header)
            _run(show, targets, logs, api_key, counters=not no_counters, for_s=for_s or None)
        except RecordingError as error:
            _fail(str(error))
    account.close()
    summary = summarize(account)
    if as_json:
        click.echo(json.dumps(summary))
    else:
        print_summary(Console(), summary)
        if record_file is not None:
            click.echo(f"recorded in {record_file}; llama-proxy watch --summary adds it up again", err=True)
    if not any(server.samples for server in account.servers):
        whys = {
            f"{server.name}: {server.mark.why or server.mark.state}"
            for server in account.servers
            if server.mark
        }
        _fail("nothing was seen: " + ("; ".join(sorted(whys)) or "no server answered in time"))


def _targets(urls: tuple[str, ...]) -> list[Target]:
    found: list[Target] = []
    for url in urls or (DEFAULT_URL,):
        try:
            target = parse_target(f"127.0.0.1{url}" if url.startswith(":") else url)
        except TargetError as error:
            raise click.BadParameter(str(error), param_hint="URL") from None
        if target in found:
            raise click.BadParameter(f"{url} is given twice", param_hint="URL")
        found.append(target)
    return found


def _summary(path: Path, *, as_json: bool) -> None:
    try:
        with Recording(path) as recording:
            account = Account(recording.header)
            for record in recording:
                try:
                    account.add(record)
                except ValueError as error:
                    raise RecordingError(f"{path}: {error}") from None
            account.close()
            summary = summarize(account, tuple(recording.notes))
    except RecordingError as error:
        _fail(str(error))
    if as_json:
        click.echo(json.dumps(summary))
    else:
        print_summary(Console(), summary)


@dataclass(slots=True)
class _Show:
    """Hands each record to whoever wants it."""

    account: Account
    recorder: Recorder | None
    as_json: bool

    def take(self, record: Record) -> None:
        if self.recorder is not None:
            self.recorder.write(record)
        if self.as_json:
            sys.stdout.buffer.write(line_of(record))
            sys.stdout.buffer.flush()
        if not isinstance(record, Header):
            self.account.add(record)


def _run(
    show: _Show,
    targets: list[Target],
    logs: tuple[Path, ...],
    api_key: str,
    *,
    counters: bool,
    for_s: float | None,
) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        with _stopped_by_signals(stop):
            drawing = asyncio.create_task(_draw(show))

            def drawn(task: asyncio.Task[None]) -> None:
                if not task.cancelled() and task.exception() is not None:
                    # nobody sees it any more (`| head` has enough)
                    stop.set()

            drawing.add_done_callback(drawn)
            try:
                await observe(
                    *(show.account.header, targets, logs, show.take, stop),
                    api_key=api_key,
                    counters=counters,
                    for_s=for_s,
                )
            finally:
                drawing.cancel()
                with suppress(asyncio.CancelledError):
                    await drawing

    asyncio.run(main())


@contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Let the first Ctrl-C (or TERM, HUP) end the observation in order, and a second one as usual."""
    loop = asyncio.get_running_loop()
    # what is ignored (nohup, background jobs) stays ignored
    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def stopping() -> None:
        stop.set()
        release()

    def release() -> None:
        while taken:
            loop.remove_signal_handler(taken.pop())

    for number in taken:
        loop.add_signal_handler(number, stopping)
    try:
        yield
    finally:
        release()


async def _draw(show: _Show) -> None:
    """Show what goes on until cancelled: a live table on a terminal, a line now and then elsewhere."""
    if show.as_json:
        return
    console = Console()
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(view(show.account, console.width, console.height), refresh=True)
                await asyncio.sleep(_REDRAW_S)
    while True:
        await asyncio.sleep(_PLAIN_S)
        for line in plain_lines(show.account):
            click.echo(line)


def _fail(text: str) -> NoReturn:
    click.secho(text, fg="red", err=True)
    sys.exit(1)
