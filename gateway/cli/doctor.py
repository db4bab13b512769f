"""`facet doctor`: what could keep Facet from running well here, each with the line that mends it.

The checks are in `gateway/cli/checks.py` (this machine) and `gateway/cli/checks_facet.py` (this installation).
"""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.context import DataDir, settings_with
from gateway.cli.output import FAILED, AsJson, print_json


def doctor(
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to check.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to check.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and this installation; exit code 1 if something would keep Facet from running."""
    from gateway.cli import checks, checks_facet

    settings = settings_with(port=port, host=host, data_dir=data_dir)
    findings = [finding for check in checks.CHECKS + checks_facet.CHECKS for finding in check(settings)]
    if as_json:
        print_json([finding.as_json() for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.state:8} {finding.check:12} {finding.detail}")
            if finding.fix:
                print(f"{'':8} {'':12} fix: {finding.fix}")
    if any(finding.state == "failed" for finding in findings):
        raise typer.Exit(FAILED)
