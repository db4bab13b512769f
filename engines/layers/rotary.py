"""Rotary tables of a model, and their rows for the tokens of one step.

Knows nothing of heads or of who rotates.

Read next: `engines/ops/rope.py`.
"""

from __future__ import annotations

import torch

from engines.config import RopeScaling
from engines.ops.rope import rotary_tables


class Rotary:
    """Tables for positions 0 .. max_positions - 1; 8 x D bytes a position."""

    def __init__(self, max_positions: int, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        """head_dim is even; `scaling` as `engines/ops/rope_scaling.py` has it."""
        self._cos, self._sin = rotary_tables(max_positions, head_dim, theta, scaling)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [T] integer -> cos and signed sin [T, D]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
