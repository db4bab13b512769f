"""Root-mean-square norm of rows.

Contract: `rms_norm(x, weight, eps)`: x [T, K] float32, weight [K] float32 -> [T, K] float32, new memory;
y = x / sqrt(mean(x^2) + eps) * weight. Row-local: a row's bits do not depend on the other rows.

Source: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467.
"""

from __future__ import annotations

import torch


def reference_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition, in double precision, rounded once at the end."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).float()


def cpu_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Float32; each operation rounds alike in its vector and its scalar form, so cuts between threads do not show."""
    scale = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()  # [T, 1]
    return torch.mul(x, scale).mul_(weight)
