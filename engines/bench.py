"""Measures one engine: `python -m engines.bench --config JSON --runs N`, one JSON document on stdout.

Prompts are token ids from a fixed seed, all different, so that nothing is a prefix hit; each figure is the median of
`runs` repetitions after one that is not counted. `start_s` runs from the start of the process, imports included, to an
engine that can be asked. `facet bench engine` starts this in a process of its own.

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

from engines.api import EngineError, GenerateRequest, InvalidRequestError, SamplingParams
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
INTERRUPTED = 130

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


def measure(
    config: EngineConfig, runs: int, clock: Clock, progress: Callable[[str], None], *, began_s: float
) -> dict[str, Any]:
    """All figures of one engine, medians over `runs`. `began_s`: when its start began, on `clock`. Raises EngineError.

    The figures take turns, so that a busy minute of the machine does not fall on one of them alone.
    """
    engine = build_core(config, clock=clock)
    if not isinstance(engine, EngineCore):
        raise InvalidRequestError(f"{config.model.path} embeds; the benchmark needs a model that generates")
    start_s = clock() - began_s
    work = Workload(engine)
    values: dict[str, list[float]] = {name: [] for name in FIGURES}
    for run in range(runs + 1):
        for name, figure in FIGURES.items():
            progress(f"{name} {run}/{runs}" if run else f"{name} (not counted)")
            value = figure(engine, work, clock)
            if run:
                values[name].append(value)
    engine.check_invariants()
    facts = engine.capabilities
    return {
        "model": facts.model,
        "model_digest": facts.digest,
        "dtype": facts.dtype,
        "threads": facts.num_threads,
        "runs": runs,
        **{name: round(statistics.median(seen), 2) for name, seen in values.items()},
        "start_s": round(start_s, 3),
        "rss_bytes": resident_bytes(),
        "kv_bytes": engine.kv_bytes,
        "spread": {name: {"min": round(min(seen), 2), "max": round(max(seen), 2)} for name, seen in values.items()},
    }


def main() -> int:
    """Entry point of the process; progress goes to stderr, and an error that the user can mend as one line."""
    parser = argparse.ArgumentParser(prog="python -m engines.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--began-s", type=float, default=None, help="time.monotonic() when this process was started")
    given = parser.parse_args()
    began_s = time.monotonic() if given.began_s is None else given.began_s
    try:
        config = with_room(msgspec.json.decode(given.config, type=EngineConfig))
        set_threads(config.model.num_threads)
        report = measure(config, given.runs, time.monotonic, show_progress, began_s=began_s)
    except (EngineError, msgspec.MsgspecError, OSError) as error:
        print(f"engines.bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    print(json.dumps(report))
    return 0


def with_room(config: EngineConfig) -> EngineConfig:
    """Twice the blocks that the batch needs, so that nothing is preempted and little is evicted."""
    blocks = -(-BATCH_REQUESTS * (BATCH_PROMPT_TOKENS + BATCH_OUTPUT_TOKENS) // config.cache.block_size)
    return msgspec.structs.replace(config, cache=CacheConfig(block_size=config.cache.block_size, num_blocks=2 * blocks))


def show_progress(line: str) -> None:
    """One line a figure and run."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
