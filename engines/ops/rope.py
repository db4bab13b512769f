"""Rotary positions in Hugging Face's form: the halves of a head rotate against each other.

Contract: `rope(x, cos, sin)`: x [T, N, D] float32 (N heads of any kind), cos and sin [T, D] float32 rows of
`rotary_tables`, the first half of `sin` already negated -> [T, N, D] float32, new memory. With x = (a, b), angles t:
y = (a cos t - b sin t, b cos t + a sin t). Row-local.

Source: Su et al., 2021, https://arxiv.org/abs/2104.09864. Read next: `engines/ops/rope_scaling.py`.
"""

from __future__ import annotations

import torch

from engines.config import RopeScaling
from engines.ops.rope_scaling import rotary_frequencies


def rotary_tables(
    max_positions: int, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of every position: two [max_positions, D] float32.

    Angles are float32 products as in Hugging Face's code, so that long positions round alike. Computed once for all
    positions: sin and cos round differently in vector and scalar code, and one table cannot disagree with itself.
    """
    frequencies, size = rotary_frequencies(head_dim, theta, scaling, max_positions)  # [D / 2]
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)  # [P, D / 2]
    cos, sin = angles.cos() * size, angles.sin() * size
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def reference_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The definition, on the two halves, in double precision, rounded once at the end."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].double(), x[..., half:].double()
    cos_t, sin_t = cos[:, None, half:].double(), sin[:, None, half:].double()
    return torch.cat((a * cos_t - b * sin_t, b * cos_t + a * sin_t), dim=-1).float()


def cpu_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Two products and a sum, never fused: every element then rounds alike wherever a cut between threads falls."""
    swapped = torch.roll(x, x.shape[-1] // 2, dims=-1)
    return torch.mul(x, cos[:, None]).add_(swapped.mul_(sin[:, None]))
