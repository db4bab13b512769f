"""The size of the KV pool is arithmetic over what the system says."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.api import EngineError
from engines.config import CacheConfig
from engines.core.memory import UNKNOWN_MEMORY_BYTES, available_bytes, num_kv_blocks
from engines.models.base import ModelSpec

SPEC = ModelSpec(
    name="m",
    architecture="llama",
    task="generate",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=100,
    max_model_len=8192,
    rms_norm_eps=1e-5,
)
BLOCK_BYTES = 2 * 4 * 30 * 3 * 16 * 64


def test_blocks_are_bytes_over_bytes_a_block() -> None:
    assert num_kv_blocks(SPEC, CacheConfig(memory_bytes=10 * BLOCK_BYTES)) == 10
    assert num_kv_blocks(SPEC, CacheConfig(memory_bytes=11 * BLOCK_BYTES - 1)) == 10
    assert num_kv_blocks(SPEC, CacheConfig(memory_bytes=10 * BLOCK_BYTES, block_size=32)) == 5


def test_a_configured_number_wins() -> None:
    assert num_kv_blocks(SPEC, CacheConfig(num_blocks=7, memory_bytes=10 * BLOCK_BYTES)) == 7


def test_the_default_is_at_most_two_gibibytes() -> None:
    assert 2 <= num_kv_blocks(SPEC, CacheConfig()) <= (2 << 30) // BLOCK_BYTES


@pytest.mark.parametrize("cache", [CacheConfig(memory_bytes=BLOCK_BYTES), CacheConfig(num_blocks=1)])
def test_fewer_than_two_blocks_are_refused(cache: CacheConfig) -> None:
    with pytest.raises(EngineError, match="would hold 1 blocks"):
        num_kv_blocks(SPEC, cache)


@pytest.mark.parametrize("block_size", [0, -16, 12])
def test_a_block_size_is_a_power_of_two(block_size: int) -> None:
    with pytest.raises(EngineError, match=f"block_size is {block_size}; it must be a power of two"):
        num_kv_blocks(SPEC, CacheConfig(block_size=block_size, num_blocks=9))


def test_what_is_available_is_the_least_anybody_says(tmp_path: Path) -> None:
    meminfo, nowhere = tmp_path / "meminfo", tmp_path / "nowhere"
    meminfo.write_text("MemTotal:       24000000 kB\nMemAvailable:    1000 kB\n")
    (tmp_path / "memory.max").write_text("900000\n")
    (tmp_path / "memory.current").write_text("100000\n")
    assert available_bytes(meminfo, nowhere) == 1_024_000
    assert available_bytes(meminfo, tmp_path) == 800_000
    assert available_bytes(nowhere, tmp_path) == 800_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, tmp_path) == 1_024_000
    assert available_bytes(nowhere, nowhere) == UNKNOWN_MEMORY_BYTES
    (tmp_path / "memory.max").write_text("5\n")
    assert available_bytes(meminfo, tmp_path) == 0
