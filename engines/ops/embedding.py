"""Rows of an embedding table by token id.

Contract: `embed_float32(ids [T] int64, table [V, K] float32)` -> [T, K]; `quantize_groups(table)` -> (groups
[V, K / 32, 32] int8, scales [V, K / 32] float32) and `embed_int8(ids, groups, scales)` -> [T, K] float32. Groups of 32
along a row are the grain of Q8_0, so a Q8_0 table keeps its precision; a row that 32 does not divide is one group.
New memory; row-local.
"""

from __future__ import annotations

import torch
from torch.nn import functional

GROUP_SIZE = 32
LEVELS = 127
SMALLEST_MAGNITUDE = 1e-30


def embed_float32(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """ids [T] int64, table [V, K] -> [T, K]."""
    return functional.embedding(ids, table)


def quantize_groups(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """table [V, K] float32 -> (groups [V, K / 32, 32] int8, scales [V, K / 32] float32)."""
    width = table.shape[1]
    groups = table.view(table.shape[0], -1, width if width % GROUP_SIZE else GROUP_SIZE)
    scales = groups.abs().amax(dim=-1).clamp_(min=SMALLEST_MAGNITUDE).div_(LEVELS)
    return torch.round(groups / scales[..., None]).to(torch.int8), scales


def embed_int8(ids: torch.Tensor, groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """ids [T] int64 -> [T, K] float32."""
    picked = groups.index_select(0, ids).float()  # [T, K / 32, 32]
    return picked.mul_(scales.index_select(0, ids).unsqueeze(-1)).view(ids.shape[0], -1)
