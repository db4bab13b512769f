"""Tile sizes by shape: the tables that stand where other code tunes at run time.

A table may look at what a model fixes (heads, dimensions, number formats), never at what a batch brings (rows,
lengths): else a row's bits would follow its neighbours. All entries fit 99 KB of shared memory (sm_86, sm_89: the least
of the chips from sm_80 on), so that one table serves every chip; the tests compile each and read what it takes.

The numbers are reasoned, not measured: no GPU was at hand (`docs/kernels.md`). `tests/bench/gpu_kernels.py` measures.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engines.ops.triton.kernel import next_power_of_2


class AttentionTiles(NamedTuple):
    """One program does block_m (query row, head) pairs against tile_keys keys at a time.

    `segment_keys`: the fixed split of the keys (a multiple of tile_keys). Partial results are joined at these borders
    and at no others, split over programs or not.
    """

    block_m: int
    tile_keys: int
    segment_keys: int
    num_warps: int
    num_stages: int


class MatmulTiles(NamedTuple):
    """block_m x block_n results a program at a time, block_k deep; `group_m` tiles of rows share columns in the L2."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


def attention_tiles(repeats: int, head_dim: int, dtype: torch.dtype) -> AttentionTiles:
    """For `repeats` query heads a key/value head, queries of `dtype`.

    32 rows: a decode row of R = 4..8 heads fills part of them, which costs tensor-core time that decode, bound by
    memory, does not miss; a prefill tile re-reads keys from the L2 once for 32 rows.
    """
    block_m = max(32, next_power_of_2(repeats))
    tile_keys = 64 if head_dim <= 64 and dtype.itemsize == 2 else 32
    return AttentionTiles(block_m, tile_keys, segment_keys=256, num_warps=4, num_stages=2)


def matmul_tiles(operand: torch.dtype, num_outputs: int) -> MatmulTiles:
    """For operands of this type in shared memory; few outputs get narrow tiles, so that more programs share them.

    64 rows for every batch, one token included: a decode step leaves most of them empty, which costs tensor-core time
    that it, bound by memory, does not miss; a tile that followed the batch would make the row's bits follow it.
    """
    block_n = 128 if num_outputs >= 2048 else 64
    block_k = {1: 128, 2: 64, 4: 32}[operand.itemsize]
    return MatmulTiles(64, block_n, block_k, group_m=8, num_warps=4, num_stages=3)
