"""Makes a core from its configuration: model, KV tensors, runner. The only place in `core` that loads weights.

The KV pool is sized by formula, never by a profiling run.

Read next: `engines/core/engine.py`, `engines/core/memory.py`, `engines/models/base.py`.
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
from engines.core.memory import num_kv_blocks
from engines.core.runner import Runner
from engines.kv.manager import KVManager
from engines.kv.mover import Mover
from engines.kv.offload import Offload
from engines.kv.tier_disk import DiskTier
from engines.kv.tiers import BlockTier, DramTier
from engines.models.base import DecoderModel, EncoderModel
from engines.models.registry import load_model
from engines.ops.kv_cache import allocate_kv_cache
from engines.ops.kv_copy import BlockCopier


def default_threads(num_threads: int) -> int:
    """What 0 means: every core but one, which the gateway needs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return num_threads or max(1, cores - 1)


def set_threads(num_threads: int) -> None:
    """Threads of this process's operators; 0 is every core but one. Call before computing."""
    torch.set_num_threads(default_threads(num_threads))


def build_core(config: EngineConfig, *, clock: Callable[[], float]) -> EngineCore | EncoderCore:
    """Load the model and make its engine. Raises EngineError (CheckpointError among them) with what to mend."""
    return build_around(load_model(config.model), config, clock=clock)


def build_around(
    model: DecoderModel | EncoderModel, config: EngineConfig, *, clock: Callable[[], float]
) -> EngineCore | EncoderCore:
    """An engine around a model that is loaded already, in a fork say. Raises EngineError."""
    if isinstance(model, DecoderModel):
        return build_decoder(model, config.cache, config.scheduler, clock=clock)
    return build_encoder(model, clock=clock)


def build_decoder(
    model: DecoderModel,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    *,
    clock: Callable[[], float],
    on_free_block: Callable[[int], None] | None = None,
) -> EngineCore:
    """An engine around a model that is loaded already. Raises EngineError if the configuration cannot run."""
    for field in ("max_batch_tokens", "chunk_tokens", "max_running", "max_waiting"):
        if getattr(scheduler, field) < 1:
            raise EngineError(f"{field} is {getattr(scheduler, field)}; it must be at least 1")
    spec, block_size = model.spec, cache.block_size
    num_blocks = num_kv_blocks(spec, cache)
    # A context that could not fit alone would wait for ever, so the pool bounds what the engine accepts.
    max_model_len = min(spec.max_model_len, num_blocks * block_size)
    packer = BatchPacker(
        max_tokens=scheduler.max_batch_tokens,
        max_requests=scheduler.max_running,
        max_blocks=-(-max_model_len // block_size),
        block_size=block_size,
    )
    kv = allocate_kv_cache(spec.num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim, spec.kv_dtype)
    capabilities = Capabilities(
        model=spec.name,
        task="generate",
        digest=spec.digest,
        dtype=spec.dtype,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        num_threads=torch.get_num_threads(),
        features=(
            "logprobs",
            "score",
            *(["prefix_cache"] if cache.prefix_cache else []),
            *(["kv_dram"] if cache.dram_bytes else []),
            *(["kv_disk"] if cache.disk_bytes else []),
        ),
    )
    runner = Runner(model, kv, packer)
    return EngineCore(
        runner,
        cache,
        scheduler,
        capabilities,
        clock=clock,
        on_free_block=on_free_block,
        add_tiers=tiers_below(cache, BlockCopier(kv)),
    )


def tiers_below(cache: CacheConfig, copier: BlockCopier) -> Callable[[KVManager], Offload] | None:
    """What puts the configured tiers below a pool; None if there are none. Raises EngineError."""
    if not cache.dram_bytes and not cache.disk_bytes:
        return None
    if not cache.prefix_cache:
        raise EngineError("dram_bytes and disk_bytes need prefix_cache: without it no block is ever found again")
    if bool(cache.disk_bytes) != bool(cache.disk_path):
        raise EngineError(f"disk_path is {cache.disk_path!r} and disk_bytes {cache.disk_bytes}; a disk tier needs both")
    tiers: list[BlockTier] = []
    try:
        if cache.dram_bytes:
            tiers.append(DramTier(cache.dram_bytes, copier.block_bytes))
        if cache.disk_bytes:
            tiers.append(DiskTier(Path(cache.disk_path), cache.disk_bytes, copier.block_bytes, copier.layout))
    except (ValueError, OSError) as error:
        raise EngineError(f"a KV tier cannot be used: {error}") from error
    return lambda kv: Offload(kv, Mover(copier, tiers), tiers)


def build_encoder(model: EncoderModel, *, clock: Callable[[], float]) -> EncoderCore:
    """An embedding engine around a model that is loaded already."""
    spec = model.spec
    capabilities = Capabilities(
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
    return EncoderCore(model, capabilities, clock=clock)
