"""Attention over blocks on CUDA: contract of `engines/ops/paged_attention.py`.

One kernel for mixed batches: a program takes `tile_rows` consecutive new tokens of one sequence and all R heads of one
key/value head, so that R rows share every key read (tile_rows x R <= block_m). Programs find their sequence by a binary
search in `query_start`, so the host needs to know nothing but T and S, and a captured graph serves any lengths.

With `num_splits` > 0 a program does one split of the keys instead of all of them, and a second kernel joins: for
decoding, where rows are few and contexts long. The split size is fixed, and the unsplit kernel joins at the same
borders in the same order: the bits are the same, and the same whatever else is in the batch.

Products: float16 q with a float16 cache multiply as float16; everything else as float32 (bfloat16, int8 and e4m3 values
are exact in TF32; float32 itself is split into three TF32 products). Sums are float32.

Read next: `engines/ops/triton/attention_tile.py`, `engines/ops/triton/tiles.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from engines.ops.attention import AttentionInputs
from engines.ops.kv_write import LayerKV
from engines.ops.paged_attention import PLAIN, AttentionOptions
from engines.ops.triton.attention_tile import (
    NEGATIVE_INFINITY,
    Config,
    Sizes,
    Strides,
    Tensors,
    find_sequence,
    join,
    normalised,
    segment,
    visible_keys,
    widen,
)
from engines.ops.triton.kernel import as_bytes, assert_rows, ceil_div, jit, launch_options, next_power_of_2
from engines.ops.triton.tiles import AttentionTiles, attention_tiles

REDUCE_HEADS = 4


@jit
def _attention_kernel(
    tensors: tl.tuple,
    strides: tl.tuple,
    num_sequences: tl.tensor,
    num_splits: tl.tensor,
    tree_width: tl.tensor,
    table_stride: tl.tensor,
    config: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    sequence = find_sequence(tensors.query_start, tile, num_sequences, config.tile_rows)
    start = tl.load(tensors.query_start + sequence).to(tl.int32)
    num_rows = tl.load(tensors.query_start + sequence + 1).to(tl.int32) - start
    first_row = (tile - start // config.tile_rows - sequence) * config.tile_rows
    if first_row >= num_rows:
        return
    context = tl.load(tensors.context_lens + sequence).to(tl.int32)
    first_new = context - num_rows
    m = tl.arange(0, config.block_m)
    row = first_row + m // config.repeats
    head = group * config.repeats + m % config.repeats
    inside = (m < config.tile_rows * config.repeats) & (row < num_rows)
    token = (start + row).to(tl.int64)
    d = tl.arange(0, config.block_d)
    inside_d = inside[:, None] & (d < config.head_dim)[None, :]
    place = token[:, None] * strides.q_token + head[:, None] * strides.q_head + d[None, :]
    q = widen(tl.load(tensors.q + place, mask=inside_d, other=0.0), config)

    last_row = tl.minimum(first_row + config.tile_rows, num_rows) - 1
    low, high = visible_keys(
        first_new + first_row, first_new + last_row, context, tensors.tree_bias is not None, config.window
    )
    rows = (first_new + row, token, inside, first_new, Sizes(tree_width, table_stride))
    base = (tensors.block_tables + sequence.to(tl.int64) * table_stride, group)
    first_split = low // config.segment_keys
    last_split = (high + config.segment_keys - 1) // config.segment_keys
    if config.is_split:
        split = tl.program_id(2)
        if (split < first_split) | (split >= last_split):
            return
        top, total, values = segment(q, (split, low, high), rows, base, tensors, strides, config)
        part = (token * config.num_heads + head) * num_splits + split
        tl.store(tensors.part_top + part, top, mask=inside)
        tl.store(tensors.part_total + part, total, mask=inside)
        tl.store(tensors.part_values + part[:, None] * config.head_dim + d[None, :], values, mask=inside_d)
    else:
        top = tl.full((config.block_m,), NEGATIVE_INFINITY, tl.float32)
        total = tl.full((config.block_m,), 0.0, tl.float32)
        values = tl.full((config.block_m, config.block_d), 0.0, tl.float32)
        for split in range(first_split, last_split):
            more = segment(q, (split, low, high), rows, base, tensors, strides, config)
            top, total, values = join((top, total, values), more)
        target = token[:, None] * (config.num_heads * config.head_dim) + head[:, None] * config.head_dim + d[None, :]
        tl.store(tensors.out + target, normalised(total, values).to(tensors.out.dtype.element_ty), mask=inside_d)


@jit
def _join_kernel(
    tensors: tl.tuple,
    num_sequences: tl.tensor,
    num_splits: tl.tensor,
    heads_block: tl.constexpr,
    config: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    head = tl.program_id(1) * heads_block + tl.arange(0, heads_block)
    inside = head < config.num_heads
    sequence = find_sequence(tensors.query_start, token, num_sequences, 0)
    stop = tl.load(tensors.query_start + sequence + 1).to(tl.int32)
    if token >= stop:
        return
    context = tl.load(tensors.context_lens + sequence).to(tl.int32)
    position = context - stop + token
    low, high = visible_keys(position, position, context, tensors.tree_bias is not None, config.window)
    d = tl.arange(0, config.block_d)
    inside_d = inside[:, None] & (d < config.head_dim)[None, :]
    row = token.to(tl.int64) * config.num_heads + head
    top = tl.full((heads_block,), NEGATIVE_INFINITY, tl.float32)
    total = tl.full((heads_block,), 0.0, tl.float32)
    values = tl.full((heads_block, config.block_d), 0.0, tl.float32)
    last_split = (high + config.segment_keys - 1) // config.segment_keys
    for split in range(low // config.segment_keys, last_split):
        part = row * num_splits + split
        part_values = tensors.part_values + part[:, None] * config.head_dim + d[None, :]
        more = (
            tl.load(tensors.part_top + part, mask=inside, other=NEGATIVE_INFINITY),
            tl.load(tensors.part_total + part, mask=inside, other=0.0),
            tl.load(part_values, mask=inside_d, other=0.0),
        )
        top, total, values = join((top, total, values), more)
    target = tensors.out + row[:, None] * config.head_dim + d[None, :]
    tl.store(target, normalised(total, values).to(tensors.out.dtype.element_ty), mask=inside_d)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a step is cut into programs; no number here but the tiles' can change a bit of the result.

    `num_splits` 0: a program does all keys of its rows. Else at least ceil(longest context / segment_keys), and a
    program does one split. `tiles` None: from the table.
    """

    num_splits: int = 0
    tiles: AttentionTiles | None = None


