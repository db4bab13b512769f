"""What one forward pass computes, as tensors: the contract between `core.batch` (packs), models and attention ops.

T tokens of S sequences in one ragged row; R rows want logits. A sequence's tokens are contiguous and in order.
Knows nothing of requests, tenants or scheduling.

Read next: `engines/core/batch.py`, `engines/models/llama.py`, `engines/ops/attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Valid for one forward; never mutated by models.

    token_ids     [T] int64
    positions     [T] int32, position of each token in its sequence
    slot_mapping  [T] int32, block_id * block_size + offset where the token's K and V are written
    query_start   [S + 1] int32, rows of sequence s are query_start[s] : query_start[s + 1]
    context_lens  [S] int32, KV length of sequence s after this pass (= its last position + 1)
    block_tables  [S, B] int32, block ids in order; entries past the context are 0 and never read
    logits_rows   [R] int64, rows of T whose logits are wanted, ascending
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_rows: torch.Tensor
