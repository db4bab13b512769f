"""RMSNorm on CUDA: contracts of `engines/ops/rmsnorm.py` and `engines/ops/rmsnorm_fused.py`.

A program does one whole row in registers: one read of x (and residual), one write. The sum of squares of a row is one
reduction of one fixed shape, so a row's bits do not depend on the other rows. float32, float16 and bfloat16 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.linear_w8a8 import LEVELS, SMALLEST_MAGNITUDE
from engines.ops.triton.kernel import assert_rows, jit, launch_options, next_power_of_2, row_warps
from engines.ops.triton.numeric import round_half_even

# A row is held in registers: 16 warps x 32 threads x 64 values.
WIDEST_ROW = 32768


class _Tensors(NamedTuple):
    x: torch.Tensor  # [T, K]
    residual: torch.Tensor | None  # [T, K]
    weight: torch.Tensor  # [K]
    total: torch.Tensor | None  # [T, K], x + residual
    out: torch.Tensor  # [T, K], of x's dtype or int8
    scales: torch.Tensor | None  # [T], of an int8 `out`


class _Strides(NamedTuple):
    x: int
    residual: int
    total: int
    out: int


class _Config(NamedTuple):
    width: int
    block: int
    levels: float
    smallest: float


@jit
def _rms_norm_kernel(tensors: tl.tuple, strides: tl.tuple, eps: tl.tensor, config: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, config.block)
    inside = column < config.width
    x = tl.load(tensors.x + row * strides.x + column, mask=inside, other=0.0).to(tl.float32)
    if tensors.residual is not None:
        x += tl.load(tensors.residual + row * strides.residual + column, mask=inside, other=0.0).to(tl.float32)
        # Normed is what is stored, so that fused and unfused agree to the bit.
        rounded = x.to(tensors.total.dtype.element_ty)
        tl.store(tensors.total + row * strides.total + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(tensors.weight + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, axis=0) / config.width
    y = x * tl.rsqrt(mean + eps) * weight
    out = tensors.out + row * strides.out + column
    if tensors.scales is not None:
        scale = tl.maximum(tl.max(tl.abs(y), axis=0), config.smallest) / config.levels
        tl.store(tensors.scales + row, scale)
        tl.store(out, round_half_even(y / scale).to(tl.int8), mask=inside)
    else:
        tl.store(out, y.to(tensors.out.dtype.element_ty), mask=inside)


def triton_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, K], weight [K] -> [T, K] of x's dtype, new memory."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_Tensors(x, None, weight, None, out, None), eps)
    return out


def triton_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and residual [T, K], weight [K] -> (normed, x + residual), both [T, K] of x's dtype, new memory."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_Tensors(x, residual, weight, total, out, None), eps)
    return out, total


def triton_rms_norm_int8(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """-> (rows [T, K] int8, scales [T] float32, x + residual [T, K] or None), new memory."""
    rows = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[:1], dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_Tensors(x, residual, weight, total, rows, scales), eps)
    return rows, scales, total


def _launch(tensors: _Tensors, eps: float) -> None:
    assert_rows(tensors.x, tensors.residual, tensors.weight)
    tokens, width = tensors.x.shape
    assert width <= WIDEST_ROW, width
    strides = _Strides(
        tensors.x.stride(0),
        0 if tensors.residual is None else tensors.residual.stride(0),
        0 if tensors.total is None else tensors.total.stride(0),
        tensors.out.stride(0),
    )
    config = _Config(width, next_power_of_2(width), float(LEVELS), SMALLEST_MAGNITUDE)
    if tokens:
        _rms_norm_kernel[(tokens,)](tensors, strides, eps, config, **launch_options(row_warps(config.block)))
