"""A returning prefix, computed again or brought back from a tier: `python tests/bench/kv_tiers.py MODEL.gguf`.

One model, a fresh engine (an empty pool) for every figure, so that the prefix is nowhere but in the tier; the figures
take turns. `first_token_s` runs from `add_request` to the first token of a prompt of 4096 known and 16 new tokens. One
JSON document on stdout. "disk" reads files that the page cache holds, as after a restart of the worker; with
`--drop-caches` (root) they are read from the device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from engines.api import GenerateRequest, SamplingParams
from engines.config import CacheConfig, ModelConfig, SchedulerConfig
from engines.core.build import build_decoder, set_threads
from engines.core.engine import EngineCore
from engines.models.base import DecoderModel
from engines.models.registry import load_model

PREFIX_TOKENS, OWN_TOKENS = 4096, 16
POOL_BLOCKS = 640


def engine_of(model: DecoderModel, **tiers: object) -> EngineCore:
    cache = CacheConfig(num_blocks=POOL_BLOCKS, **tiers)
    return build_decoder(model, cache, SchedulerConfig(), clock=time.monotonic)


def first_token_s(engine: EngineCore, prefix: list[int], run: int) -> tuple[float, int]:
    """Seconds to the first token, and how many prompt tokens were not computed."""
    own = [100 + (run * 17 + i) % 1000 for i in range(OWN_TOKENS)]
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    began_s = time.perf_counter()
    engine.add_request(GenerateRequest(request_id="r", prompt_token_ids=prefix + own, sampling=sampling))
    while engine.has_work():
        for chunk in engine.step():
            elapsed_s = time.perf_counter() - began_s
            cached = chunk.usage.cached_tokens if chunk.usage is not None else 0
    return elapsed_s, cached


def from_memory_s(model: DecoderModel, prefix: list[int], run: int) -> float:
    """Computed in one engine, pushed out of the pool by other prompts, asked again."""
    engine = engine_of(model, dram_bytes=1 << 30)
    first_token_s(engine, prefix, run)
    assert engine.offload is not None
    engine.offload.settle(10.0)
    engine.kv.clear()
    elapsed_s, cached = first_token_s(engine, prefix, run + 1)
    assert cached >= PREFIX_TOKENS, cached
    engine.close()
    return elapsed_s


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache-dir", default="")
    parser.add_argument("--drop-caches", action="store_true")
    given = parser.parse_args()
    set_threads(given.threads)
    model = load_model(ModelConfig(name="m", path=str(given.model), cache_dir=given.cache_dir))
    assert isinstance(model, DecoderModel)
    random = np.random.Generator(np.random.PCG64(1))
    prefix = random.integers(100, model.spec.vocab_size, PREFIX_TOKENS).tolist()
    seen: dict[str, list[float]] = {"computed": [], "dram": [], "disk": []}
    with tempfile.TemporaryDirectory(prefix="facet-kv-bench-") as folder:
        disk = {"disk_path": folder, "disk_bytes": 4 << 30}
        filler = engine_of(model, **disk)
        first_token_s(filler, prefix, 0)
        filler.close()
        stored_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*.kv"))
        for run in range(1, given.runs + 1):
            print(f"run {run} of {given.runs}", file=sys.stderr)
            elapsed_s, cached = first_token_s(engine_of(model), prefix, run)
            assert cached == 0
            seen["computed"].append(elapsed_s)
            seen["dram"].append(from_memory_s(model, prefix, 10 * run))
            if given.drop_caches:
                drop_caches()
            engine = engine_of(model, **disk)
            elapsed_s, cached = first_token_s(engine, prefix, run)
            assert cached == PREFIX_TOKENS, cached
            seen["disk"].append(elapsed_s)
            engine.close()
    medians = {name: statistics.median(values) for name, values in seen.items()}
    print(
        json.dumps(
            {
                "dtype": model.spec.dtype,
                "prefix_tokens": PREFIX_TOKENS,
                "stored_bytes": stored_bytes,
                "first_token_s": {name: round(value, 4) for name, value in medians.items()},
                "runs_s": {name: [round(value, 4) for value in values] for name, values in seen.items()},
                "sooner": {name: round(medians["computed"] / medians[name], 1) for name in ("dram", "disk")},
                "page_cache": "dropped" if given.drop_caches else "warm",
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
