"""How commands speak: plain text or JSON, progress on a terminal, errors with their mend, exit codes.

    0 done    1 failed    2 used wrongly    130 interrupted

Data goes to stdout; progress and errors go to stderr, so that `--json` can be piped. There is no colour anywhere but in
the progress bar, and that is drawn on terminals only. Knows nothing of what commands do.

Read next: `gateway/cli/context.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

FAILED = 1
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def fail(message: str) -> typer.Exit:
    """Print an error; raise what is returned."""
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(FAILED)


def print_json(document: Any) -> None:
    """One document, two-space indented."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


@contextmanager
def download_bar(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress callback for `sources.resolve`: a bar on a terminal, a line a stage elsewhere; silent for a hit."""
    if not sys.stderr.isatty():
        yield stage_lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None, visible=False)

        def draw(stage: str, done: int, total: int) -> None:
            if stage != "ready":
                words = f"{stage:9} {title}"
                progress.update(task, description=words, completed=done, total=total or None, visible=True)

        yield draw


def stage_lines(title: str) -> Callable[[str, int, int], None]:
    """One line when a stage begins; nothing for a model that is there already."""
    seen: set[str] = set()

    def write(stage: str, done: int, total: int) -> None:
        if stage != "ready" and stage not in seen:
            seen.add(stage)
            print(f"{stage:9} {title}", file=sys.stderr, flush=True)

    return write
