"""Self-attention of a decoder layer: merged query/key/value projection, rotary positions, paged attention, output.

Letters: T tokens, K hidden size, H query heads, G key/value heads, D head dimension. Knows nothing of blocks beyond
the step object it is handed.

Read next: `engines/ops/attention.py`, `engines/layers/rotary.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.layers.linear import Linear
from engines.ops.attention import AttentionStep
from engines.ops.dispatch import Ops


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one forward share: cos and sin [T, D] of its positions, and the attention step."""

    cos: torch.Tensor
    sin: torch.Tensor
    attention: AttentionStep


class SelfAttention:
    """x [T, K] -> [T, K], writing this layer's keys and values."""

    def __init__(self, qkv: Linear, output: Linear, heads: tuple[int, int, int], ops: Ops) -> None:
        """`qkv` gives queries, keys and values side by side: (H + 2 G) x D columns. `heads` is (H, G, D)."""
        self._qkv = qkv
        self._output = output
        self._num_heads, self._num_kv_heads, self._head_dim = heads
        self._ops = ops

    def __call__(self, x: torch.Tensor, layer: int, context: StepContext) -> torch.Tensor:
        """See the class."""
        rotated = self._num_heads + self._num_kv_heads
        qkv = self._qkv(x).view(x.shape[0], rotated + self._num_kv_heads, self._head_dim)  # [T, H + 2 G, D]
        qk = self._ops.rope(qkv[:, :rotated], context.cos, context.sin)  # queries and keys turn together
        q, k = qk[:, : self._num_heads], qk[:, self._num_heads :]
        return self._output(context.attention.attend(layer, q, k, qkv[:, rotated:]))
