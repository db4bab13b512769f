"""The command `facet`. Each command imports what it needs when it runs, so that `--help` is quick.

Read next: `gateway/cli/serve.py`, docs/cli.md.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.bench import app as bench
from gateway.cli.chat import chat
from gateway.cli.doctor import doctor
from gateway.cli.evaluate import app as evaluate
from gateway.cli.keys import app as keys
from gateway.cli.models import pull
from gateway.cli.serve import serve, up

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Facet: an OpenAI-compatible gateway with its own inference engines.",
)
app.command()(up)
app.command()(serve)
app.command()(pull)
app.command()(chat)
app.command()(doctor)
app.add_typer(keys, name="keys")
app.add_typer(bench, name="bench")
app.add_typer(evaluate, name="eval")
policy_app = typer.Typer(no_args_is_help=True, help="The routing policy.")
app.add_typer(policy_app, name="policy")


@policy_app.command("check")
def policy_check(
    file: Annotated[Path, typer.Argument(help="The policy file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Parse, type and check a policy; every problem with its line and column."""
    from gateway.cli.output import fail, print_json
    from policies.load import PolicyError, load_policy

    try:
        policy = load_policy(file)
    except PolicyError as error:
        if as_json:
            print_json({"ok": False, "problems": error.problems})
            raise typer.Exit(1) from error
        raise fail("the policy cannot be used\n  " + "\n  ".join(error.problems)) from error
    if as_json:
        print_json({"ok": True, "revision": policy.revision, "models": sorted(policy.models)})
    else:
        print(f"ok: revision {policy.revision}, models {', '.join(sorted(policy.models))}")


@policy_app.command("schema")
def policy_schema() -> None:
    """Print the JSON Schema of a policy, for editors."""
    from gateway.cli.output import print_json
    from policies.schema import policy_json_schema

    print_json(policy_json_schema())


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        print(version("facet-gateway"))
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
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
