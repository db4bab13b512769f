"""Gated activation on CUDA: contract of `engines/ops/silu_mul.py`, for float32, float16 and bfloat16.

A program does one stretch of one row; every element stands alone. Memory-bound: 3 elements moved for each result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.triton.kernel import assert_rows, ceil_div, jit, launch_options, next_power_of_2, row_warps

LARGEST_BLOCK = 2048


class _Tensors(NamedTuple):
    gate_up: torch.Tensor  # [T, 2 I]
    out: torch.Tensor  # [T, I]


class _Strides(NamedTuple):
    gate_up: int
    out: int
    width: int


@jit
def _silu_mul_kernel(tensors: tl.tuple, strides: tl.tuple, block: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < strides.width
    base = tensors.gate_up + row * strides.gate_up
    gate = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(base + strides.width + column, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(tensors.out + row * strides.out + column, y.to(tensors.out.dtype.element_ty), mask=inside)


def triton_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 I] -> [T, I] of its dtype, new memory."""
    assert_rows(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(LARGEST_BLOCK, next_power_of_2(width))
    if rows:
        _silu_mul_kernel[(rows, ceil_div(width, block))](
            _Tensors(gate_up, out),
            _Strides(gate_up.stride(0), out.stride(0), width),
            block,
            **launch_options(row_warps(block)),
        )
    return out
