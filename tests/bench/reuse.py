"""What prefix reuse is worth: `python tests/bench/reuse.py [--json] [--runs N] [--only shared|agents]`.

shared   64 requests at once, a common prompt of 512 tokens, 64 of their own, 32 out: reuse on against off.
agents   50 agents, 5 turns each over one scaffold of 1,024 tokens; a turn adds 32 tokens, 8 come back and join the
         conversation: one prefix index for all against one for each agent (`cache_salt`).

Two engines in one process share the mapped weights and take turns; every run has new prompts, so that hits come from
within it. `prompt_steps_s` is the time of steps that computed any prompt, `decode_steps_s` of the others. Medians.

Read next: `engines/kv/manager.py`, `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.api import GenerateRequest, SamplingParams
from engines.config import CacheConfig, EngineConfig, ModelConfig
from engines.core.build import build_core, set_threads
from engines.core.engine import EngineCore
from gateway.cli.bench import DEFAULT_MODEL, circumstances
from gateway.cli.context import fetch_model, settings_with

SEED = 20261201
FIRST_ID = 100
REQUESTS, SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 64, 512, 64, 32
AGENTS, TURNS, SCAFFOLD_TOKENS, TURN_TOKENS, TURN_OUTPUT_TOKENS = 50, 5, 1024, 32, 8
BLOCK_SIZE = 16
TARGETS = {"shared": 6.4, "agents": 5.0}


@dataclass
class Timer:
    """Seconds of a run, by kind of step; and of this process's CPUs, which other work on the machine inflates less."""

    prompt_steps_s: float = 0.0
    decode_steps_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.prompt_steps_s + self.decode_steps_s


class Bench:
    """Prompts from one generator, requests of greedy, full length."""

    def __init__(self) -> None:
        self._random = np.random.Generator(np.random.PCG64(SEED))
        self._numbers = iter(range(1 << 30))

    def prompt(self, engine: EngineCore, num_tokens: int) -> list[int]:
        """[num_tokens] random ids."""
        ids: list[int] = self._random.integers(FIRST_ID, engine.capabilities.vocab_size, num_tokens).tolist()
        return ids

    def add(self, engine: EngineCore, prompt: list[int], output_tokens: int, salt: bytes = b"") -> str:
        """Queue one request; its id."""
        name = f"reuse-{next(self._numbers)}"
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
        engine.add_request(
            GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, cache_salt=salt)
        )
        return name

    def drain(self, engine: EngineCore, timer: Timer) -> dict[str, list[int]]:
        """Step until nothing is left: the tokens of each request."""
        tokens: dict[str, list[int]] = {}
        while engine.has_work():
            scheduler = engine.scheduler
            prompts = len(scheduler.waiting) or any(r.num_tokens_to_compute > 1 for r in scheduler.running)
            began_s, cpu_began_s = time.perf_counter(), time.process_time()
            chunks = engine.step()
            taken_s = time.perf_counter() - began_s
            timer.cpu_s += time.process_time() - cpu_began_s
            if prompts:
                timer.prompt_steps_s += taken_s
            else:
                timer.decode_steps_s += taken_s
            for chunk in chunks:
                tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        return tokens


def run_shared(bench: Bench, engine: EngineCore) -> Timer:
    """64 x (512 shared + 64 own + 32 out)."""
    shared, timer = bench.prompt(engine, SHARED_TOKENS), Timer()
    for _ in range(REQUESTS):
        bench.add(engine, shared + bench.prompt(engine, OWN_TOKENS), OUTPUT_TOKENS)
    bench.drain(engine, timer)
    return timer


def run_agents(bench: Bench, engine: EngineCore, *, own_index: bool) -> Timer:
    """50 conversations of 5 turns; all agents take a turn at the same time."""
    scaffold, timer = bench.prompt(engine, SCAFFOLD_TOKENS), Timer()
    talks = [list(scaffold) for _ in range(AGENTS)]
    for _ in range(TURNS):
        names = []
        for agent, talk in enumerate(talks):
            talk += bench.prompt(engine, TURN_TOKENS)
            salt = f"agent {agent}".encode() if own_index else b""
            names.append(bench.add(engine, talk, TURN_OUTPUT_TOKENS, salt))
        answers = bench.drain(engine, timer)
        for name, talk in zip(names, talks, strict=True):
            talk += answers[name]
    return timer


