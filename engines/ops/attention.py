"""Attention of new tokens over paged keys and values, causal, float32.

Letters: T new tokens of S sequences, H query heads, G key/value heads, R = H / G, D head dimension, L layers, N blocks,
B block size. Head h reads key/value head h // R.

Contract: an `AttentionBackend` is made once for a model's heads; `begin(inputs, kv)` does what all layers share, once a
step; `step.attend(layer, q [T, H, D], k [T, G, D], v [T, G, D])` writes k and v at their slots, then returns
[T, H * D]: softmax(q K^T / sqrt(D)) V over each token's own sequence up to itself. A row's bits depend on its sequence
alone: not on its neighbours, nor on how its prompt was cut into steps. Slots past a sequence's context are never
trusted: they may hold anything, NaN included. With a window W > 0 a token sees itself and the W - 1 tokens before it.
The cache's format (`engines/ops/kv_format.py`) decides what is stored of k and v; all computes on what it reads back.

The CPU kernel gets there by computing every row in a shape that follows from its position alone. Queries go in tiles of
Q consecutive positions, aligned to multiples of Q, so a (position, head) always has the same place in a tile of Q x R
rows; it sees a run of keys, padded and masked, that depends on its position (`first_key`, `padded_keys`). The products
of a tile then have one shape whatever else is in the batch, and torch's flash kernel runs each on one thread. Padding
keys are finite and masked, hence exact no-ops.

Sources: FlashAttention-2, https://arxiv.org/abs/2307.08691; block tables: https://arxiv.org/abs/2309.06180.
Read next: `engines/layers/attention.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from engines.ops.kv_cache import KVCache, KVRows

# Steps of the padding: torch's CPU flash kernel walks keys in splits of 512, and below that finer steps save work.
LONG_STEP_TOKENS = 512
SHORT_STEP_TOKENS = 128
QUERY_TILE_ROWS = 16
# Gathered keys of one call stay near this size, so that they are still in the cache when they are read.
GATHER_BYTES = 2 << 20
# Positions x keys of one call's mask (4 bytes each, times R): a long context does not take memory without bound.
MASK_ROWS_TIMES_KEYS = 1 << 22


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


class AttentionBackend(Protocol):
    """Made once for a model."""

    def begin(self, inputs: AttentionInputs, kv: KVCache) -> AttentionStep:
        """What all layers of one step share. The step is valid until `kv` is written by another."""
        ...


@dataclass(frozen=True, slots=True)
class Heads:
    """H query heads share G key/value heads of dimension D."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def repeats(self) -> int:
        """R: query heads a key/value head."""
        return self.num_heads // self.num_kv_heads


class ReferenceAttention:
    """The definition, sequence by sequence and head by head; reads nothing past a context."""

    def __init__(self, heads: Heads, window: int = 0) -> None:
        """See `Heads`; `window` 0 sees everything before."""
        self._heads, self._window = heads, window

    def begin(self, inputs: AttentionInputs, kv: KVCache) -> AttentionStep:
        """See `AttentionBackend.begin`."""
        return _ReferenceStep(self._heads, self._window, inputs, kv)


