"""The KV tensors of one model on one device, and their layout. Block bookkeeping lives in `engines/kv`, not here.

Letters: L layers, N blocks, G key/value heads, B block size (tokens), D head dimension, E elements a row: D, or D / 2
where two 4-bit codes share a byte.

A (layer, block, head) is contiguous, so that a kernel walks a block table and reads whole rows of B x E.

Read next: `engines/ops/kv_format.py`, `engines/ops/attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.config import KVDType
from engines.ops.kv_format import FORMATS, KVFormat


@dataclass(frozen=True, slots=True)
class KVCache:
    """`k`, `v`: [L, N, G, B, E] in the format's storage. Written by attention at `slot_mapping`, read through tables.

    `k_scale`, `v_scale`: [L, N, G, B] float32, one a token and head, iff the format has scales.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    dtype: KVDType = "float32"

    @property
    def format(self) -> KVFormat:
        """How rows are stored."""
        return FORMATS[self.dtype]

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
        """Bytes of all tensors."""
        return sum(one.nbytes for one in (self.k, self.v, self.k_scale, self.v_scale) if one is not None)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [T, G, D] float32 (rotated already where the format is) into slots [T] of a layer."""
        where = (slots // self.block_size, slice(None), slots % self.block_size)
        for x, cache, scales in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            rows, row_scales = self.format.store(x)
            # As bytes: indexed assignment does not know float8.
            cache[layer].view(torch.uint8)[where] = rows.contiguous().view(torch.uint8)
            if scales is not None and row_scales is not None:
                scales[layer][where] = row_scales

    def read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of blocks [n] of a layer: two [n, G, B, D] float32, rotated where the format is."""
        return (
            self._read(self.k[layer], None if self.k_scale is None else self.k_scale[layer], blocks),
            self._read(self.v[layer], None if self.v_scale is None else self.v_scale[layer], blocks),
        )

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero blocks [n] of all layers: what an earlier owner left must not reach a product, NaN or not."""
        for tensor in (self.k, self.v, self.k_scale, self.v_scale):
            if tensor is not None:
                tensor.view(torch.uint8).index_fill_(1, blocks, 0)

    def _read(self, cache: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
        rows = cache.view(torch.uint8).index_select(0, blocks).view(cache.dtype)
        return self.format.load(rows, None if scales is None else scales.index_select(0, blocks))


class KVRows:
    """A cache's layers as rows, for one step of a kernel: rows of one token and head, and of one block and head."""

    def __init__(self, kv: KVCache) -> None:
        """Views only."""
        self._format, self._block_size = kv.format, kv.block_size
        layers = int(kv.k.shape[0])
        # Narrow formats as bytes, for not every operator knows float8.
        k, v = (t if kv.dtype == "float32" else t.view(torch.uint8) for t in (kv.k, kv.v))
        self._tokens = [t.view(layers, -1, t.shape[-1]).unbind() for t in (k, v)]
        self._blocks = [t.view(layers, -1, kv.block_size * t.shape[-1]).unbind() for t in (k, v)]
        scales = [t for t in (kv.k_scale, kv.v_scale) if t is not None]
        self._token_scales = [t.view(layers, -1).unbind() for t in scales]
        self._block_scales = [t.view(layers, -1, kv.block_size).unbind() for t in scales]

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [n, D] float32, rotated where the format is; rows [n] are (block * G + head) * B + offset."""
        for part, x in enumerate((k, v)):
            codes, scales = self._format.store(x)
            into = self._tokens[part][layer]
            into.index_copy_(0, rows, codes.contiguous().view(into.dtype))
            if scales is not None:
                self._token_scales[part][layer].index_copy_(0, rows, scales)

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, B, D] float32, rotated where the format is; rows [n] are block * G + head."""
        return self._read(0, layer, rows), self._read(1, layer, rows)

    def _read(self, part: int, layer: int, rows: torch.Tensor) -> torch.Tensor:
        form = self._format
        codes = self._blocks[part][layer].index_select(0, rows).view(rows.shape[0], self._block_size, -1)
        scales = self._block_scales[part][layer].index_select(0, rows) if self._block_scales else None
        return form.load(codes.view(form.storage), scales)


def allocate_kv_cache(
    num_layers: int,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: KVDType = "float32",
) -> KVCache:
    """Lazily backed (untouched pages cost nothing); contents are undefined until written."""
    form = FORMATS[dtype]
    slots = (num_layers, num_blocks, num_kv_heads, block_size)
    k, v = (torch.empty(*slots, form.columns(head_dim), dtype=form.storage) for _ in range(2))
    if form.granularity is None:
        return KVCache(k=k, v=v, dtype=dtype)
    return KVCache(k=k, v=v, k_scale=torch.empty(slots), v_scale=torch.empty(slots), dtype=dtype)
