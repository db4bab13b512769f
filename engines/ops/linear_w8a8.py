"""y = x W^T + b with int8 weights (one scale an output channel) and 8-bit activations (one scale a row).

Contract: `quantize_rows(x [T, K] float)` -> (rows [T, K] int8 within +-127, scales [T] float32), symmetric, nearest
even; `linear_w8a8(rows, row_scales, weight [N, K] int8, weight_scales [N] float32, bias [N] or None, dtype)` -> [T, N]:
the integer product is exact, then one float32 product of the two scales, times the sum, plus the bias, rounded once to
`dtype`. A row's bits depend on that row alone, by arithmetic and not by care: integer sums have no order.

Eight bits and not the seven of `engines/ops/linear_int8.py`: tensor cores add s8 x s8 in 32 bits and do not saturate
(K up to 133,000).

Source: Xiao et al., 2022, https://arxiv.org/abs/2211.10438 (W8A8 per token and channel).
"""

from __future__ import annotations

import torch

LEVELS = 127
# Keeps a row of zeros finite; far below any activation that matters.
SMALLEST_MAGNITUDE = 1e-30


def reference_quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] -> (rows [T, K] int8, scales [T] float32); row * scale is near x."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1).clamp(min=SMALLEST_MAGNITUDE) / LEVELS
    return torch.round(wide / scales[:, None]).clamp(-LEVELS, LEVELS).to(torch.int8), scales


def reference_linear_w8a8(
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """See the contract; integer products exact."""
    product = (rows.long() @ weight.t().long()).float()  # [T, N]
    out = product * (row_scales[:, None] * weight_scales[None, :])
    return (out if bias is None else out + bias.float()).to(dtype)
