"""Rows to int8 or e4m3 with one scale a row, on CUDA: `quantize_rows` of `engines/ops/linear_w8a8.py` and
`quantize_rows_fp8` of `engines/ops/linear_fp8.py`.

A program does one whole row in registers. e4m3 is written as bytes (`engines/ops/triton/numeric.py`). Row-local.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.linear_fp8 import LARGEST
from engines.ops.linear_w8a8 import LEVELS, SMALLEST_MAGNITUDE
from engines.ops.triton.kernel import as_bytes, assert_rows, jit, launch_options, next_power_of_2, row_warps
from engines.ops.triton.numeric import round_half_even, to_e4m3
from engines.ops.triton.rmsnorm import WIDEST_ROW


class _Tensors(NamedTuple):
    x: torch.Tensor  # [T, K]
    out: torch.Tensor  # [T, K] int8 or bytes
    scales: torch.Tensor  # [T]


class _Strides(NamedTuple):
    x: int
    out: int


class _Config(NamedTuple):
    width: int
    block: int
    levels: float
    smallest: float


@jit
def _quantize_kernel(tensors: tl.tuple, strides: tl.tuple, config: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, config.block)
    inside = column < config.width
    x = tl.load(tensors.x + row * strides.x + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), config.smallest) / config.levels
    tl.store(tensors.scales + row, scale)
    y = x / scale
    target = tensors.out + row * strides.out + column
    if tensors.out.dtype.element_ty == tl.int8:
        tl.store(target, round_half_even(y).to(tl.int8), mask=inside)
    else:
        tl.store(target, to_e4m3(y), mask=inside)


def triton_quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (rows [T, K] int8, scales [T] float32), new memory."""
    return _quantize(x, torch.int8, float(LEVELS))


def triton_quantize_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (rows [T, K] float8_e4m3fn, scales [T] float32), new memory."""
    return _quantize(x, torch.float8_e4m3fn, LARGEST)


def _quantize(x: torch.Tensor, dtype: torch.dtype, levels: float) -> tuple[torch.Tensor, torch.Tensor]:
    assert_rows(x)
    rows, width = x.shape
    assert width <= WIDEST_ROW, width
    out = torch.empty((rows, width), dtype=dtype, device=x.device)
    scales = torch.empty((rows,), dtype=torch.float32, device=x.device)
    config = _Config(width, next_power_of_2(width), levels, SMALLEST_MAGNITUDE)
    if rows:
        _quantize_kernel[(rows,)](
            _Tensors(x, as_bytes(out), scales),
            _Strides(x.stride(0), out.stride(0)),
            config,
            **launch_options(row_warps(config.block)),
        )
    return out, scales
