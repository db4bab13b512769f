"""Measures one engine: `python -m engines.bench --config JSON --runs N`, one JSON document on stdout.

Prompts are token ids from a fixed seed, all different, so that nothing is a prefix hit; each figure is the median of
`runs` repetitions after one that is not counted. `facet bench engine` starts this in a process of its own.

Knows nothing of text or HTTP. Read next: `engines/core/build.py`, docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from engines.api import GenerateRequest, SamplingParams
from engines.config import CacheConfig, EngineConfig
from engines.core.build import build_core, set_threads
from engines.core.engine import EngineCore
from engines.core.metrics import resident_bytes

SEED = 20261201
PREFILL_TOKENS = 512
DECODE_TOKENS = 128
DECODE_PROMPT_TOKENS = 16
BATCH_REQUESTS = 16
BATCH_PROMPT_TOKENS = 256
BATCH_OUTPUT_TOKENS = 64

Clock = Callable[[], float]


class Workload:
    """Prompts that share nothing; ids from 100 on, where no vocabulary keeps special tokens."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._random = np.random.Generator(np.random.PCG64(SEED))
        self._numbers = iter(range(1 << 30))

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        """Queue one greedy request that runs to its full length."""
        high = self._engine.capabilities.vocab_size
        prompt = self._random.integers(min(100, high // 2), high, prompt_tokens).tolist()
        sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
        name = f"bench-{next(self._numbers)}"
        self._engine.add_request(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))

    def run(self) -> int:
        """Step until nothing is left; returns the tokens generated."""
        generated = 0
        while self._engine.has_work():
            generated += sum(len(chunk.token_ids) for chunk in self._engine.step())
        return generated


def prefill_tok_s(engine: EngineCore, work: Workload, clock: Clock) -> float:
    """512 prompt tokens to their first token."""
    work.add(PREFILL_TOKENS, 1)
    began_s = clock()
    work.run()
    return PREFILL_TOKENS / (clock() - began_s)


def decode_tok_s(engine: EngineCore, work: Workload, clock: Clock) -> float:
    """128 tokens of one stream, after its first."""
    work.add(DECODE_PROMPT_TOKENS, DECODE_TOKENS + 1)
    engine.step()
    began_s = clock()
    return work.run() / (clock() - began_s)


def batch_gen_tok_s(engine: EngineCore, work: Workload, clock: Clock) -> float:
    """16 requests of 256 + 64 at once; generated tokens over the whole time, prefill included."""
    for _ in range(BATCH_REQUESTS):
        work.add(BATCH_PROMPT_TOKENS, BATCH_OUTPUT_TOKENS)
    began_s = clock()
    return work.run() / (clock() - began_s)


FIGURES: dict[str, Callable[[EngineCore, Workload, Clock], float]] = {
    "prefill_tok_s": prefill_tok_s,
    "decode_tok_s": decode_tok_s,
    "batch_gen_tok_s": batch_gen_tok_s,
}


def measure(config: EngineConfig, runs: int, clock: Clock, progress: Callable[[str], None]) -> dict[str, Any]:
    """All figures of one engine. Raises EngineError when it cannot be built."""
    began_s = clock()
    engine = build_core(config, clock=clock)
    if not isinstance(engine, EngineCore):
        raise ValueError(f"{config.model.path} embeds; the benchmark needs a model that generates")
    start_s = clock() - began_s
    work = Workload(engine)
    report: dict[str, Any] = {}
    for name, figure in FIGURES.items():
        figure(engine, work, clock)  # warms caches, counts for nothing
        values = []
        for run in range(runs):
            progress(f"{name} {run + 1}/{runs}")
            values.append(figure(engine, work, clock))
        report[name] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    engine.check_invariants()
    facts = engine.capabilities
    return {
        **report,
        "start_s": start_s,
        "rss_bytes": resident_bytes(),
        "kv_bytes": engine.kv_bytes,
        "threads": facts.num_threads,
        "dtype": facts.dtype,
        "model": facts.model,
        "digest": facts.digest,
        "runs": runs,
    }


def main() -> int:
    """Entry point of the process; progress goes to stderr."""
    parser = argparse.ArgumentParser(prog="engines.bench")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    blocks = -(-BATCH_REQUESTS * (BATCH_PROMPT_TOKENS + BATCH_OUTPUT_TOKENS) // config.cache.block_size)
    cache = CacheConfig(block_size=config.cache.block_size, num_blocks=2 * blocks)
    config = msgspec.structs.replace(config, cache=cache)
    set_threads(config.model.num_threads)
    report = measure(config, arguments.runs, time.perf_counter, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
