"""How commands speak: plain text or JSON, progress on a terminal, errors with their mend, exit codes.

    0 done    1 failed    2 used wrongly

Knows nothing of what commands do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

FAILED = 1
STAGES = {"fetching": "fetching", "checking": "checking", "unpacking": "unpacking", "ready": "ready"}


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
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    seen: set[str] = set()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(title, total=None, visible=False)

        def report(stage: str, done: int, total: int) -> None:
            if stage == "ready":
                return
            progress.update(
                task, description=f"{STAGES[stage]} {title}", completed=done, total=total or None, visible=True
            )
            if stage not in seen and not console.is_terminal:
                print(f"{STAGES[stage]} {title}", file=sys.stderr)
            seen.add(stage)

        yield report
