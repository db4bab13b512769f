"""Blocks out of the cache and back: every byte, no neighbour's."""

from __future__ import annotations

import numpy as np
import torch

from engines.ops.kv_cache import KVCache
from engines.ops.kv_copy import BlockCopier


def cache(dtype: torch.dtype, seed: int) -> KVCache:
    shape = (3, 5, 2, 4, 8)
    k, v = (torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(seed + i)) for i in range(2))
    return KVCache(k=k.to(dtype), v=v.to(dtype))


def test_a_block_moves_whole_and_alone() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        source, target, before = cache(dtype, 1), cache(dtype, 7), cache(dtype, 7)
        read, write = BlockCopier(source), BlockCopier(target)
        assert read.block_bytes == 2 * 3 * 2 * 4 * 8 * dtype.itemsize
        buffer = np.zeros(read.block_bytes, dtype=np.uint8)
        read.read(2, buffer)
        write.write(4, buffer)
        for got, wanted, old in ((target.k, source.k, before.k), (target.v, source.v, before.v)):
            assert torch.equal(got[:, 4], wanted[:, 2])
            assert torch.equal(got[:, :4], old[:, :4])


def test_layouts_differ_where_bytes_would_mean_something_else() -> None:
    assert BlockCopier(cache(torch.float32, 1)).layout == "k:torch.float32:3x2x4x8;v:torch.float32:3x2x4x8"
    assert BlockCopier(cache(torch.int8, 1)).layout == "k:torch.int8:3x2x4x8;v:torch.int8:3x2x4x8"
