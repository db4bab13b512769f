"""y = x W^T + b with 4-bit weights in groups along K, activations as they come.

Letters: T rows, K inputs, N outputs, g group size (even, divides K; 32 and 128 are the usual ones).

Contract: `quantize_groups_w4(weight [N, K], g)` -> W4Weight; `linear_w4a16(x [T, K] float, packed, bias [N] or None)`
-> [T, N] of x's dtype, new memory: w = d q + m, with q in 0..15 and d, m of its group, products summed in float32. A
row's bits depend on that row alone.

`packed` [N, K / 2] uint8: byte j of a group (j < g / 2) holds value j in its low half and value j + g / 2 in its high
half, so that the halves of a run of bytes are two runs of values. At g = 32 this is the order of GGUF's Q4_0 and Q4_1,
whose bits go in as they are (Q4_0: m = -8 d). AWQ and GPTQ store w = d (q - z): m = -d z; their nibbles are repacked
once, at load.

Source: Frantar et al., 2022, https://arxiv.org/abs/2210.17323; Lin et al., 2023, https://arxiv.org/abs/2306.00978.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LEVELS = 15


@dataclass(frozen=True, slots=True)
class W4Weight:
    """`packed` [N, K / 2] uint8; `d`, `m` [N, K / g] float16 or float32."""

    packed: torch.Tensor
    d: torch.Tensor
    m: torch.Tensor

    @property
    def num_inputs(self) -> int:
        """K."""
        return 2 * int(self.packed.shape[1])

    @property
    def group_size(self) -> int:
        """g."""
        return self.num_inputs // int(self.d.shape[1])


def pack_nibbles(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """values [N, K] in 0..15 -> [N, K / 2] uint8 in the contract's order."""
    groups = values.to(torch.uint8).view(values.shape[0], -1, 2, group_size // 2)
    return (groups[:, :, 0] | (groups[:, :, 1] << 4)).flatten(1)


def unpack_nibbles(packed: torch.Tensor, group_size: int) -> torch.Tensor:
    """The inverse of `pack_nibbles`: [N, K / 2] uint8 -> [N, K] uint8."""
    groups = packed.view(packed.shape[0], -1, group_size // 2)
    return torch.stack((groups & 15, groups >> 4), dim=2).flatten(1)


def quantize_groups_w4(weight: torch.Tensor, group_size: int, dtype: torch.dtype = torch.float16) -> W4Weight:
    """Nearest, between the least and the largest value of each group; d and m of `dtype`."""
    groups = weight.float().view(weight.shape[0], -1, group_size)
    m = groups.amin(-1).to(dtype)
    d = ((groups.amax(-1) - m.float()).clamp(min=1e-7) / LEVELS).to(dtype)
    q = torch.round((groups - m.float()[..., None]) / d.float()[..., None]).clamp(0, LEVELS)
    return W4Weight(pack_nibbles(q.flatten(1), group_size), d, m)


def dequantize_w4(weight: W4Weight) -> torch.Tensor:
    """-> [N, K] float32."""
    size = weight.group_size
    q = unpack_nibbles(weight.packed, size).float()
    return weight.d.float().repeat_interleave(size, 1) * q + weight.m.float().repeat_interleave(size, 1)


def reference_linear_w4a16(x: torch.Tensor, weight: W4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The definition, in double precision, rounded once at the end."""
    out = x.double() @ dequantize_w4(weight).double().t()
    return (out if bias is None else out + bias.double()).to(x.dtype)
