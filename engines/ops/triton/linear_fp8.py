"""e4m3 linear on CUDA: contract of `engines/ops/linear_fp8.py`.

A persistent product (`matmul_tile.py`). Chips from sm_89 on multiply e4m3 as it is; sums are promoted to float32 after
each tile of K, because sm_90 keeps fewer bits within an instruction. On sm_80 bytes become float16, which holds every
e4m3 value, and multiply as such: same products, same results up to the order of sums. Row-local.
"""

from __future__ import annotations

import torch
import triton.language as tl

from engines.ops.triton.kernel import as_bytes, assert_rows, jit, launch_options
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
from engines.ops.triton.numeric import from_e4m3
from engines.ops.triton.tiles import matmul_tiles

FIRST_NATIVE_CAPABILITY = (8, 9)


@jit
def _fp8_kernel(tensors: tl.tuple, strides: tl.tuple, num_rows: tl.tensor, config: tl.constexpr) -> None:
    total = num_tiles(num_rows, strides.num_outputs, config)
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = tile_at(index, num_rows, strides.num_outputs, config)
        acc = tl.zeros((config.block_m, config.block_n), tl.float32)
        for start in range(0, strides.depth, config.block_k):
            k = start + tl.arange(0, config.block_k)
            x = load_x(tile, k, tensors, strides, config)
            weight = load_weight(tile, k, tensors, strides, config)
            if config.operand == tl.float16:
                acc = tl.dot(from_e4m3(x).to(tl.float16), from_e4m3(weight).to(tl.float16), acc=acc)
            else:
                x, weight = x.to(config.operand, bitcast=True), weight.to(config.operand, bitcast=True)
                acc = tl.dot(x, weight, acc=acc, max_num_imprecise_acc=config.block_k)
        store_tile(scaled(acc, tile, tensors), tile, tensors, strides)


def is_native(device: torch.device) -> bool:
    """True if the chip multiplies e4m3."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_NATIVE_CAPABILITY


def triton_linear_fp8(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    native: bool | None = None,
) -> torch.Tensor:
    """rows [T, K] and weight [N, K] float8_e4m3fn, scales [T] and [N] float32 -> [T, N] of `dtype`, new memory.

    `native` None: as the device allows.
    """
    assert_rows(rows, weight, bias)
    num_rows, (num_outputs, depth) = int(rows.shape[0]), weight.shape
    native = is_native(rows.device) if native is None else native
    tiles = matmul_tiles(torch.float8_e4m3fn if native else torch.float16, num_outputs)
    out = torch.empty((num_rows, num_outputs), dtype=dtype, device=rows.device)
    if num_rows:
        _fp8_kernel[persistent_grid(num_rows, num_outputs, tiles, rows.device)](
            Tensors(as_bytes(rows), as_bytes(weight), out, bias, row_scales, weight_scales),
            Strides(rows.stride(0), weight.stride(0), out.stride(0), 0, num_outputs, depth),
            num_rows,
            config_of(tiles, tl.float8e4nv if native else tl.float16, depth),
            **launch_options(tiles.num_warps, tiles.num_stages),
        )
    return out
