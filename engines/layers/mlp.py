"""The gated MLP of a decoder layer: down(silu(gate(x)) * up(x)), gate and up as one projection.

Read next: `engines/ops/silu_mul.py`.
"""

from __future__ import annotations

import torch

from engines.layers.linear import Linear
from engines.ops.dispatch import Ops


class GatedMLP:
    """x [T, K] -> [T, K]."""

    def __init__(self, gate_up: Linear, down: Linear, ops: Ops) -> None:
        """`gate_up` gives gate and up side by side: 2 I columns."""
        self._gate_up = gate_up
        self._down = down
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return self._down(self._ops.silu_mul(self._gate_up(x)))
