"""Rotary frequencies of contexts beyond the trained one: linear, dynamic NTK, YaRN, Llama 3, and a file's own factors.

Contract: `rotary_frequencies(head_dim, theta, scaling, max_positions)` -> ([D / 2] float32 radians a position, factor
of cos and sin). Formulas and their float32 roundings are those of Hugging Face's code. "dynamic" there takes a new base
whenever a sequence outgrows the longest seen, so that old keys keep an old base; here the base is that of
`max_positions`, once: an angle then follows from the position alone, which prefix reuse and chunking need. The two
agree for a sequence of `max_positions` tokens, and for any sequence if `max_positions` is within the trained length.

Sources: linear, Chen et al., 2023, https://arxiv.org/abs/2306.15595; YaRN (and NTK), Peng et al., 2023,
https://arxiv.org/abs/2309.00071. Read next: `engines/ops/rope.py`, `engines/models/positions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from engines.config import RopeScaling


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, max_positions: int
) -> tuple[torch.Tensor, float]:
    """See the contract. `scaling.original_max_positions` is set."""
    if scaling is None:
        return plain_frequencies(head_dim, theta), 1.0
    if scaling.kind == "dynamic":
        return dynamic(head_dim, theta, scaling, max_positions), 1.0
    attention_factor = yarn_attention_factor(scaling) if scaling.kind == "yarn" else 1.0
    return SCALINGS[scaling.kind](head_dim, theta, scaling), attention_factor


def plain_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """theta ^ (-2 i / D) of each pair i: [D / 2]."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


def dynamic(head_dim: int, theta: float, scaling: RopeScaling, max_positions: int) -> torch.Tensor:
    """A larger base, such that the slowest pair turns over `max_positions` as it did over the trained length."""
    length = max(max_positions, scaling.original_max_positions)
    stretch = scaling.factor * length / scaling.original_max_positions - (scaling.factor - 1)
    return plain_frequencies(head_dim, theta * stretch ** (head_dim / (head_dim - 2)))


def linear(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Positions divided by the factor."""
    return plain_frequencies(head_dim, theta) / scaling.factor


def yarn(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Fast pairs stay, slow ones are interpolated, a ramp between the two."""

    def pair_of(rotations: float) -> float:
        """Which pair turns so often over the trained length."""
        turns = scaling.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kept = 1 - ramp
    return (1.0 / (scaling.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """What sharpens attention over the longer context; the checkpoint may say it itself."""
    if scaling.attention_factor:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def llama3(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Long waves divided by the factor, short ones kept, a blend between."""
    plain = plain_frequencies(head_dim, theta)
    trained, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    slowed = torch.where(wavelengths > trained / low, plain / scaling.factor, plain)
    smooth = (trained / wavelengths - low) / (high - low)
    blended = (1 - smooth) * slowed / scaling.factor + smooth * slowed
    between = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return torch.where(between, blended, slowed)


def factors(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Each pair's frequency divided by its own factor (GGUF's tensor `rope_freqs`)."""
    return plain_frequencies(head_dim, theta) / torch.tensor(scaling.factors, dtype=torch.float32)


SCALINGS: dict[str, Callable[[int, float, RopeScaling], torch.Tensor]] = {
    "linear": linear,
    "yarn": yarn,
    "llama3": llama3,
    "factors": factors,
}
