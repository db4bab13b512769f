"""How long a worker takes to start, and what memory it holds: `python tests/bench/start.py MODEL.gguf --cache-dir DIR`.

`cold_start_s`: from starting the process, files in the page cache and weights packed, to the first token of a prompt of
16. `warm_fork_ms`: from asking the zygote to a worker that listens. `rss`: of a worker that has served 16 requests of
256 + 64 tokens, with its parts as the kernel tells them, and the bound of 1.5 x packed weights + KV pool + 200 MB.
`idle_cpu_ms`: processor time of that worker in a second without work. Medians; one JSON document on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from engines.api import GenerateRequest, SamplingParams
from engines.config import CacheConfig, EngineConfig, ModelConfig
from engines.models.start_record import read_record
from engines.nursery import Zygote
from engines.process import EngineProcess

POOL_BLOCKS, BLOCK_SIZE = 640, 16
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 256, 64


async def ask(engine: EngineProcess, name: str, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds to the first token."""
    random = np.random.Generator(np.random.PCG64(int.from_bytes(name.encode())))
    prompt = random.integers(100, 40000, prompt_tokens).tolist()
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0)
    began_s, first_s = time.perf_counter(), 0.0
    async for _ in engine.generate(GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)):
        first_s = first_s or time.perf_counter() - began_s
    return first_s


def process_of(config: EngineConfig, folder: Path, name: str, zygote: Zygote | None) -> EngineProcess:
    return EngineProcess(config, run_dir=folder, name=name, log_path=folder / f"{name}.log", zygote=zygote)


async def cold_start_s(config: EngineConfig, folder: Path) -> float:
    engine = process_of(config, folder, "cold", None)
    began_s = time.perf_counter()
    await engine.start()
    await ask(engine, "first", 16, 1)
    elapsed_s = time.perf_counter() - began_s
    await engine.close()
    return elapsed_s


async def warm_fork_ms(engine: EngineProcess, zygote: Zygote, folder: Path, number: int) -> float:
    """A further worker of a zygote that is loaded."""
    began_s = time.perf_counter()
    worker = await zygote.fork(folder / f"fork-{number}.sock", folder / f"fork-{number}.log")
    assert await worker.ready()
    elapsed_s = time.perf_counter() - began_s
    worker.send_signal(signal.SIGTERM)
    await worker.wait()
    return 1000 * elapsed_s


def memory_of(pid: int) -> dict[str, int]:
    """Resident bytes, and how they are shared out."""
    rollup = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    fields = {"total": status["VmRSS"], "anonymous": status["RssAnon"], "file": status["RssFile"], "pss": rollup["Pss"]}
    return {name: int(text.split()[0]) * 1024 for name, text in fields.items()}


def sizes_of(config: EngineConfig) -> tuple[int, int]:
    """Bytes of the packed weights and of the float32 KV pool; after a first start."""
    record = read_record(config.model.cache_dir, config.model.path)
    assert record is not None, "the model does not run natively here"
    facts = record.facts
    block_bytes = 2 * 4 * facts.num_layers * facts.num_kv_heads * BLOCK_SIZE * facts.head_dim
    packed = max(path.stat().st_size for path in Path(config.model.cache_dir).glob("*.packed"))
    return packed, POOL_BLOCKS * block_bytes


async def measure(config: EngineConfig, folder: Path, runs: int) -> dict[str, object]:
    cold = [await cold_start_s(config, folder) for _ in range(runs + 1)][1:]  # the first packs the weights
    packed_bytes, kv_bytes = sizes_of(config)
    engine = process_of(config, folder, "spawned", None)
    await engine.start()
    await asyncio.gather(*(ask(engine, f"r{n}", PROMPT_TOKENS, OUTPUT_TOKENS) for n in range(REQUESTS)))
    assert engine.pid is not None
    rss = memory_of(engine.pid)
    await asyncio.sleep(0.3)
    before_s = sum(psutil.Process(engine.pid).cpu_times()[:2])
    await asyncio.sleep(1.0)
    idle_s = sum(psutil.Process(engine.pid).cpu_times()[:2]) - before_s
    await engine.close()

    zygote = Zygote(config, folder / "zygote.log")
    forked = process_of(config, folder, "forked", zygote)
    await forked.start()
    warm = [await warm_fork_ms(forked, zygote, folder, number) for number in range(3 * runs)]
    await ask(forked, "first", 16, 1)
    assert forked.pid is not None
    assert zygote.pid is not None
    shared = {"worker": memory_of(forked.pid), "zygote": memory_of(zygote.pid)}
    await forked.close()
    return {
        "cold_start_s": round(statistics.median(cold), 3),
        "cold_runs_s": [round(value, 3) for value in cold],
        "warm_fork_ms": round(statistics.median(warm), 1),
        "warm_runs_ms": [round(value, 1) for value in warm],
        "rss": rss,
        "packed_bytes": packed_bytes,
        "kv_bytes": kv_bytes,
        "rss_bound": int(1.5 * packed_bytes) + kv_bytes + 200_000_000,
        "forked": shared,
        "idle_cpu_ms": round(1000 * idle_s, 1),
        "load_average": os.getloadavg()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    config = EngineConfig(
        model=ModelConfig(
            name="m", path=str(given.model), cache_dir=str(given.cache_dir.absolute()), num_threads=given.threads
        ),
        cache=CacheConfig(num_blocks=POOL_BLOCKS, block_size=BLOCK_SIZE),
    )
    with tempfile.TemporaryDirectory(prefix="facet-start-") as folder:
        print(json.dumps(asyncio.run(measure(config, Path(folder), given.runs))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
