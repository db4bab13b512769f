"""Configuration of an engine: one frozen Struct a component; no component gets the whole.

Knows nothing of policies or the environment: the gateway's settings and policy become these values in `gateway/app.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal["auto", "float32", "int8", "native", "q8", "q4", "w8a8"]
KVDType = Literal["float32", "bfloat16", "int8", "float8", "int4"]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: an unknown field is an error."""


class RopeScaling(Config, frozen=True, kw_only=True):
    """How rotary positions reach beyond the trained context (`engines/ops/rope_scaling.py` has the formulas).

    `factor`: how many times longer. `original_max_positions`: the trained length; 0 is the checkpoint's own.
    `attention_factor` (yarn): 0 is the paper's. `factors` (kind "factors"): one a pair of dimensions, from a GGUF file.
    """

    kind: Literal["linear", "dynamic", "yarn", "llama3", "factors"]
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: tuple[float, ...] = ()


class ModelConfig(Config, frozen=True, kw_only=True):
    """Which weights, in which number format.

    `path`: a .gguf file, or a folder with config.json + *.safetensors. `cache_dir`: where packed weights are kept
    (empty: no cache). `dtype`: "float32" is exact; "int8" is per-row W8A8 through torch's FBGEMM; "native" runs the
    checkpoint's own bits through the compiled kernels; "q8", "q4" and "w8a8" quantize its floats anew for them
    (`engines/models/requantize.py`); "auto" is "native" where it can run, else "int8".
    `kv_dtype`: of keys and values (`engines/ops/kv_format.py`).
    `max_model_len` 0 is the checkpoint's own. `rope_scaling` replaces the checkpoint's; 0 is then all it reaches.
    """

    name: str
    path: str
    cache_dir: str = ""
    dtype: DType = "auto"
    kv_dtype: KVDType = "float32"
    max_model_len: int = 0
    rope_scaling: RopeScaling | None = None
    num_threads: int = 0


class CacheConfig(Config, frozen=True, kw_only=True):
    """The KV pool and the tiers below it.

    `num_blocks` 0: computed from `memory_bytes` (0: 25 % of what is free, at most 2 GiB). `dram_bytes`, `disk_bytes`:
    most that each tier takes (0: no such tier); `disk_path`: its folder, where a restarted worker finds its blocks.
    """

    block_size: int = 16
    num_blocks: int = 0
    memory_bytes: int = 0
    prefix_cache: bool = True
    event_buffer: int = 10_000
    dram_bytes: int = 0
    disk_path: str = ""
    disk_bytes: int = 0


class SchedulerConfig(Config, frozen=True, kw_only=True):
    """`max_batch_tokens`: the token budget of a step. `chunk_tokens`: most prompt tokens of one request a step.

    `queue`: in which order waiting requests are admitted (`engines/core/queues.py`).
    """

    max_batch_tokens: int = 512
    chunk_tokens: int = 512
    max_running: int = 64
    max_waiting: int = 1024
    queue: Literal["fcfs", "priority"] = "priority"


class EngineConfig(Config, frozen=True, kw_only=True):
    """What a worker process is started with (as JSON)."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
