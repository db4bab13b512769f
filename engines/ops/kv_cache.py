"""The KV tensors of one model on one device, and their layout. Block bookkeeping lives in `engines/kv`, not here.

Letters: L layers, N blocks, G key/value heads, B block size (tokens), D head dimension.

A (layer, block, head) is contiguous, so that a kernel walks a block table and reads whole rows of B x D.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVCache:
    """`k`, `v`: [L, N, G, B, D] float32. Written by attention at `slot_mapping`, read through block tables."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return int(self.k.shape[3])

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return int(self.k.shape[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.k.nbytes + self.v.nbytes


def allocate_kv_cache(num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> KVCache:
    """Lazily backed (untouched pages cost nothing); contents are undefined until written."""
    shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
    return KVCache(k=torch.empty(shape), v=torch.empty(shape))
