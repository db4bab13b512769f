"""Packs the scheduled tokens of many requests into the tensors of one forward pass.

Vectorised over tokens: per request there is a handful of numpy slices, per token nothing. Buffers are reused; a packed
batch is valid until the next `pack`. Knows nothing of models or sampling.

Read next: `engines/layers/forward_batch.py` (the contract), `engines/core/runner.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engines.core.request import Request
from engines.layers.forward_batch import ForwardBatch


class BatchPacker:
    """Owns the buffers: `max_tokens` rows and `max_requests` block tables of `max_blocks` entries."""

    def __init__(self, *, max_tokens: int, max_requests: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.zeros(max_tokens, dtype=np.int64)
        self._query_start = np.zeros(max_requests + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_requests, dtype=np.int32)
        self._block_tables = np.zeros((max_requests, max_blocks), dtype=np.int32)
        self._rows = np.arange(max_tokens, dtype=np.int32)

    def pack(self, scheduled: Sequence[Request]) -> tuple[ForwardBatch, list[Request]]:
        """The batch, and the requests whose logits it asks for, in the order of `logits_rows`."""
        end = 0
        width = 1
        for number, request in enumerate(scheduled):
            start, count = request.num_computed_tokens, request.num_scheduled_tokens
            self._token_ids[end : end + count] = request.token_ids[start : start + count]
            end += count
            self._query_start[number + 1] = end
            self._context_lens[number] = start + count
            width = max(width, len(request.block_ids))
        for number, request in enumerate(scheduled):
            held = len(request.block_ids)
            self._block_tables[number, :held] = request.block_ids
            self._block_tables[number, held:width] = 0
        return self._tensors(scheduled, end, width)

    def _tensors(self, scheduled: Sequence[Request], num_tokens: int, width: int) -> tuple[ForwardBatch, list[Request]]:
        num_requests = len(scheduled)
        query_start = self._query_start[: num_requests + 1]
        context_lens = self._context_lens[:num_requests]
        counts = np.diff(query_start)
        owner = np.repeat(self._rows[:num_requests], counts)  # [T], which request a row belongs to
        # A row's position is its distance from the end of its request's rows, counted back from the context length.
        positions = self._rows[:num_tokens] - query_start[1:][owner] + context_lens[owner]
        blocks = self._block_tables[owner, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        caught_up = [number for number, r in enumerate(scheduled) if context_lens[number] == r.num_tokens]
        logits_rows = query_start[1:][caught_up].astype(np.int64) - 1
        batch = ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids[:num_tokens]),
            positions=torch.from_numpy(positions.astype(np.int32)),
            slot_mapping=torch.from_numpy(slots.astype(np.int32)),
            query_start=torch.from_numpy(query_start),
            context_lens=torch.from_numpy(context_lens),
            block_tables=torch.from_numpy(np.ascontiguousarray(self._block_tables[:num_requests, :width])),
            logits_rows=torch.from_numpy(logits_rows),
        )
        return batch, [scheduled[number] for number in caught_up]
