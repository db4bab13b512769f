"""Attention of new tokens over one layer's blocks, with what decoders vary: window, softcap, tree, narrow caches.

Letters: T new tokens of S sequences, H query heads, G key/value heads, R = H / G, D head dimension, N blocks,
B block size, W the longest run of new tokens that a tree covers.

Contract: `paged_attention(q [T, H, D], kv, inputs, options, tree_bias)` -> [T, H, D] of q's dtype, new memory. The
new tokens' own keys and values are already written. Row i of a sequence with `context` keys, n of them new, is key
number p = context - n + i, and sees the keys j with
  j <= p, or with a tree: j < context - n, or j new and tree_bias[t, j - (context - n)] > -inf;
  p - j < window, if options.window > 0.
Score: s = q . k x scale (x k_scale); softcap > 0: s = softcap x tanh(s / softcap); then + tree_bias. A row that sees
no key is 0; a row of no sequence (past query_start[S]: padding) is undefined. A row's bits depend on its sequence
alone. Slots past a context are never trusted: NaN may lie there.

Source: FlashAttention-2, https://arxiv.org/abs/2307.08691; block tables, https://arxiv.org/abs/2309.06180; tree
attention, https://arxiv.org/abs/2305.09781.
Read next: `engines/ops/attention.py` (the CPU engine's form of the same), `engines/ops/kv_write.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engines.ops.attention import AttentionInputs
from engines.ops.kv_write import LayerKV


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """`scale` None means 1 / sqrt(D); `window` (keys, the row's own included) and `softcap` are off at 0."""

    scale: float | None = None
    window: int = 0
    softcap: float = 0.0

    def score_scale(self, head_dim: int) -> float:
        """What q . k is multiplied by."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN = AttentionOptions()


def reference_paged_attention(
    q: torch.Tensor,
    kv: LayerKV,
    inputs: AttentionInputs,
    options: AttentionOptions = PLAIN,
    tree_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition in double precision, sequence by sequence; tree_bias [T, W] float32."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    starts = inputs.query_start.tolist()
    for sequence, context in enumerate(inputs.context_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if rows.stop > rows.start:
            bias = None if tree_bias is None else tree_bias[rows]
            keys, values = _gather(kv, inputs.block_tables[sequence], context)  # [G, context, D]
            out[rows] = _attend(q[rows].double(), keys, values, options, bias)
    return out.to(q.dtype)


def _gather(kv: LayerKV, block_table: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = block_table[: -(-context // kv.k.shape[2])].long()
    both = []
    for cache, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        wide = (
            cache.view(torch.uint8)[blocks].view(cache.dtype).double() if scale is not None else cache[blocks].double()
        )
        if scale is not None:
            wide = wide * scale[blocks].double()[..., None]
        both.append(wide.transpose(0, 1).flatten(1, 2)[:, :context])
    return both[0], both[1]


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: AttentionOptions, bias: torch.Tensor | None
) -> torch.Tensor:
    """q [n, H, D], keys and values [G, context, D], bias [n, W] -> [n, H, D]."""
    rows, num_heads, head_dim = q.shape
    context, repeats = keys.shape[1], num_heads // keys.shape[0]
    first_new = context - rows
    scores = torch.einsum("nhd,hkd->hnk", q, keys.repeat_interleave(repeats, 0)) * options.score_scale(head_dim)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position, key = torch.arange(first_new, context)[:, None], torch.arange(context)[None, :]
    visible = key <= position
    if bias is not None:
        added = torch.zeros(rows, context, dtype=torch.float64)
        added[:, first_new:] = bias[:, :rows].double()
        scores, visible = scores + added, added > float("-inf")
    if options.window:
        visible = visible & (position - key < options.window)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1).nan_to_num(0.0)
    return torch.einsum("hnk,hkd->nhd", weights, values.repeat_interleave(repeats, 0))
