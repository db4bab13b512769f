"""y = x W^T + b with float8_e4m3fn weights (one scale an output channel) and activations (one scale a row).

Contract: `quantize_rows_fp8(x [T, K] float)` -> (rows [T, K] float8_e4m3fn, scales [T] float32), scale = max|x| / 448,
clamped before the conversion, nearest even; `linear_fp8(rows, row_scales, weight [N, K] float8_e4m3fn, weight_scales
[N], bias [N] or None, dtype)` -> [T, N]: products summed in float32, times the product of the two scales, plus the
bias, rounded once to `dtype`. Row-local.

Source: Micikevicius et al., 2022, https://arxiv.org/abs/2209.05433.
Read next: `engines/ops/linear_w8a8.py`.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
# Keeps a row of zeros finite; far below any activation that matters.
SMALLEST_MAGNITUDE = 1e-30


def reference_quantize_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (rows [T, K] float8_e4m3fn, scales [T] float32); row * scale is near x."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1).clamp(min=SMALLEST_MAGNITUDE) / LARGEST
    return (wide / scales[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def reference_linear_fp8(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The definition, in double precision, rounded once at the end."""
    product = rows.float().double() @ weight.float().double().t()  # [T, N]
    out = product * (row_scales[:, None] * weight_scales[None, :]).double()
    return (out if bias is None else out + bias.double()).to(dtype)
