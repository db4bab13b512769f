"""Whole KV blocks out of the cache's tensors and back, byte for byte, whatever their number format.

A block's bytes: for each tensor of the cache in order, its part of every layer. `numpy` copies without the GIL, so a
thread may copy while others compute; who may touch which block when is the caller's business (`engines/kv/offload.py`).

Letters: L layers, N blocks. Read next: `engines/ops/kv_cache.py`, `engines/kv/tiers.py`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from engines.ops.kv_cache import KVCache

Bytes = npt.NDArray[np.uint8]


class BlockCopier:
    """Reads and writes blocks of one cache. `layout` names shapes and formats: equal layouts exchange bytes."""

    def __init__(self, kv: KVCache) -> None:
        """Keeps views of the cache's tensors, each [L, N, ...] and contiguous."""
        named = [(field.name, getattr(kv, field.name)) for field in dataclasses.fields(kv)]
        tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
        self._views = [_by_block(tensor) for _, tensor in tensors]  # each [L, N, bytes of one layer's block]
        self.block_bytes = sum(view.shape[0] * view.shape[2] for view in self._views)
        self.layout = ";".join(
            f"{name}:{tensor.dtype}:{tensor.shape[0]}x{'x'.join(map(str, tensor.shape[2:]))}"
            for name, tensor in tensors
        )

    def read(self, block_id: int, into: Bytes) -> None:
        """Copy a block into [block_bytes]."""
        at = 0
        for view in self._views:
            part = into[at : at + view.shape[0] * view.shape[2]]
            np.copyto(part.reshape(view.shape[0], view.shape[2]), view[:, block_id])
            at += part.size

    def write(self, block_id: int, data: Bytes) -> None:
        """Copy [block_bytes] into a block."""
        at = 0
        for view in self._views:
            part = data[at : at + view.shape[0] * view.shape[2]]
            np.copyto(view[:, block_id], part.reshape(view.shape[0], view.shape[2]))
            at += part.size


def _by_block(tensor: torch.Tensor) -> Bytes:
    assert tensor.is_contiguous(), "a view of its bytes would be a copy"
    data: Bytes = tensor.view(torch.uint8).numpy()
    return data.reshape(tensor.shape[0], tensor.shape[1], -1)
