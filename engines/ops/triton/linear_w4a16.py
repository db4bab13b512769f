"""4-bit linear on CUDA: contract of `engines/ops/linear_w4a16.py`.

A persistent product (`matmul_tile.py`) that reads block_k / 2 bytes of weight a step. Their low and their high halves
are two runs of inputs (so the packing says), so a step is two products, one with each, and nothing is interleaved.
w = d q + m is made in float32, then rounded to the operand: float16 for float16 x, TF32 for bfloat16 (both 11
significant bits), three TF32 products for float32.
"""

from __future__ import annotations

import torch
import triton.language as tl

from engines.ops.linear_w4a16 import W4Weight
from engines.ops.triton.kernel import assert_rows, jit, launch_options
from engines.ops.triton.matmul_tile import (
    Strides,
    Tensors,
    config_of,
    load_x,
    num_tiles,
    persistent_grid,
    store_tile,
    tile_at,
)
from engines.ops.triton.tiles import MatmulTiles, matmul_tiles

# A step holds codes, d, m and both operands: wider tiles spill registers on sm_80.
INPUTS_A_STEP = 128
OUTPUTS_A_TILE = 64


@jit
def _w4a16_kernel(tensors: tl.tuple, strides: tl.tuple, num_rows: tl.tensor, config: tl.constexpr) -> None:
    total = num_tiles(num_rows, strides.num_outputs, config)
    half_group: tl.constexpr = config.group_size // 2
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = tile_at(index, num_rows, strides.num_outputs, config)
        acc = tl.zeros((config.block_m, config.block_n), tl.float32)
        for start in range(0, strides.depth // 2, config.block_k // 2):
            byte = start + tl.arange(0, config.block_k // 2)
            group = byte // half_group
            low_k = group * config.group_size + byte % half_group
            mask = (byte < strides.depth // 2)[:, None] & tile.column_inside[None, :]
            packed = tl.load(
                tensors.weight + tile.column[None, :] * strides.weight + byte[:, None], mask=mask, other=0
            ).to(tl.int32)
            if config.group_size % config.block_k == 0:  # a step lies in one group
                place = (tile.column * strides.scales + start // half_group)[None, :]
                scale_mask = tile.column_inside[None, :]
            else:
                place = tile.column[None, :] * strides.scales + group[:, None]
                scale_mask = mask
            d = tl.load(tensors.weight_scales + place, mask=scale_mask, other=0.0).to(tl.float32)
            m = tl.load(tensors.weight_offsets + place, mask=scale_mask, other=0.0).to(tl.float32)
            low = ((packed & 15).to(tl.float32) * d + m).to(config.operand)
            high = ((packed >> 4).to(tl.float32) * d + m).to(config.operand)
            x = load_x(tile, low_k, tensors, strides, config).to(config.operand)
            acc = tl.dot(x, low, acc=acc, input_precision=config.precision)
            x = load_x(tile, low_k + half_group, tensors, strides, config).to(config.operand)
            acc = tl.dot(x, high, acc=acc, input_precision=config.precision)
        store_tile(acc, tile, tensors, strides)


def triton_linear_w4a16(
    x: torch.Tensor, weight: W4Weight, bias: torch.Tensor | None = None, *, tiles: MatmulTiles | None = None
) -> torch.Tensor:
    """x [T, K] float32, float16 or bfloat16 -> [T, N] of its dtype, new memory."""
    assert_rows(x, weight.packed, weight.d, weight.m, bias)
    assert weight.d.stride() == weight.m.stride(), "d and m are laid out alike"
    rows, num_outputs, depth = int(x.shape[0]), int(weight.packed.shape[0]), weight.num_inputs
    operand = tl.float16 if x.dtype == torch.float16 else tl.float32
    tiles = tiles or matmul_tiles(torch.float16, num_outputs)._replace(
        block_n=OUTPUTS_A_TILE, block_k=INPUTS_A_STEP, num_stages=2
    )
    out = torch.empty((rows, num_outputs), dtype=x.dtype, device=x.device)
    if rows:
        _w4a16_kernel[persistent_grid(rows, num_outputs, tiles, x.device)](
            Tensors(x, weight.packed, out, bias, None, weight.d, weight.m),
            Strides(x.stride(0), weight.packed.stride(0), out.stride(0), weight.d.stride(0), num_outputs, depth),
            rows,
            config_of(
                tiles,
                operand,
                depth,
                precision="tf32x3" if x.dtype == torch.float32 else "tf32",
                group_size=weight.group_size,
            ),
            **launch_options(tiles.num_warps, tiles.num_stages),
        )
    return out
