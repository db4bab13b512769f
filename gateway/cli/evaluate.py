"""`facet eval kld|ppl|table`: how far number formats are from float32, on real text.

Runs in a process of its own, for it loads torch. Read next: `engines/evaluate.py`, docs/quality.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.bench import DEFAULT_MODEL, DType, Model, show
from gateway.cli.context import checked_dtype, checked_kv_dtype, child_output, fetch_model, settings_with
from gateway.cli.output import AsJson, fail, print_json

app = typer.Typer(no_args_is_help=True)
KVDType = Annotated[str, typer.Option(help="Of keys and values: float32 | bfloat16 | int8 | float8 | int4.")]
Tokens = Annotated[int, typer.Option(min=64, help="Tokens of text.")]
Text = Annotated[Path | None, typer.Option(help="A text file; without it the standard library's own prose.")]
Threads = Annotated[int, typer.Option(min=0, help="0: all cores but one.")]
WEIGHTS, KEYS = "float32,int8,native,q8,q4,w8a8", "float32,bfloat16,int8,float8,int4"
PERPLEXITY = ("perplexity", "reference_perplexity", "perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high")
CIRCUMSTANCES = ("model", "digest", "dtype", "kv_dtype", "reference_dtype", "tokens", "text", "text_tokens_sha256")


@app.callback()
def group() -> None:
    """Measure the quality of a number format."""


@app.command()
def kld(
    model: Model = DEFAULT_MODEL,
    dtype: DType = "auto",
    kv_dtype: KVDType = "float32",
    tokens: Tokens = 8192,
    text: Text = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Kullback-Leibler divergence and agreement of the likeliest token against float32, teacher-forced."""
    _print(_figures(model, _format(dtype, kv_dtype), tokens, text, threads), as_json)


@app.command()
def ppl(
    model: Model = DEFAULT_MODEL,
    dtype: DType = "auto",
    kv_dtype: KVDType = "float32",
    tokens: Tokens = 8192,
    text: Text = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Perplexity, and its ratio to float32's."""
    figures = _figures(model, _format(dtype, kv_dtype), tokens, text, threads)
    _print({name: figures[name] for name in (*CIRCUMSTANCES, *PERPLEXITY)}, as_json)


@app.command()
def table(
    model: Model = DEFAULT_MODEL,
    weights: Annotated[str, typer.Option(help="Formats of weights, separated by commas.")] = WEIGHTS,
    keys: Annotated[str, typer.Option(help="Formats of keys and values, separated by commas.")] = KEYS,
    tokens: Tokens = 8192,
    text: Text = None,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """All formats of weights with all formats of keys and values: quality, speed, bytes. Takes minutes."""
    for dtype in weights.split(","):
        checked_dtype(dtype)
    for kv_dtype in keys.split(","):
        checked_kv_dtype(kv_dtype)
    figures = _figures(model, ["--table", "--weights", weights, "--keys", keys], tokens, text, threads)
    if as_json:
        print_json(figures)
    else:
        print(figures["markdown"])


def _format(dtype: str, kv_dtype: str) -> list[str]:
    return ["--dtype", checked_dtype(dtype), "--kv-dtype", checked_kv_dtype(kv_dtype)]


def _figures(model: str, what: list[str], tokens: int, text: Path | None, threads: int) -> dict[str, Any]:
    settings = settings_with()
    if text is not None and not text.is_file():
        raise fail(f"there is no file {text}; give a text in UTF-8, or leave --text out.")
    path = fetch_model(model, settings)
    arguments = ["--path", str(path), *what, "--tokens", str(tokens)]
    arguments += ["--threads", str(threads), "--cache-dir", str(Path(settings.cache_dir) / "packed")]
    if text is not None:
        arguments += ["--text", str(text.absolute())]
    figures: dict[str, Any] = json.loads(child_output("engines.evaluate", *arguments))
    return figures


def _print(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(figures)
    else:
        show(figures)
