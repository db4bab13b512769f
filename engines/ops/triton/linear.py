"""Dense linear on CUDA: contract of `engines/ops/linear_fp32.py` (over [N, K] weights), float32, float16 or bfloat16.

A persistent product with fixed tiles (`matmul_tile.py`): no vendor library, and a row's bits do not depend on T.
float32 is split into three TF32 products (about 2e-6 relative), float16 multiplies as it is. bfloat16 is widened and
multiplied as TF32, which holds it exactly; `native_bf16` multiplies it as it is, at twice the rate, with the same
products and another order of sums within an instruction. It is off by default because the interpreter cannot check it.
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
    store_tile,
    tile_at,
)
from engines.ops.triton.tiles import MatmulTiles, matmul_tiles


@jit
def _linear_kernel(tensors: tl.tuple, strides: tl.tuple, num_rows: tl.tensor, config: tl.constexpr) -> None:
    total = num_tiles(num_rows, strides.num_outputs, config)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = tile_at(index, num_rows, strides.num_outputs, config)
        acc = tl.zeros((config.block_m, config.block_n), tl.float32)
        for start in range(0, strides.depth, config.block_k):
            k = start + tl.arange(0, config.block_k)
            x = load_x(tile, k, tensors, strides, config).to(config.operand)
            weight = load_weight(tile, k, tensors, strides, config).to(config.operand)
            acc = tl.dot(x, weight, acc=acc, input_precision=config.precision)
        store_tile(acc, tile, tensors, strides)


def triton_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    native_bf16: bool = False,
    tiles: MatmulTiles | None = None,
) -> torch.Tensor:
    """x [T, K], weight [N, K] of x's dtype, bias [N] or None -> [T, N] of x's dtype, new memory."""
    assert_rows(x, weight, bias)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    rows, (num_outputs, depth) = int(x.shape[0]), weight.shape
    is_wide = x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and not native_bf16)
    operand = tl.float32 if is_wide else tl.float16 if x.dtype == torch.float16 else tl.bfloat16
    precision = "tf32x3" if x.dtype == torch.float32 else "tf32"
    tiles = tiles or matmul_tiles(torch.float32 if is_wide else x.dtype, num_outputs)
    out = torch.empty((rows, num_outputs), dtype=x.dtype, device=x.device)
    if rows:
        _linear_kernel[persistent_grid(rows, num_outputs, tiles, x.device)](
            Tensors(x, weight, out, bias),
            Strides(x.stride(0), weight.stride(0), out.stride(0), 0, num_outputs, depth),
            rows,
            config_of(tiles, operand, depth, precision=precision),
            **launch_options(tiles.num_warps, tiles.num_stages),
        )
    return out
