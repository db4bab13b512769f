"""The command `facet`: a file a command or group; each imports what it needs when it runs, so that `--help` is quick.

Read next: `gateway/cli/serve.py`, docs/cli.md.
"""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.bench import app as bench
from gateway.cli.chat import chat
from gateway.cli.doctor import doctor
from gateway.cli.evaluate import app as evaluate
from gateway.cli.keys import app as keys
from gateway.cli.models import pull
from gateway.cli.policy import app as policy
from gateway.cli.serve import serve, up

DISTRIBUTION = "facet-gateway"

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(up)
app.command()(serve)
app.command()(pull)
app.add_typer(keys, name="keys")
app.command()(chat)
app.command()(doctor)
app.add_typer(policy, name="policy")
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(version(DISTRIBUTION))
        except PackageNotFoundError:
            print("source tree, not installed")
        raise typer.Exit


@app.callback()
def root(
    show: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Facet: an OpenAI-compatible gateway with its own inference engines."""


def run() -> None:
    """Console entry point."""
    app(prog_name="facet")
