"""The `llama-proxy` command: groups and what they share."""

import click

from proxy import __version__
from proxy.cli.bench import bench
from proxy.cli.config import config, init
from proxy.cli.doctor import doctor
from proxy.cli.engine import engine
from proxy.cli.jobs import engine_logs, jobs, leases
from proxy.cli.operate import gate, load, models, unload
from proxy.cli.reload import reload
from proxy.cli.requests import cancel, requests
from proxy.cli.serve import serve
from proxy.cli.watch import watch


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="llama-proxy")
def cli() -> None:
    """One OpenAI-compatible port in front of phase-aware llama-server processes."""


cli.add_command(serve)
cli.add_command(init)
cli.add_command(config)
cli.add_command(engine)
cli.add_command(watch)
cli.add_command(bench)
cli.add_command(requests)
cli.add_command(cancel)
for command in (models, load, unload, gate, jobs, leases, engine_logs, doctor, reload):
    cli.add_command(command)
