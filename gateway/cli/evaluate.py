"""`facet eval kld`: how far a number format is from float32, on real text.

Runs in a process of its own, for it loads torch. Read next: `engines/evaluate.py`, docs/benchmarks.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.bench import DEFAULT_MODEL, DType, Model, show
from gateway.cli.context import checked_dtype, child_output, fetch_model, settings_with
from gateway.cli.output import AsJson, fail, print_json

app = typer.Typer(no_args_is_help=True)


@app.callback()
def group() -> None:
    """Measure the quality of a number format."""


@app.command()
def kld(
    model: Model = DEFAULT_MODEL,
    dtype: DType = "auto",
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of text.")] = 8192,
    text: Annotated[Path | None, typer.Option(help="A text file; without it the standard library's own prose.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores but one.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Kullback-Leibler divergence and agreement of the likeliest token against float32, teacher-forced."""
    settings = settings_with()
    if text is not None and not text.is_file():
        raise fail(f"there is no file {text}; give a text in UTF-8, or leave --text out.")
    path = fetch_model(model, settings)
    arguments = ["--path", str(path), "--dtype", checked_dtype(dtype), "--tokens", str(tokens)]
    arguments += ["--threads", str(threads), "--cache-dir", str(Path(settings.cache_dir) / "packed")]
    if text is not None:
        arguments += ["--text", str(text.absolute())]
    figures = json.loads(child_output("engines.evaluate", *arguments))
    if as_json:
        print_json(figures)
    else:
        show(figures)