def build(model: Path, threads: int, cache_dir: str, num_blocks: int, *, prefix_cache: bool) -> EngineCore:
    fields = ModelConfig(name=model.stem, path=str(model), num_threads=threads, cache_dir=cache_dir)
    cache = CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, prefix_cache=prefix_cache)
    engine = build_core(EngineConfig(model=fields, cache=cache), clock=time.monotonic)
    assert isinstance(engine, EngineCore)
    return engine


def compare(name: str, cases: dict[str, Callable[[], Timer]], runs: int) -> dict[str, Any]:
    """The cases in turn, `runs` times; the first case is what reuse makes of it, the second what it is held against."""
    seen: dict[str, list[Timer]] = {case: [] for case in cases}
    for run in range(runs):
        for case, work in cases.items():
            timer = work()
            seen[case].append(timer)
            print(f"{name} {run + 1}/{runs} {case}: {timer.total_s:.2f} s", file=sys.stderr, flush=True)
    with_reuse, without = cases
    ratios = [b.total_s / a.total_s for a, b in zip(seen[with_reuse], seen[without], strict=True)]
    report = {
        case: {
            field: round(statistics.median(getattr(timer, field) for timer in timers), 3)
            for field in ("total_s", "prompt_steps_s", "decode_steps_s", "cpu_s")
        }
        for case, timers in seen.items()
    }
    ratio = report[without]["total_s"] / report[with_reuse]["total_s"]
    spread = [round(min(ratios), 2), round(max(ratios), 2)]
    cpu_ratio = round(report[without]["cpu_s"] / report[with_reuse]["cpu_s"], 2)
    return {**report, "ratio": round(ratio, 2), "ratio_spread": spread, "cpu_ratio": cpu_ratio, "target": TARGETS[name]}


def measure(only: str, runs: int, threads: int, model_source: str) -> dict[str, Any]:
    settings = settings_with()
    model, cache_dir = fetch_model(model_source, settings), str(Path(settings.cache_dir) / "packed")
    set_threads(threads)
    bench, result = Bench(), {}
    if only != "agents":
        blocks = REQUESTS * (SHARED_TOKENS + OWN_TOKENS + OUTPUT_TOKENS + BLOCK_SIZE) // BLOCK_SIZE + REQUESTS
        on, off = (build(model, threads, cache_dir, blocks, prefix_cache=reuse) for reuse in (True, False))
        cases = {"reuse on": lambda: run_shared(bench, on), "reuse off": lambda: run_shared(bench, off)}
        result["shared"] = compare("shared", cases, runs)
    if only != "shared":
        tokens = SCAFFOLD_TOKENS + TURNS * (TURN_TOKENS + TURN_OUTPUT_TOKENS) + BLOCK_SIZE
        blocks = AGENTS * tokens // BLOCK_SIZE + AGENTS
        one, each = (build(model, threads, cache_dir, blocks, prefix_cache=True) for _ in range(2))
        cases = {
            "one index": lambda: run_agents(bench, one, own_index=False),
            "one an agent": lambda: run_agents(bench, each, own_index=True),
        }
        result["agents"] = compare("agents", cases, runs)
    return {**result, "runs": runs, "threads": threads, **circumstances()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("shared", "agents"), default="")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = measure(given.only, given.runs, given.threads, given.model)
    if given.json:
        print(json.dumps(result, indent=2))
        return
    for name in TARGETS:
        if name in result:
            print(f"{name}: {result[name]['ratio']} x (goal {TARGETS[name]} x)")
            for case in list(result[name])[:2]:
                print(f"  {case}: {result[name][case]}")


if __name__ == "__main__":
    main()
