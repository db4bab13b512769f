"""Attention of new tokens over paged keys and values, causal, float32.

Letters: T new tokens of S sequences, H query heads, G key/value heads, R = H / G, D head dimension, L layers, N blocks,
B block size. Head h reads key/value head h // R.

Contract: `begin(inputs, kv, num_heads)` does what all layers share, once a step; `step.attend(layer, q [T, H, D],
k [T, G, D], v [T, G, D])` writes k and v at their slots, then returns [T, H * D]: softmax(q K^T / sqrt(D)) V over each
token's own sequence up to itself. A row's bits depend on its sequence alone: not on its neighbours, nor on how its
prompt was cut into steps. Slots past a sequence's context are never trusted: they may hold anything, NaN included.

The CPU kernel gets there by computing every row in one fixed shape. Queries go in tiles of Q consecutive positions,
aligned to multiples of Q, so a (position, head) always has the same place in a tile of Q x R rows; keys go in tiles of
512, padded and masked; the products of one tile then have one shape whatever else is in the batch, and torch's flash
kernel runs each on one thread. Padding keys are finite and masked, hence exact no-ops.

Sources: FlashAttention-2, https://arxiv.org/abs/2307.08691; block tables: https://arxiv.org/abs/2309.06180.
Read next: `engines/layers/attention.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from engines.ops.kv_cache import KVCache

# torch's CPU flash kernel walks keys in splits of 512 (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
KV_TILE_TOKENS = 512
QUERY_TILE_ROWS = 16
# Gathered keys of one call stay near this size, so that they are still in the cache when they are read.
GATHER_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The batch's own tensors (see `engines/layers/forward_batch.py`): [S + 1], [S], [S, B] and [T], integers."""

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor


class AttentionStep(Protocol):
    """One forward pass over all layers."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], k and v [T, G, D] -> [T, H * D]; writes k and v into the cache first."""
        ...


