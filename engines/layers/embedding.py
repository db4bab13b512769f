"""The token embedding in the number format its table is packed in.

Packed tensors of a table `e` are `e.weight` [V, K] float32, or `e.groups` [V, K / 32, 32] int8 with `e.scales`
[V, K / 32] float32. Knows nothing of the head that may share its weights.

Read next: `engines/ops/embedding.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from engines.ops.embedding import embed_float32, embed_int8


class Embedding(Protocol):
    """ids [T] int64 -> [T, K] float32, new memory."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up."""
        ...


class Float32Embedding:
    """Exact."""

    def __init__(self, table: torch.Tensor) -> None:
        """table [V, K] is kept, not copied."""
        self._table = table

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Embedding`."""
        return embed_float32(ids, self._table)


class Int8Embedding:
    """Eight bits with a scale a group."""

    def __init__(self, groups: torch.Tensor, scales: torch.Tensor) -> None:
        """groups [V, K / 32, 32] int8 and scales [V, K / 32] are kept, not copied."""
        self._groups = groups
        self._scales = scales

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Embedding`."""
        return embed_int8(ids, self._groups, self._scales)


def build_embedding(tensors: Mapping[str, torch.Tensor], name: str) -> Embedding:
    """The table `name`, in whichever format `tensors` holds it."""
    if f"{name}.groups" in tensors:
        return Int8Embedding(tensors[f"{name}.groups"], tensors[f"{name}.scales"])
    return Float32Embedding(tensors[f"{name}.weight"])
