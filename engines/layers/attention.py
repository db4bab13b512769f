"""Self-attention of a decoder layer: merged query/key/value projection, rotary positions, paged attention, output.

Letters: T tokens, K hidden size, H query heads, G key/value heads, D head dimension. Knows nothing of blocks beyond
the step object it is handed.

Read next: `engines/ops/attention.py`, `engines/layers/rotary.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engines.layers.linear import Linear
from engines.ops.attention import AttentionStep, Heads
from engines.ops.dispatch import Ops


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one forward share: cos and sin [T, D] of its positions, and an attention step a window."""

    cos: torch.Tensor
    sin: torch.Tensor
    attention: Mapping[int, AttentionStep]


class SelfAttention:
    """x [T, K] -> [T, K], writing this layer's keys and values."""

    def __init__(self, qkv: Linear, output: Linear, heads: Heads, ops: Ops, window: int = 0) -> None:
        """`qkv` gives queries, keys and values side by side: (H + 2 G) x D columns. `window` 0 sees everything."""
        self._window = window
        self._qkv = qkv
        self._output = output
        self._heads = heads
        self._ops = ops

    def __call__(self, x: torch.Tensor, layer: int, context: StepContext) -> torch.Tensor:
        """See the class."""
        H, G, D = self._heads.num_heads, self._heads.num_kv_heads, self._heads.head_dim
        qkv = self._qkv(x).view(x.shape[0], H + 2 * G, D)
        qk = self._ops.rope(qkv[:, : H + G], context.cos, context.sin)  # queries and keys turn together
        attended = context.attention[self._window].attend(layer, qk[:, :H], qk[:, H:], qkv[:, H + G :])
        return self._output(attended)