class ReferenceAttentionStep:
    """The definition, sequence by sequence and head by head; reads nothing past a context."""

    def __init__(self, inputs: AttentionInputs, kv: KVCache, num_heads: int) -> None:
        self._inputs = inputs
        self._kv = kv
        self._repeats = num_heads // int(kv.k.shape[2])

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        k_cache, v_cache = self._kv.k[layer], self._kv.v[layer]  # [N, G, B, D]
        slots, size = self._inputs.slot_mapping.long(), self._kv.block_size
        k_cache[slots // size, :, slots % size] = k
        v_cache[slots // size, :, slots % size] = v
        out = torch.empty_like(q)
        starts = self._inputs.query_start.tolist()
        for s, context in enumerate(self._inputs.context_lens.tolist()):
            table = self._inputs.block_tables[s, : -(-context // size)].long()
            keys = k_cache[table].transpose(0, 1).flatten(1, 2)[:, :context]  # [G, context, D]
            values = v_cache[table].transpose(0, 1).flatten(1, 2)[:, :context]
            queries = q[starts[s] : starts[s + 1]].transpose(0, 1)  # [H, rows, D]
            rows = queries.shape[1]
            visible = torch.arange(context) <= torch.arange(context - rows, context)[:, None]  # [rows, context]
            for h in range(queries.shape[0]):
                scores = queries[h] @ keys[h // self._repeats].t() / math.sqrt(q.shape[-1])
                weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
                out[starts[s] : starts[s + 1], h] = weights @ values[h // self._repeats]
        return out.flatten(1)


@dataclass(frozen=True, slots=True)
class _Span:
    """Positions start..stop of one sequence whose rows see `padded` keys; `row` is where they begin in T."""

    sequence: int
    start: int
    stop: int
    row: int
    padded: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the flash kernel: n tiles of queries over C sequences' keys, padded to P (a multiple of 512).

    token_rows  [n * Q] int64, which of T is at each place of the tiles (a place without a token repeats a real one)
    kv_rows     [C * G * P / B] int64, rows of the cache seen as [N * G, B * D]; C is n, or 1 when n tiles share keys
    mask        [n, 1, Q * R, P] float32, 0 or -inf
    """

    token_rows: torch.Tensor
    kv_rows: torch.Tensor
    mask: torch.Tensor


class CpuAttentionStep:
    """The kernel described at the top. Needs a block size that divides 512."""

    def __init__(self, inputs: AttentionInputs, kv: KVCache, num_heads: int) -> None:
        assert KV_TILE_TOKENS % kv.block_size == 0, kv.block_size
        self._kv = kv
        self._num_kv_heads, self._head_dim = int(kv.k.shape[2]), int(kv.k.shape[4])
        self._repeats = num_heads // self._num_kv_heads
        self._tile = query_tile(self._repeats)
        slots = inputs.slot_mapping.long()
        size, heads = kv.block_size, torch.arange(self._num_kv_heads)
        block, offset = slots // size, slots % size
        # Rows of the cache seen as [N * G * B, D]: one a token and head, in the order of k [T, G, D].
        self._write_rows = ((block[:, None] * self._num_kv_heads + heads) * size + offset[:, None]).flatten()
        self._forget(block[offset == 0])
        self._places = torch.empty(slots.shape[0], dtype=torch.int64)  # where a token's result lies among all tiles
        self._calls = self._plan(inputs)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        width = self._kv.block_size * self._head_dim
        k_cache, v_cache = self._kv.k[layer], self._kv.v[layer]
        k_cache.view(-1, self._head_dim).index_copy_(0, self._write_rows, k.reshape(-1, self._head_dim))
        v_cache.view(-1, self._head_dim).index_copy_(0, self._write_rows, v.reshape(-1, self._head_dim))
        k_rows, v_rows = k_cache.view(-1, width), v_cache.view(-1, width)
        outs: list[torch.Tensor] = [self._run(call, q, k_rows, v_rows) for call in self._calls]
        together = torch.cat(outs) if len(outs) > 1 else outs[0]
        return together.index_select(0, self._places)

    def _run(self, call: _Call, q: torch.Tensor, k_rows: torch.Tensor, v_rows: torch.Tensor) -> torch.Tensor:
        """One flash call: [n * Q places, H * D]."""
        num_tiles, padded = call.mask.shape[0], call.mask.shape[-1]
        G, R, D, Q = self._num_kv_heads, self._repeats, self._head_dim, self._tile
        tiles = q.index_select(0, call.token_rows).view(num_tiles, Q, G, R, D).permute(0, 2, 1, 3, 4)
        queries = tiles.reshape(num_tiles, G, Q * R, D)
        keys = k_rows.index_select(0, call.kv_rows).view(-1, G, padded, D).expand(num_tiles, -1, -1, -1)
        values = v_rows.index_select(0, call.kv_rows).view(-1, G, padded, D).expand(num_tiles, -1, -1, -1)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: torch.Tensor = flash(queries, keys, values, 0.0, False, attn_mask=call.mask)[0]  # [n, G, Q * R, D]
        return out.view(num_tiles, G, Q, R, D).permute(0, 2, 1, 3, 4).reshape(num_tiles * Q, G * R * D)

    def _forget(self, new_blocks: torch.Tensor) -> None:
        """Zero blocks whose first slot is written now, so that what an earlier owner left cannot reach a product."""
        if new_blocks.numel():
            self._kv.k.index_fill_(1, new_blocks, 0.0)
            self._kv.v.index_fill_(1, new_blocks, 0.0)

    def _plan(self, inputs: AttentionInputs) -> list[_Call]:
        starts, contexts = inputs.query_start.tolist(), inputs.context_lens.tolist()
        spans = [
            span
            for s, context in enumerate(contexts)
            for span in _spans(s, context - (starts[s + 1] - starts[s]), context, starts[s])
        ]
        calls, num_places = [], 0
        for group in self._groups(spans):
            calls.append(self._call(group, inputs, num_places))
            num_places += calls[-1].token_rows.shape[0]
        return calls

    def _groups(self, spans: list[_Span]) -> list[list[_Span]]:
        """Spans of one tile share a call as far as their gathered keys fit the cache; a longer span has its own."""
        groups, open_groups = [], dict[int, list[_Span]]()
        for span in spans:
            if span.start // self._tile != (span.stop - 1) // self._tile:
                groups.append([span])
                continue
            group = open_groups.setdefault(span.padded, [])
            group.append(span)
            bytes_of_one = self._num_kv_heads * span.padded * self._head_dim * 4
            if (len(group) + 1) * bytes_of_one > GATHER_BYTES:
                groups.append(open_groups.pop(span.padded))
        return [*groups, *open_groups.values()]

    def _call(self, spans: list[_Span], inputs: AttentionInputs, num_places: int) -> _Call:
        Q, padded, size = self._tile, spans[0].padded, self._kv.block_size
        tiles = [
            (tile * Q, span.start, span.stop, span.row)
            for span in spans
            for tile in range(span.start // Q, (span.stop - 1) // Q + 1)
        ]
        first, start, stop, row = torch.tensor(tiles, dtype=torch.int64).t()[:, :, None]  # each [n, 1]
        positions = first + torch.arange(Q)  # [n, Q]
        token_rows = (row + positions.clamp(start, stop - 1) - start).flatten()
        real = ((positions >= start) & (positions < stop)).flatten()
        self._places[token_rows[real]] = num_places + real.nonzero().flatten()

        sequences = torch.tensor([span.sequence for span in spans])
        used = (inputs.context_lens[sequences] + size - 1) // size  # [C] blocks
        entry = torch.arange(padded // size)
        entry = torch.where(entry < used[:, None], entry, 0)  # past the context: the sequence's own first block
        blocks = inputs.block_tables[sequences].long().gather(1, entry)  # [C, P / B]
        kv_rows = (blocks[:, None] * self._num_kv_heads + torch.arange(self._num_kv_heads)[:, None]).flatten()

        hidden = torch.arange(padded) > positions.repeat_interleave(self._repeats, dim=1)[:, :, None]  # [n, Q * R, P]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return _Call(token_rows, kv_rows, mask[:, None])


def query_tile(repeats: int) -> int:
    """Q: the power of two, at least 2, whose Q x R rows come closest to QUERY_TILE_ROWS from below."""
    return max(2, 1 << int(math.log2(max(1, QUERY_TILE_ROWS // repeats))))


def _spans(sequence: int, start: int, stop: int, row: int) -> list[_Span]:
    """Cut new positions start..stop where the number of key tiles they need grows."""
    spans = []
    while start < stop:
        padded = (start // KV_TILE_TOKENS + 1) * KV_TILE_TOKENS
        end = min(stop, padded)
        spans.append(_Span(sequence, start, end, row, padded))
        row, start = row + end - start, end
    return spans
