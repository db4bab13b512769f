"""Packs the scheduled tokens of many requests into the tensors of one forward pass.

Vectorised over tokens: per request there is a handful of numpy slices, per token nothing. Knows nothing of models or
sampling.

Read next: `engines/layers/forward_batch.py` (the contract), `engines/core/runner.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engines.core.request import Request
from engines.layers.forward_batch import ForwardBatch


class BatchPacker:
    """Owns the buffers: `max_tokens` rows, and `max_requests` block tables of `max_blocks` entries.

    A packed batch lies in these buffers: it is valid until the next `pack`.
    """

    def __init__(self, *, max_tokens: int, max_requests: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.zeros(max_tokens, dtype=np.int64)
        self._query_start = np.zeros(max_requests + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_requests, dtype=np.int32)
        self._block_tables = np.zeros((max_requests, max_blocks), dtype=np.int32)
        self._rows = np.arange(max(max_tokens, max_requests), dtype=np.int32)

    def pack(self, scheduled: Sequence[Request]) -> tuple[ForwardBatch, list[Request]]:
        """The batch, and the requests whose logits it asks for (those that it catches up), in order of `logits_rows`.

        `scheduled`: at least one request, each with `num_scheduled_tokens` >= 1 and room in its block table.
        """
        S, T = len(scheduled), 0
        for s, request in enumerate(scheduled):
            start, count = request.num_computed_tokens, request.num_scheduled_tokens
            self._token_ids[T : T + count] = request.token_ids[start : start + count]
            T += count
            self._query_start[s + 1] = T
            self._context_lens[s] = start + count
        B = max(len(request.block_ids) for request in scheduled)
        block_tables = self._block_tables[:S, :B]
        for s, request in enumerate(scheduled):
            held = len(request.block_ids)
            block_tables[s, :held] = request.block_ids
            block_tables[s, held:] = 0
        caught_up = [s for s, request in enumerate(scheduled) if self._context_lens[s] == request.num_tokens]
        return self._tensors(T, block_tables, caught_up), [scheduled[s] for s in caught_up]

    def _tensors(self, T: int, block_tables: npt.NDArray[np.int32], caught_up: list[int]) -> ForwardBatch:
        S = len(block_tables)
        query_start, context_lens = self._query_start[: S + 1], self._context_lens[:S]
        owner = np.repeat(self._rows[:S], np.diff(query_start))  # [T] which sequence a row belongs to
        # A sequence's last row has its last position; a row before it has a position less.
        positions = self._rows[:T] + (context_lens - query_start[1:])[owner]  # [T]
        slots = block_tables[owner, positions // self._block_size] * self._block_size + positions % self._block_size
        return ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids[:T]),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            query_start=torch.from_numpy(query_start),
            context_lens=torch.from_numpy(context_lens),
            block_tables=torch.from_numpy(np.ascontiguousarray(block_tables)),
            logits_rows=torch.from_numpy(query_start[1:][caught_up].astype(np.int64) - 1),
        )
