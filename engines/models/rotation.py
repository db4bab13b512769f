"""Fold an orthogonal rotation of the residual stream into a Llama-family model's weights: same function, no outliers.

A few columns of a trained model's activations are tens of times larger than the rest, so that a row quantized to 7 bits
keeps little of the others. Rotated by a Hadamard-like matrix Q every column carries a share of every other and the
largest entry falls to about 3.4 standard deviations. RMSNorm commutes with Q once its weight is folded into the next
projection, so Q costs nothing at run time: E' = E Q; W' = W diag(norm) Q for what reads the stream, W' = Q^T W for what
writes it. Measured on SmolLM2-135M with 7-bit activations: see `docs/engine.md` or run `facet eval kld`.

Q = diag(signs) (D (x) H): H a Hadamard matrix of the largest power of two in the width, D the orthonormal DCT of the
odd rest; it is applied factor by factor. Knows nothing of number formats.

Source: QuaRot, Ashkboos et al., 2024, https://arxiv.org/abs/2404.00456.
Read next: `engines/models/packing.py`.
"""

from __future__ import annotations

import math

import torch

# Hadamard factors of at most this order: two small products instead of one large.
LARGEST_FACTOR = 64
SIGN_SEED = 20240330


class Rotation:
    """The matrix Q [K, K], kept as factors, float32."""

    def __init__(self, width: int) -> None:
        """Any width of at least 1; the same width always gives the same matrix."""
        power = width & -width
        factors = [_dct(width // power), *_hadamard_factors(power)]
        self._factors = [factor.float() for factor in factors if factor.shape[0] > 1]
        generator = torch.Generator().manual_seed(SIGN_SEED)
        self._signs = torch.randint(0, 2, (width,), generator=generator).mul_(2).sub_(1).float()

    def columns(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [..., K] float32 -> weight Q: for matrices that read the stream, for embeddings and for biases."""
        x, after = weight * self._signs, 1
        for factor in reversed(self._factors):
            size = factor.shape[0]
            x = x.reshape(-1, size, after)  # the factor acts on the middle axis
            x = (x.squeeze(2) @ factor) if after == 1 else torch.matmul(factor.t(), x)
            after *= size
        return x.reshape(weight.shape)

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [K, N] float32 -> Q^T weight: for matrices that write the stream."""
        return self.columns(weight.t()).t().contiguous()


def _hadamard_factors(power: int) -> list[torch.Tensor]:
    factors, left = [], power
    while left > 1:
        size = min(left, LARGEST_FACTOR)
        factors.append(_hadamard(size))
        left //= size
    return factors


def _hadamard(size: int) -> torch.Tensor:
    """Orthonormal Sylvester matrix of a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1))) / math.sqrt(2.0)
    return matrix


def _dct(size: int) -> torch.Tensor:
    """Orthonormal DCT-II matrix."""
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(torch.outer(2 * index + 1, index) * (math.pi / (2 * size))) * math.sqrt(2.0 / size)
    matrix[:, 0] /= math.sqrt(2.0)
    return matrix