def triton_paged_attention(
    q: torch.Tensor,
    kv: LayerKV,
    inputs: AttentionInputs,
    options: AttentionOptions = PLAIN,
    tree_bias: torch.Tensor | None = None,
    cut: Cut | None = None,
) -> torch.Tensor:
    """q [T, H, D] of float32, float16 or bfloat16 -> [T, H, D] of its dtype, new memory; tree_bias [T, W] float32."""
    assert_rows(q, kv.k, kv.v, kv.k_scale, kv.v_scale, inputs.block_tables, tree_bias)
    assert kv.k.stride() == kv.v.stride(), "k and v blocks are laid out alike"
    cut = cut or Cut()
    tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_sequences = int(kv.k.shape[1]), int(inputs.context_lens.shape[0])
    tiles = cut.tiles or attention_tiles(num_heads // num_kv_heads, head_dim, q.dtype)
    config = _config(q, kv, options, tiles, is_split=cut.num_splits > 0)
    out = torch.empty((tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    parts = _parts((tokens, num_heads, cut.num_splits), head_dim, q.device) if cut.num_splits else (None, None, None)
    tensors = Tensors(
        q,
        out,
        as_bytes(kv.k),
        as_bytes(kv.v),
        kv.k_scale,
        kv.v_scale,
        inputs.query_start,
        inputs.context_lens,
        inputs.block_tables,
        tree_bias,
        *parts,
    )
    if tokens == 0 or num_sequences == 0:
        return out
    num_tiles = tokens // config.tile_rows + num_sequences
    warps = launch_options(tiles.num_warps, tiles.num_stages)
    grid = (num_tiles, num_kv_heads, max(1, cut.num_splits))
    tree_width = 0 if tree_bias is None else int(tree_bias.shape[1])
    assert tree_bias is None or tree_bias.stride(0) == tree_width, "the tree bias is contiguous"
    table_stride = inputs.block_tables.stride(0)
    _attention_kernel[grid](
        tensors, _strides(q, kv), num_sequences, cut.num_splits, tree_width, table_stride, config, **warps
    )
    if cut.num_splits:
        _join_kernel[(tokens, ceil_div(num_heads, REDUCE_HEADS))](
            tensors, num_sequences, cut.num_splits, REDUCE_HEADS, config, **launch_options(4)
        )
    return out


def _parts(
    rows: tuple[int, int, int], head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.empty((*rows, head_dim), dtype=torch.float32, device=device)
    top, total = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    return values, top, total


def _strides(q: torch.Tensor, kv: LayerKV) -> Strides:
    return Strides(
        q_token=q.stride(0),
        q_head=q.stride(1),
        cache_block=kv.k.stride(0),
        cache_head=kv.k.stride(1),
        cache_token=kv.k.stride(2),
        scale_block=0 if kv.k_scale is None else kv.k_scale.stride(0),
        scale_head=0 if kv.k_scale is None else kv.k_scale.stride(1),
    )


def _config(
    q: torch.Tensor, kv: LayerKV, options: AttentionOptions, tiles: AttentionTiles, *, is_split: bool
) -> Config:
    num_heads, head_dim = int(q.shape[1]), int(q.shape[2])
    repeats = num_heads // int(kv.k.shape[1])
    assert tiles.segment_keys % tiles.tile_keys == 0, tiles
    assert tiles.block_m >= repeats, tiles
    return Config(
        num_heads=num_heads,
        repeats=repeats,
        head_dim=head_dim,
        block_d=next_power_of_2(head_dim),
        block_size=int(kv.k.shape[2]),
        block_m=tiles.block_m,
        tile_rows=tiles.block_m // repeats,
        tile_keys=tiles.tile_keys,
        segment_keys=tiles.segment_keys,
        scale=options.score_scale(head_dim),
        window=options.window,
        softcap=options.softcap,
        half_operands=q.dtype == torch.float16 and kv.k.dtype == torch.float16,
        precision="tf32x3" if q.dtype == torch.float32 else "tf32",
        is_split=is_split,
    )
