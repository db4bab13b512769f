"""`facet policy check | schema`: the routing policy, without a running gateway.

Read next: `policies/load.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.output import FAILED, AsJson, fail, print_json

app = typer.Typer(no_args_is_help=True, help="The routing policy.")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The policy file.")],
    as_json: AsJson = False,
) -> None:
    """Parse, type and check a policy; every problem comes with its line and column."""
    from policies.load import PolicyError, load_policy

    try:
        policy = load_policy(file)
    except PolicyError as error:
        if as_json:
            print_json({"ok": False, "problems": error.problems})
            raise typer.Exit(FAILED) from error
        raise fail("the policy cannot be used\n  " + "\n  ".join(error.problems)) from error
    if as_json:
        print_json({"ok": True, "revision": policy.revision, "models": sorted(policy.models)})
    else:
        print(f"ok: revision {policy.revision}, models {', '.join(sorted(policy.models))}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of a policy, for editors."""
    from policies.schema import policy_json_schema

    print_json(policy_json_schema())