@dataclass(frozen=True, slots=True)
class _ReferenceStep:
    heads: Heads
    window: int
    inputs: AttentionInputs
    kv: KVCache

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        size, rotate = self.kv.block_size, self.kv.format.rotate
        self.kv.write(layer, self.inputs.slot_mapping.long(), rotate(k), rotate(v))
        q = rotate(q)
        out = torch.empty_like(q)
        starts = self.inputs.query_start.tolist()
        for s, context in enumerate(self.inputs.context_lens.tolist()):
            table = self.inputs.block_tables[s, : -(-context // size)].long()
            blocks = self.kv.read(layer, table)  # each [n, G, B, D]
            keys, values = (t.transpose(0, 1).flatten(1, 2)[:, :context] for t in blocks)  # [G, context, D]
            queries = q[starts[s] : starts[s + 1]].transpose(0, 1)  # [H, rows, D]
            rows = queries.shape[1]
            back = torch.arange(context - rows, context)[:, None] - torch.arange(context)  # [rows, context]
            visible = (back >= 0) & (back < (self.window or context))
            for h in range(self.heads.num_heads):
                scores = queries[h] @ keys[h // self.heads.repeats].t() / math.sqrt(self.heads.head_dim)
                weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
                out[starts[s] : starts[s + 1], h] = weights @ values[h // self.heads.repeats]
        return rotate(out).flatten(1)


class CpuAttention:
    """The kernel described at the top."""

    def __init__(self, heads: Heads, window: int = 0) -> None:
        """See `Heads`; `window` 0 sees everything before."""
        self._heads, self._window = heads, window
        self._tile = query_tile(heads.repeats)

    def begin(self, inputs: AttentionInputs, kv: KVCache) -> AttentionStep:
        """See `AttentionBackend.begin`. The block size must divide 128."""
        return _CpuStep(self._heads, _Cuts(self._tile, self._window), inputs, kv)


def query_tile(repeats: int) -> int:
    """Q: the power of two, at least 2, whose Q x R rows come closest to QUERY_TILE_ROWS from below."""
    return max(2, 1 << int(math.log2(max(1, QUERY_TILE_ROWS // repeats))))


def padded_keys(position: int) -> int:
    """Keys that the row of `position` is computed over: its own and those before it, and padding."""
    step = SHORT_STEP_TOKENS if position < LONG_STEP_TOKENS else LONG_STEP_TOKENS
    return (position // step + 1) * step


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q [n, G, M, D], k and v [n, G, P, D], mask [n, 1, M, P] -> [n, G, M, D]."""
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask)[
        0
    ]
    return out


@dataclass(frozen=True, slots=True)
class _Span:
    """Positions start..stop of one sequence whose rows see keys first..padded; `row` is where they begin in T."""

    sequence: int
    start: int
    stop: int
    row: int
    first: int
    padded: int


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Where runs of keys begin and end: Q positions a tile, a window of `window` tokens (0: none)."""

    tile: int
    window: int

    def first_key(self, position: int) -> int:
        """Keys before it are in nobody's window in the tile of `position`; a multiple of the short step."""
        if not self.window:
            return 0
        oldest = position // self.tile * self.tile - self.window + 1
        return max(0, oldest) // SHORT_STEP_TOKENS * SHORT_STEP_TOKENS

    def spans(self, sequence: int, start: int, stop: int, row: int) -> list[_Span]:
        """Cut new positions start..stop where the keys they need change, and where a mask would grow large."""
        spans = []
        while start < stop:
            first, padded = self.first_key(start), padded_keys(start)
            end = min(stop, padded)
            if self.window:
                # The next multiple of the step comes into reach with the tile that begins at or after this position.
                after = first + SHORT_STEP_TOKENS + self.window - 1
                end = min(end, -(-after // self.tile) * self.tile)
            most = max(1, MASK_ROWS_TIMES_KEYS // (padded - first) // self.tile)  # tiles
            end = min(end, (start // self.tile + most) * self.tile)
            spans.append(_Span(sequence, start, end, row, first, padded))
            row, start = row + end - start, end
        return spans


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the flash kernel: n tiles of queries over C sequences' keys, padded to P.

    q_rows   [n * G * Q * R] int64, which row of q seen as [T * H, D] is where (a place without a token repeats one)
    kv_rows  [C * G * P / B] int64, rows of a layer's cache seen as [N * G, B * D]; C is n, or 1 when n tiles share keys
    mask     [n, 1, Q * R, P] float32, 0 or -inf
    """

    q_rows: torch.Tensor
    kv_rows: torch.Tensor
    mask: torch.Tensor


class _CpuStep:
    """One forward pass of `CpuAttention`."""

    def __init__(self, heads: Heads, cuts: _Cuts, inputs: AttentionInputs, kv: KVCache) -> None:
        assert SHORT_STEP_TOKENS % kv.block_size == 0, kv.block_size
        self._heads, self._cuts, self._tile = heads, cuts, cuts.tile
        self._block_size = kv.block_size
        G, R = heads.num_kv_heads, heads.repeats
        self._kv, self._rotate = KVRows(kv), kv.format.rotate
        slots = inputs.slot_mapping.long()
        block, offset = slots // kv.block_size, slots % kv.block_size
        self._write_rows = ((block[:, None] * G + torch.arange(G)) * kv.block_size + offset[:, None]).flatten()
        # A block whose first slot is written now is new: what an earlier owner left must not reach a product.
        new_blocks = block[offset == 0]
        if new_blocks.numel():
            kv.clear(new_blocks)
        places = torch.empty(slots.shape[0], dtype=torch.int64)  # of each token among all calls' n * Q places
        self._calls = self._plan(inputs, places)
        # The kernel's output lies as [place, R, G, D]; head h = g * R + r.
        head_rows = torch.arange(R) * G + torch.arange(G)[:, None]  # [G, R]
        self._out_rows = (places[:, None] * (G * R) + head_rows.flatten()).flatten()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        G, D, M = self._heads.num_kv_heads, self._heads.head_dim, self._tile * self._heads.repeats
        rotate = self._rotate
        self._kv.write(layer, self._write_rows, rotate(k.reshape(-1, D)), rotate(v.reshape(-1, D)))
        q_rows = rotate(q.reshape(-1, D))
        outs = []
        for call in self._calls:
            num_tiles, padded = call.mask.shape[0], call.mask.shape[3]
            queries = q_rows.index_select(0, call.q_rows).view(num_tiles, G, M, D)
            gathered = self._kv.read(layer, call.kv_rows)
            keys, values = (t.view(-1, G, padded, D).expand(num_tiles, -1, -1, -1) for t in gathered)
            outs.append(_flash(queries, keys, values, call.mask).transpose(1, 2).reshape(-1, D))
        together = torch.cat(outs) if len(outs) > 1 else outs[0]
        return rotate(together.index_select(0, self._out_rows)).view(k.shape[0], -1)

    def _plan(self, inputs: AttentionInputs, places: torch.Tensor) -> list[_Call]:
        starts, contexts = inputs.query_start.tolist(), inputs.context_lens.tolist()
        spans = [
            span
            for s, context in enumerate(contexts)
            for span in self._cuts.spans(s, context - (starts[s + 1] - starts[s]), context, starts[s])
        ]
        calls, num_places = [], 0
        for group in self._groups(spans):
            calls.append(self._call(group, inputs, places, num_places))
            num_places += calls[-1].mask.shape[0] * self._tile
        return calls

    def _groups(self, spans: list[_Span]) -> list[list[_Span]]:
        """Spans of one tile share a call as far as their gathered keys fit the cache; a longer span has its own."""
        groups, open_groups = [], dict[tuple[int, int], list[_Span]]()
        for span in spans:
            if span.start // self._tile != (span.stop - 1) // self._tile:
                groups.append([span])
                continue
            keys = (span.first, span.padded)
            group = open_groups.setdefault(keys, [])
            group.append(span)
            bytes_of_one = self._heads.num_kv_heads * (span.padded - span.first) * self._heads.head_dim * 4
            if (len(group) + 1) * bytes_of_one > GATHER_BYTES:
                groups.append(open_groups.pop(keys))
        return [*groups, *open_groups.values()]

    def _call(self, spans: list[_Span], inputs: AttentionInputs, places: torch.Tensor, num_places: int) -> _Call:
        G, R, Q = self._heads.num_kv_heads, self._heads.repeats, self._tile
        first_key, padded, size = spans[0].first, spans[0].padded, self._block_size
        tiles = [
            (tile * Q, span.start, span.stop, span.row)
            for span in spans
            for tile in range(span.start // Q, (span.stop - 1) // Q + 1)
        ]
        first, start, stop, row = torch.tensor(tiles, dtype=torch.int64).t()[:, :, None]  # each [n, 1]
        positions = first + torch.arange(Q)  # [n, Q]
        tokens = row + positions.clamp(start, stop - 1) - start  # [n, Q]
        real = (positions >= start) & (positions < stop)
        places[tokens[real]] = num_places + real.flatten().nonzero().flatten()
        heads = torch.arange(G * R).view(G, 1, R)
        q_rows = (tokens[:, None, :, None] * (G * R) + heads).flatten()  # [n, G, Q, R]

        sequences = torch.tensor([span.sequence for span in spans])
        used = (inputs.context_lens[sequences] + size - 1) // size  # [C] blocks
        entry = torch.arange(first_key // size, padded // size)
        entry = torch.where(entry < used[:, None], entry, first_key // size)  # past the context: a block of its own
        blocks = inputs.block_tables[sequences].long().gather(1, entry)  # [C, P / B]
        kv_rows = (blocks[:, None] * G + torch.arange(G)[:, None]).flatten()

        rows, keys = positions.repeat_interleave(R, dim=1)[:, :, None], torch.arange(first_key, padded)
        hidden = keys > rows  # [n, Q * R, P]
        if self._cuts.window:
            hidden |= keys <= rows - self._cuts.window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return _Call(q_rows, kv_rows, mask[:, None])
