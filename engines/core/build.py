"""Makes a core from its configuration: model, KV tensors, runner. The only place in `core` that loads weights.

The KV pool is sized by formula, never by a profiling run.

Read next: `engines/core/engine.py`, `engines/models/registry.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from engines.api import Capabilities, EngineError
from engines.config import CacheConfig, EngineConfig, SchedulerConfig
from engines.core.batch import BatchPacker
from engines.core.encoder import EncoderCore
from engines.core.engine import EngineCore
from engines.core.runner import Runner
from engines.models.base import DecoderModel, EncoderModel, ModelSpec
from engines.models.registry import load_model
from engines.ops.kv_cache import allocate_kv_cache

DEFAULT_KV_SHARE = 0.25
DEFAULT_KV_LIMIT_BYTES = 2 << 30


def set_threads(num_threads: int) -> None:
    """Threads of this process's operators; 0 is every core but one, which the gateway needs. Call before computing."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(num_threads or max(1, cores - 1))


def build_core(config: EngineConfig, *, clock: Callable[[], float]) -> EngineCore | EncoderCore:
    """Load the model and make its engine. Raises EngineError (CheckpointError among them) with what to mend."""
    model = load_model(config.model)
    if isinstance(model, DecoderModel):
        return build_decoder(model, config.cache, config.scheduler, clock=clock)
    return EncoderCore(model, encoder_capabilities(model), clock=clock)


def build_decoder(
    model: DecoderModel,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    clock: Callable[[], float],
    on_free_block: Callable[[int], None] | None = None,
) -> EngineCore:
    """An engine around a model that is loaded already."""
    spec = model.spec
    num_blocks = cache.num_blocks or blocks_for(spec, cache)
    max_model_len = min(spec.max_model_len, num_blocks * cache.block_size)
    max_blocks = -(-max_model_len // cache.block_size)
    packer = BatchPacker(
        max_tokens=scheduler.max_batch_tokens,
        max_requests=scheduler.max_running,
        max_blocks=max_blocks,
        block_size=cache.block_size,
    )
    kv = allocate_kv_cache(spec.num_layers, num_blocks, spec.num_kv_heads, cache.block_size, spec.head_dim)
    capabilities = Capabilities(
        model=spec.name,
        task="generate",
        digest=spec.digest,
        dtype=spec.dtype,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        num_threads=torch.get_num_threads(),
        features=("logprobs", "score", *(("prefix_cache",) if cache.prefix_cache else ())),
    )
    runner = Runner(model, kv, packer)
    return EngineCore(runner, cache, scheduler, capabilities, clock=clock, on_free_block=on_free_block)


def encoder_capabilities(model: EncoderModel) -> Capabilities:
    """What an embedding engine can do."""
    spec = model.spec
    return Capabilities(
        model=spec.name,
        task="embed",
        digest=spec.digest,
        dtype=spec.dtype,
        vocab_size=spec.vocab_size,
        max_model_len=spec.max_model_len,
        embedding_dimensions=spec.embedding_dimensions,
        num_threads=torch.get_num_threads(),
        features=("embed",),
    )


def blocks_for(spec: ModelSpec, cache: CacheConfig) -> int:
    """Blocks that fit the configured bytes; by default a quarter of what is free, at most 2 GiB."""
    block_bytes = 2 * 4 * spec.num_layers * spec.num_kv_heads * cache.block_size * spec.head_dim
    budget = cache.memory_bytes or min(int(available_bytes() * DEFAULT_KV_SHARE), DEFAULT_KV_LIMIT_BYTES)
    num_blocks = budget // block_bytes
    if num_blocks < 2:
        raise EngineError(f"{budget} bytes of KV memory hold {num_blocks} blocks of {block_bytes} bytes; 2 are needed")
    return int(num_blocks)


def available_bytes() -> int:
    """Memory that could be had now; 8 GiB where /proc is not mounted."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 8 << 30
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024
