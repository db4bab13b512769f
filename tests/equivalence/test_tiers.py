"""Offloaded is resident: what comes back from memory or disk continues a text with the very bits of computing it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engines.config import CacheConfig, SchedulerConfig
from engines.core.build import build_decoder


@pytest.mark.parametrize("length", [100, 700])
def test_a_restarted_engine_continues_with_the_same_bits(lab, tmp_path: Path, length: int) -> None:
    prompt = lab.prompt(5, length)
    cache = CacheConfig(block_size=16, num_blocks=60, disk_path=str(tmp_path), disk_bytes=64 << 20)
    for start in ("cold", "from disk"):
        engine = build_decoder(lab.model, cache, SchedulerConfig(), clock=time.monotonic)
        answer = lab.ask(engine, [lab.request("me", prompt)])["me", 0]
        engine.close()
        assert answer.cached_tokens == (0 if start == "cold" else (length - 1) // 16 * 16)
        assert answer.bits() == lab.alone(prompt).bits(), start


def test_a_prefix_from_memory_is_the_computed_one(lab) -> None:
    """The pool is too small for both prompts; the second turn of the first comes from the tier."""
    first, other = lab.prompt(5, 150), lab.prompt(6, 150)
    cache = CacheConfig(block_size=16, num_blocks=14, dram_bytes=64 << 20)
    engine = build_decoder(lab.model, cache, SchedulerConfig(), clock=time.monotonic)
    lab.ask(engine, [lab.request("a", first)])
    engine.offload.settle(5.0)
    lab.ask(engine, [lab.request("b", other)])
    answer = lab.ask(engine, [lab.request("c", [*first, 20, 21, 22])])["c", 0]
    assert engine.offload.num_loaded_blocks >= 5
    assert answer.cached_tokens == 144
    assert answer.bits() == lab.alone([*first, 20, 21, 22]).bits()
    engine.close()
