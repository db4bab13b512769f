"""y = x W^T + b in float32: the exact path.

Contract: `pack_float32(weight [N, K], bias [N] or None)` -> Float32Weight; `linear_float32(x [T, K], packed)` ->
[T, N]. A row's bits do not depend on the number of rows.

The CPU kernel is oneDNN's over a prepacked weight, because its rows are the same bits for every T, which
`torch.nn.functional.linear` (MKL) does not give: measured on AVX2, MKL differs at T <= 3, and at T = 5 on two threads.
Where torch was built without oneDNN the reference runs, and rows agree to about 1e-6 relative only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

# oneDNN chooses the weight's layout for a batch of about this size; any T may follow.
LAYOUT_BATCH = 16


@dataclass(frozen=True, slots=True)
class Float32Weight:
    """`packed` is in oneDNN's layout when `is_packed`, else [N, K]."""

    packed: torch.Tensor
    bias: torch.Tensor | None
    num_outputs: int
    is_packed: bool


def pack_float32(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Float32Weight:
    """weight [N, K] float32; it is copied into the packed layout."""
    num_outputs = int(weight.shape[0])
    if not torch.backends.mkldnn.enabled:
        return Float32Weight(weight, bias, num_outputs, is_packed=False)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LAYOUT_BATCH)
    return Float32Weight(packed, bias, num_outputs, is_packed=True)


def reference_linear_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The definition: x [T, K], weight [N, K] -> [T, N]."""
    return functional.linear(x, weight, bias)


def cpu_linear_float32(x: torch.Tensor, weight: Float32Weight) -> torch.Tensor:
    """x [T, K] float32 -> [T, N] float32, new memory."""
    if not weight.is_packed:
        return reference_linear_float32(x, weight.packed, weight.bias)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.packed, weight.bias, "none", [], "")
    return out
