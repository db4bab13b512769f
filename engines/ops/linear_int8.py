"""y = x W^T + b with int8 weights (one scale a row of W) and 7-bit activations (one scale a row of x).

Contract: `quantize_rows(weight [N, K] float32)` -> (rows [N, K] int8, scales [N] float32); `pack_int8(rows, scales,
bias)` -> Int8Weight; `linear_int8(x [T, K] float32, packed)` -> [T, N] float32, new memory; `linear_int8_fine` is the
same with 14-bit activations. A row's bits depend on that row alone.

The product runs in FBGEMM through torch's `quantized` operators. Their dynamic form takes one scale for all of x, so a
neighbour would change a row; therefore each row is divided by its largest magnitude first, the static form runs with
the scale 1/63 and zero point 64, and the row is scaled back. Seven bits and not eight: FBGEMM's AVX2 kernel adds pairs
of u8 x s8 products in 16 bits, and 2 x 127 x 127 still fits where 2 x 255 x 127 saturates.

The fine form is for activations with outliers: what 7 bits leave of a row is a second row, scaled up by 126, and the
two products are added. One call of twice the rows: free for a few tokens (memory-bound), twice the work for many.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

ACTIVATION_LEVELS = 63
ACTIVATION_ZERO_POINT = 64
WEIGHT_LEVELS = 127
# Keeps a row of zeros finite; far below any activation that matters.
SMALLEST_MAGNITUDE = 1e-30


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """`packed` is FBGEMM's own object: weight and scales. The bias is added after a row is scaled back."""

    packed: Any
    bias: torch.Tensor | None
    num_outputs: int


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric, nearest: weight [N, K] float32 -> (rows [N, K] int8 within +-127, scales [N] float32)."""
    scales = weight.abs().amax(dim=1).clamp_(min=SMALLEST_MAGNITUDE).div_(WEIGHT_LEVELS)
    rows = torch.round(weight / scales[:, None]).clamp_(-WEIGHT_LEVELS, WEIGHT_LEVELS).to(torch.int8)
    return rows, scales


def pack_int8(rows: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Weight:
    """rows [N, K] int8 and scales [N] float32 are copied into FBGEMM's layout; bias [N] float32 is kept."""
    num_outputs = int(rows.shape[0])
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        # torch deprecates quantized tensors (not this operator); the version of torch is pinned.
        warnings.simplefilter("ignore", UserWarning)
        zero_points = torch.zeros(num_outputs, dtype=torch.int64)
        weight = torch._make_per_channel_quantized_tensor(rows.contiguous(), scales.double(), zero_points, 0)
    try:
        torch.backends.quantized.engine = "fbgemm"
        packed = torch.ops.quantized.linear_prepack(weight, None)
    finally:
        torch.backends.quantized.engine = engine
    return Int8Weight(packed, bias, num_outputs)


def reference_linear_int8(
    x: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None, *, fine: bool = False
) -> torch.Tensor:
    """The same quantization written out, integer products exact."""
    magnitude = x.abs().amax(dim=-1, keepdim=True).clamp_(min=SMALLEST_MAGNITUDE)
    levels = x / magnitude * ACTIVATION_LEVELS
    whole = torch.round(levels)
    product = (whole.long() @ rows.t().long()).double()  # [T, N]
    if fine:
        rest = torch.round((levels - whole) * 2 * ACTIVATION_LEVELS)
        product += (rest.long() @ rows.t().long()).double() / (2 * ACTIVATION_LEVELS)
    out = (product * scales.double() / ACTIVATION_LEVELS * magnitude.double()).float()
    return out if bias is None else out + bias


def cpu_linear_int8(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """x [T, K] float32 -> [T, N] float32."""
    magnitude = x.abs().amax(dim=-1, keepdim=True).clamp_(min=SMALLEST_MAGNITUDE)  # [T, 1]
    out = _product(torch.div(x, magnitude), 1.0 / ACTIVATION_LEVELS, weight).mul_(magnitude)
    return out if weight.bias is None else out.add_(weight.bias)


def cpu_linear_int8_fine(x: torch.Tensor, weight: Int8Weight) -> torch.Tensor:
    """x [T, K] float32 -> [T, N] float32; 14-bit activations as two 7-bit rows."""
    num_rows = x.shape[0]
    magnitude = x.abs().amax(dim=-1, keepdim=True).clamp_(min=SMALLEST_MAGNITUDE)  # [T, 1]
    level = magnitude.div_(ACTIVATION_LEVELS)
    both = x.new_empty(2 * num_rows, x.shape[1])
    whole, rest = both[:num_rows], both[num_rows:]
    torch.div(x, level, out=rest)
    torch.round(rest, out=whole)
    rest.sub_(whole).mul_(2 * ACTIVATION_LEVELS)  # half a level at most, scaled up
    products = _product(both, 1.0, weight)
    out = products[num_rows:].div_(2 * ACTIVATION_LEVELS).add_(products[:num_rows]).mul_(level)
    return out if weight.bias is None else out.add_(weight.bias)


def _product(x: torch.Tensor, level: float, weight: Int8Weight) -> torch.Tensor:
    """x [T, K] within +-63 levels -> [T, N] without bias."""
    out: torch.Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        x, level, ACTIVATION_ZERO_POINT, weight.packed
    )
    return out
