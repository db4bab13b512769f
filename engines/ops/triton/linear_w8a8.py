"""int8 linear on CUDA: contract of `engines/ops/linear_w8a8.py`.

A persistent product (`matmul_tile.py`) of int8 tiles summed in int32: exact, so a row cannot depend on its neighbours.
Rows come quantized, from `triton_quantize_rows` or `triton_rms_norm_int8`.
"""

from __future__ import annotations

import torch
import triton.language as tl

from engines.ops.triton.kernel import assert_rows, jit, launch_options
from engines.ops.triton.matmul_tile import (
    Strides,
    Tensors,
    config_of,
    load_weight,
    load_x,
    num_tiles,
    persistent_grid,
    scaled,
    store_tile,
    tile_at,
)
from engines.ops.triton.tiles import matmul_tiles


@jit
def _w8a8_kernel(tensors: tl.tuple, strides: tl.tuple, num_rows: tl.tensor, config: tl.constexpr) -> None:
    total = num_tiles(num_rows, strides.num_outputs, config)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = tile_at(index, num_rows, strides.num_outputs, config)
        acc = tl.zeros((config.block_m, config.block_n), tl.int32)
        for start in range(0, strides.depth, config.block_k):
            k = start + tl.arange(0, config.block_k)
            x = load_x(tile, k, tensors, strides, config)
            acc = tl.dot(x, load_weight(tile, k, tensors, strides, config), acc=acc, out_dtype=tl.int32)
        store_tile(scaled(acc.to(tl.float32), tile, tensors), tile, tensors, strides)


def triton_linear_w8a8(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """rows [T, K] and weight [N, K] int8, scales [T] and [N] float32 -> [T, N] of `dtype`, new memory."""
    assert_rows(rows, weight, bias)
    num_rows, (num_outputs, depth) = int(rows.shape[0]), weight.shape
    tiles = matmul_tiles(torch.int8, num_outputs)
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=rows.device)
    if num_rows:
        _w8a8_kernel[persistent_grid(num_rows, num_outputs, tiles, rows.device)](
            Tensors(rows, weight, out, bias, row_scales, weight_scales),
            Strides(rows.stride(0), weight.stride(0), out.stride(0), 0, num_outputs, depth),
            num_rows,
            config_of(tiles, tl.int8, depth),
            **launch_options(tiles.num_warps, tiles.num_stages),
        )
    return out
