"""Number formats of keys and values: what one token and key/value head hold, and nothing else decides it.

Letters: D head dimension. A row is x [D] float32.

    float32    as it is
    bfloat16   rounded to nearest even
    int8       x ~ scale * code, scale = max|x| / 127, code rounded to nearest even
    float8     x ~ scale * e4m3, scale = max|x| / 448, rounded to nearest even
    int4       the row is rotated first; x ~ scale * (code - 7.5), scale = max|x| / 8, code = floor(x / scale) + 8
               within 0..15; the low half of byte i is column i, the high half column D / 2 + i

The rotation is Hadamard's in blocks of the largest power of two in D, its own inverse: it spreads the few large columns
of keys over all. Queries are rotated alike, which leaves every score as it was, and an output is rotated back. The
compiled kernels store the same bits (`engines/ops/csrc/kv.c`). Knows nothing of blocks.

Source of the rotation: QuaRot, Ashkboos et al., 2024, https://arxiv.org/abs/2404.00456.
Read next: `engines/ops/kv_cache.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engines.config import KVDType
from engines.ops.kv_write import SMALLEST_MAGNITUDE, reference_quantize_heads
from engines.quant.granularity import Granularity

HALF_LEVELS = 8
MIDDLE = 7.5


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One format. `code` is its number in the compiled kernels, `storage` the dtype of the cache's tensors.

    `granularity` of the scales: one a token and head is one a group of D columns; None: the format has no scales.
    """

    name: KVDType
    code: int
    storage: torch.dtype
    bits: int
    rotated: bool = False

    @property
    def granularity(self) -> Granularity | None:
        """Of the scales, over rows [tokens x heads, D]."""
        return Granularity(kind="channel") if self.bits <= 8 else None

    def columns(self, head_dim: int) -> int:
        """Elements of `storage` a row."""
        return head_dim * self.bits // 8 // self.storage.itemsize

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one token and head, its scale included, of K or of V."""
        return head_dim * self.bits // 8 + (4 if self.granularity is not None else 0)

    def store(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x [..., D] float32, rotated already where the format is -> (rows [..., columns], scales [...] or None)."""
        if self.granularity is None:
            return x.to(self.storage), None
        if self.bits == 8:
            return reference_quantize_heads(x, self.storage)
        scales = x.abs().amax(dim=-1).clamp(min=SMALLEST_MAGNITUDE) / HALF_LEVELS
        codes = (torch.floor(x / scales[..., None]) + HALF_LEVELS).clamp(0, 2 * HALF_LEVELS - 1).to(torch.uint8)
        low, high = codes.chunk(2, dim=-1)
        return low | high << 4, scales

    def load(self, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """The inverse of `store`, as near as the format is: [..., D] float32, rotated still."""
        if scales is None:
            return rows.float()
        if self.bits == 8:
            return rows.float() * scales[..., None]
        codes = torch.cat((rows & 15, rows >> 4), dim=-1)
        return (codes.float() - MIDDLE) * scales[..., None]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values before they are stored, and outputs after: x [..., D] itself, or rotated."""
        return hadamard(x) if self.rotated else x


FORMATS: dict[KVDType, KVFormat] = {
    form.name: form
    for form in (
        KVFormat("float32", 0, torch.float32, 32),
        KVFormat("bfloat16", 1, torch.bfloat16, 16),
        KVFormat("int8", 2, torch.int8, 8),
        KVFormat("float8", 3, torch.float8_e4m3fn, 8),
        KVFormat("int4", 4, torch.uint8, 4, rotated=True),
    )
}


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] float32 times an orthonormal Hadamard matrix, in blocks of the largest power of two in D; new memory.

    Sums go in the order of the compiled kernel: equal bits.
    """
    width = x.shape[-1]
    size, half, y = width & -width, 1, x
    while half < size:
        pairs = y.reshape(*x.shape[:-1], -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((first + second, first - second), dim=-2).reshape(x.shape)
        half *= 2
    return y * float(np.float32(1.0) / np.sqrt(np.float32(size)))
