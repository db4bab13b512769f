"""How many KV blocks this machine can hold, by formula; and what memory there is.

    bytes a block = 2 (K and V) x layers x key/value heads x block size x bytes of one token and head in the KV format

Knows nothing of what the blocks will hold. Read next: `engines/ops/kv_cache.py`, `engines/core/build.py`.
"""

from __future__ import annotations

from pathlib import Path

from engines.api import EngineError
from engines.config import CacheConfig
from engines.models.base import ModelSpec
from engines.ops.kv_format import FORMATS

DEFAULT_KV_SHARE = 0.25
DEFAULT_KV_LIMIT_BYTES = 2 << 30
UNKNOWN_MEMORY_BYTES = 8 << 30  # assumed where the system does not say
CGROUP = Path("/sys/fs/cgroup")


def num_kv_blocks(spec: ModelSpec, cache: CacheConfig) -> int:
    """The configured number, or what the configured bytes hold; by default a quarter of what is free, at most 2 GiB.

    Raises EngineError if fewer than two blocks result, or if the block size is no power of two.
    """
    size = cache.block_size
    if size < 1 or size & (size - 1):
        raise EngineError(f"block_size is {size}; it must be a power of two")
    block_bytes = size * kv_token_bytes(spec)
    budget_bytes = cache.memory_bytes or min(int(available_bytes() * DEFAULT_KV_SHARE), DEFAULT_KV_LIMIT_BYTES)
    num_blocks = cache.num_blocks or budget_bytes // block_bytes
    if num_blocks < 2:
        raise EngineError(f"the KV pool would hold {num_blocks} blocks of {block_bytes} bytes; at least 2 are needed")
    return num_blocks


def kv_token_bytes(spec: ModelSpec) -> int:
    """Bytes of one token's keys and values, scales included, over all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * FORMATS[spec.kv_dtype].row_bytes(spec.head_dim)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Memory that could be had now: what the kernel calls available, or less inside a container's limit."""
    known = (_kernel_available_bytes(meminfo), _cgroup_available_bytes(cgroup))
    return min((number for number in known if number is not None), default=UNKNOWN_MEMORY_BYTES)


def _kernel_available_bytes(meminfo: Path) -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return None


def _cgroup_available_bytes(cgroup: Path) -> int | None:
    """What is left below the limit of cgroup v2; file cache counts as used there, so this errs on the low side."""
    try:
        limit, used = (cgroup / "memory.max").read_text().strip(), (cgroup / "memory.current").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))
