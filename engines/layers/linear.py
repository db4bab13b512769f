"""A linear projection in the number format its weights are packed in.

Packed tensors of a projection `p` are `p.weight` [N, K] float32, or `p.rows` [N, K] int8 with `p.scales` [N] float32,
or `p.fine_rows` and `p.scales` where the activations need 14 bits; `p.bias` [N] float32 is optional. Knows nothing of
where it stands in a model.

Read next: `engines/ops/linear_int8.py`, `engines/models/packing.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from engines.ops.linear_fp32 import cpu_linear_float32, pack_float32
from engines.ops.linear_int8 import cpu_linear_int8, cpu_linear_int8_fine, pack_int8


class Linear(Protocol):
    """x [T, K] float32 -> [T, N] float32, new memory; a row's bits depend on that row alone."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Project."""
        ...


class Float32Linear:
    """Exact."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [N, K] is copied into the kernel's layout."""
        self._packed = pack_float32(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return cpu_linear_float32(x, self._packed)


class Int8Linear:
    """Eight-bit weights; activations of seven bits, or fourteen if `fine`."""

    def __init__(self, rows: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, fine: bool) -> None:
        """rows [N, K] int8 and scales [N] are copied into the kernel's layout."""
        self._packed = pack_int8(rows, scales, bias)
        self._product = cpu_linear_int8_fine if fine else cpu_linear_int8

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear`."""
        return self._product(x, self._packed)


def build_linear(tensors: Mapping[str, torch.Tensor], name: str) -> Linear:
    """The projection `name`, in whichever format `tensors` holds it."""
    bias = tensors.get(f"{name}.bias")
    for part, fine in (("rows", False), ("fine_rows", True)):
        if f"{name}.{part}" in tensors:
            return Int8Linear(tensors[f"{name}.{part}"], tensors[f"{name}.scales"], bias, fine=fine)
    return Float32Linear(tensors[f"{name}.weight"], bias)
