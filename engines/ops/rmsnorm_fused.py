"""Root-mean-square norm joined with what stands beside it: the residual sum before, int8 quantization after.

Contract, for x and residual [T, K], weight [K], rows of one float dtype:
`add_rms_norm(x, residual, weight, eps)` -> (normed [T, K], sum [T, K]) with sum = x + residual rounded to the dtype and
normed = rms_norm(sum): exactly what the two ops give one after the other.
`rms_norm_int8(x, residual or None, weight, eps)` -> (rows [T, K] int8, scales [T] float32, sum [T, K] or None):
the normed float32 row, not rounded to the dtype, quantized as in `engines/ops/linear_w8a8.py`.
Row-local. New memory.

Read next: `engines/ops/rmsnorm.py`, `engines/ops/linear_w8a8.py`.
"""

from __future__ import annotations

import torch

from engines.ops.linear_w8a8 import reference_quantize_rows
from engines.ops.rmsnorm import reference_rms_norm


def reference_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the contract."""
    total = (x.float() + residual.float()).to(x.dtype)
    return reference_rms_norm(total.float(), weight.float(), eps).to(x.dtype), total


def reference_rms_norm_int8(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See the contract."""
    total = None if residual is None else (x.float() + residual.float()).to(x.dtype)
    rows, scales = reference_quantize_rows(
        reference_rms_norm((x if total is None else total).float(), weight.float(), eps)
    )
    return rows, scales, total
