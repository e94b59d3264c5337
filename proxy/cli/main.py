"""The `llama-proxy` command: its subcommands, each imported when it is asked for.

Who looks at a model at night waits for what that command needs, not for the server, the engine's build and the benchmarks.
"""

import importlib
from typing import Final

import click

from proxy import __version__

COMMANDS: Final = {
    "serve": "serve",
    "init": "config",
    "config": "config",
    "engine": "engine",
    "watch": "watch",
    "bench": "bench",
    "requests": "requests",
    "cancel": "requests",
    "models": "operate",
    "load": "operate",
    "unload": "operate",
    "gate": "operate",
    "jobs": "jobs",
    "leases": "jobs",
    "logs": "jobs",
    "doctor": "doctor",
    "reload": "reload",
}
"""The module below `proxy.cli` that defines each command."""
_NAMES: Final = {"logs": "engine_logs"}


class Commands(click.Group):
    """The subcommands of `COMMANDS`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, in order."""
        _ = ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one command, None when there is none of that name."""
        _ = ctx
        if cmd_name not in COMMANDS:
            return None
        found = getattr(
            importlib.import_module(f"proxy.cli.{COMMANDS[cmd_name]}"), _NAMES.get(cmd_name, cmd_name)
        )
        if not isinstance(found, click.Command):
            raise TypeError(f"proxy.cli.{COMMANDS[cmd_name]} has no command {cmd_name!r}")
        return found


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="llama-proxy")
def cli() -> None:
    """One OpenAI-compatible port in front of phase-aware llama-server processes."""
