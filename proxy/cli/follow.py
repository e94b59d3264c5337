"""Following a job of a running proxy to its end, with a bar that shows how far it is."""

import time
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from proxy.cli.remote import Remote, quoted, unwrap
from proxy.cli.tables import console, size

_WAIT_S: Final = 0.5
_PLAIN_S: Final = 5.0


def follow(remote: Remote, job: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Wait for the end of a job and return it. On a terminal a bar moves, elsewhere there is a line now and then."""
    shown = _Shown(console(err=True), quiet=as_json)
    try:
        shown.show(job)
        while not job["ended"]:
            answer = remote.ask("GET", f"/api/jobs/{quoted(job['id'])}?wait={_WAIT_S}")
            job = unwrap(answer, as_json=as_json)
            shown.show(job)
    except KeyboardInterrupt:
        shown.close()
        click.echo(f"the {job['kind']} goes on: llama-proxy jobs {job['id']}", err=True)
        raise
    finally:
        shown.close()
    return job


def describe(job: dict[str, Any]) -> tuple[str, int, int]:
    """Return what a job does in words, and how much of how much is done (0 of 0: nobody knows)."""
    progress = job["progress"]
    words = f"{job['kind']} {job['model']}: {progress['stage'] or 'waiting'}"
    left, read, total = progress["requests_left"], progress["bytes_read"], progress["bytes_total"]
    if left:
        words += f", {left} request{'' if left == 1 else 's'} still running"
    if read is not None and total:
        return f"{words} {size(read)} of {size(total)}", read, total
    return words, 0, 0


class _Shown:
    def __init__(self, target: Console, *, quiet: bool) -> None:
        self._console = target
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._most_left = 0
        self._printed = 0.0
        self._stage: str | None = None

    def show(self, job: dict[str, Any]) -> None:
        """Draw, or print when it is time to."""
        if self._quiet or (job["ended"] and self._bar is None):
            return
        words, done, total = describe(job)
        left, stage = job["progress"]["requests_left"], job["progress"]["stage"]
        if left is not None:
            # the bar of a drain: of the most that were seen, how many have gone
            self._most_left = max(self._most_left, left)
            done, total = self._most_left - left, self._most_left
        if self._console.is_terminal:
            self._draw(words, done, total)
            return
        now = time.monotonic()
        if stage != self._stage or now - self._printed >= _PLAIN_S:
            self._stage, self._printed = stage, now
            self._console.print(words, markup=False)

    def close(self) -> None:
        """Clear the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _draw(self, words: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(words, total=None)
        self._bar.update(self._task, description=words, completed=done, total=total or None)
