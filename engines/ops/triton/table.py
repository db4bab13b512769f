"""The ops of a dense decoder as one table for CUDA, and attention in the form a model asks for.

`TRITON` goes where `engines.ops.dispatch.CPU` goes, on a device, if `engines.ops.triton.available()`.
Read next: `engines/ops/dispatch.py`, `engines/ops/triton/paged_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.ops.attention import AttentionInputs, AttentionStep, Heads
from engines.ops.dispatch import Ops
from engines.ops.kv_cache import KVCache
from engines.ops.kv_write import LayerKV
from engines.ops.paged_attention import AttentionOptions
from engines.ops.triton.kernel import ceil_div
from engines.ops.triton.kv_write import triton_kv_write
from engines.ops.triton.paged_attention import Cut, triton_paged_attention
from engines.ops.triton.rmsnorm import triton_rms_norm
from engines.ops.triton.rope import triton_rope
from engines.ops.triton.silu_mul import triton_silu_mul
from engines.ops.triton.tiles import attention_tiles

# Up to this many new tokens a sequence, on average, the keys are split over programs: decoding and verifying drafts.
SPLIT_ROWS = 4


class TritonAttention:
    """`AttentionBackend` on CUDA: writes keys and values, then attends. The cut follows shapes alone: no host sync."""

    def __init__(self, heads: Heads, window: int = 0) -> None:
        """See `Heads`; `window` 0 sees everything before."""
        self._heads, self._options = heads, AttentionOptions(window=window)

    def begin(self, inputs: AttentionInputs, kv: KVCache) -> AttentionStep:
        """See `AttentionBackend.begin`."""
        tiles = attention_tiles(self._heads.repeats, self._heads.head_dim, kv.k.dtype)
        tokens, sequences = int(inputs.slot_mapping.shape[0]), int(inputs.context_lens.shape[0])
        longest = int(inputs.block_tables.shape[1]) * kv.block_size
        splits = ceil_div(longest, tiles.segment_keys) if tokens <= SPLIT_ROWS * sequences else 0
        return _Step(inputs, kv, Cut(splits, tiles), self._options)


@dataclass(frozen=True, slots=True)
class _Step:
    inputs: AttentionInputs
    kv: KVCache
    cut: Cut
    options: AttentionOptions

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        blocks = LayerKV(self.kv.k[layer], self.kv.v[layer])
        triton_kv_write(k, v, blocks, self.inputs.slot_mapping)
        return triton_paged_attention(q, blocks, self.inputs, self.options, cut=self.cut).flatten(1)


TRITON = Ops(triton_rms_norm, triton_rope, triton_silu_mul, TritonAttention)
