"""What one program of the attention kernels does: scores of a tile, a split of keys, joining splits.

A split (`segment_keys` keys, at fixed borders) is always computed afresh, by `segment`, and splits are always joined in
order of keys, by `join`. The unsplit kernel does so in one program, the split one in many and a reduction; both round
alike, so how a step is cut into programs cannot change a row. A tile or split in which a row sees no key is an exact
no-op for it: its maximum stays, its weights are 0, and what is multiplied is multiplied by exp(0) = 1.

Read next: `engines/ops/triton/paged_attention.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.triton.kernel import jit
from engines.ops.triton.numeric import from_e4m3, tanh

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


class Tensors(NamedTuple):
    """Pointers; None where an option is off."""

    q: torch.Tensor  # [T, H, D]
    out: torch.Tensor  # [T, H, D]
    k: torch.Tensor  # [N, G, B, D]
    v: torch.Tensor
    k_scale: torch.Tensor | None  # [N, G, B] float32
    v_scale: torch.Tensor | None
    query_start: torch.Tensor  # [S + 1]
    context_lens: torch.Tensor  # [S]
    block_tables: torch.Tensor  # [S, *]
    tree_bias: torch.Tensor | None  # [T, W] float32, contiguous
    part_values: torch.Tensor | None  # [T, H, P, D] float32: P splits of a row, weighted values
    part_top: torch.Tensor | None  # [T, H, P]: maxima
    part_total: torch.Tensor | None  # [T, H, P]: sums of weights


class Strides(NamedTuple):
    """Elements between neighbours; the last dimension is contiguous everywhere."""

    q_token: int
    q_head: int
    cache_block: int
    cache_head: int
    cache_token: int
    scale_block: int
    scale_head: int


class Sizes(NamedTuple):
    """Of one batch: W of the tree bias, elements between rows of the block tables."""

    tree_width: tl.tensor
    table_stride: tl.tensor


class Config(NamedTuple):
    """Fixed by the model and its options."""

    num_heads: int
    repeats: int
    head_dim: int
    block_d: int
    block_size: int
    block_m: int
    tile_rows: int  # query rows a program: block_m // repeats
    tile_keys: int
    segment_keys: int
    scale: float
    window: int
    softcap: float
    half_operands: bool  # float16 in the products, else float32
    precision: str  # of float32 products
    is_split: bool


@jit
def find_sequence(starts: tl.tensor, index: tl.tensor, num_sequences: tl.tensor, tile_rows: tl.constexpr) -> tl.tensor:
    """The last s with starts[s] // tile_rows + s <= index: whose tile `index` is. tile_rows 0: starts[s] <= index."""
    low = index * 0
    high = low + num_sequences
    while low < high:
        middle = (low + high) // 2
        first = tl.load(starts + middle).to(tl.int32)
        if tile_rows > 0:
            first = first // tile_rows + middle
        if first <= index:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit
def visible_keys(
    first: tl.tensor, last: tl.tensor, context: tl.tensor, has_tree: tl.constexpr, window: tl.constexpr
) -> tl.tuple:
    """Keys low .. high - 1 are all that rows with key numbers first .. last can see."""
    high = tl.minimum(last + 1, context)
    if has_tree:
        high = context
    low = first * 0
    if window > 0:
        low = tl.maximum(first - window + 1, 0)
    return low, high


@jit
def widen(x: tl.tensor, config: tl.constexpr) -> tl.tensor:
    """Cached or query values as an operand of a product; scales are applied elsewhere."""
    if config.half_operands:
        y = x.to(tl.float16)
    elif x.dtype == tl.uint8:
        y = from_e4m3(x)
    else:
        y = x.to(tl.float32)
    return y


@jit
def scores_of(
    q: tl.tensor,
    key: tl.tensor,
    place: tl.tuple,
    rows: tl.tuple,
    tensors: tl.tuple,
    strides: tl.tuple,
    config: tl.constexpr,
) -> tl.tensor:
    """q [M, D] against keys [K] at `place` = (cache offsets [K], scale offsets [K], inside [K]) -> scores [M, K]."""
    offsets, scale_offsets, inside = place
    position, token, row_inside, first_new, sizes = rows
    d = tl.arange(0, config.block_d)
    keys = tl.load(
        tensors.k + offsets[None, :] + d[:, None], mask=inside[None, :] & (d < config.head_dim)[:, None], other=0
    )
    scores = tl.dot(q, widen(keys, config), input_precision=config.precision) * config.scale
    if tensors.k_scale is not None:
        scores *= tl.load(tensors.k_scale + scale_offsets, mask=inside, other=0.0)[None, :]
    if config.softcap > 0:
        scores = config.softcap * tanh(scores / config.softcap)
    visible = inside[None, :] & row_inside[:, None]
    if tensors.tree_bias is not None:
        column = key - first_new
        wanted = visible & ((column >= 0) & (column < sizes.tree_width))[None, :]
        bias = tl.load(tensors.tree_bias + token[:, None] * sizes.tree_width + column[None, :], mask=wanted, other=0.0)
        scores += bias
    else:
        visible = visible & (key[None, :] <= position[:, None])
    if config.window > 0:
        visible = visible & (position[:, None] - key[None, :] < config.window)
    return tl.where(visible, scores, NEGATIVE_INFINITY)


@jit
def segment(
    q: tl.tensor,
    span: tl.tuple,
    rows: tl.tuple,
    base: tl.tuple,
    tensors: tl.tuple,
    strides: tl.tuple,
    config: tl.constexpr,
) -> tl.tuple:
    """Keys of one split -> (maximum [M], sum of weights [M], weighted values [M, D]), started afresh.

    span = (split, low, high): keys low .. high - 1 as far as they lie in the split. base = (the sequence's row of the
    block tables, group).
    """
    split, low, high = span
    table, group = base
    first = tl.maximum(split * config.segment_keys, low // config.tile_keys * config.tile_keys)
    last = tl.minimum((split + 1) * config.segment_keys, high)
    top = tl.full((config.block_m,), NEGATIVE_INFINITY, tl.float32)
    total = tl.full((config.block_m,), 0.0, tl.float32)
    values = tl.full((config.block_m, config.block_d), 0.0, tl.float32)
    d = tl.arange(0, config.block_d)
    for start in range(first, last, config.tile_keys):
        key = start + tl.arange(0, config.tile_keys)
        inside = (key >= low) & (key < last)
        block = tl.load(table + key // config.block_size, mask=inside, other=0).to(tl.int64)
        slot = key % config.block_size
        offsets = block * strides.cache_block + group * strides.cache_head + slot * strides.cache_token
        scale_offsets = block * strides.scale_block + group * strides.scale_head + slot
        scores = scores_of(q, key, (offsets, scale_offsets, inside), rows, tensors, strides, config)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        finite_top = tl.where(new_top == NEGATIVE_INFINITY, 0.0, new_top)
        shrink = tl.exp(top - finite_top)
        weights = tl.exp(scores - finite_top[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(
            tensors.v + offsets[:, None] + d[None, :], mask=inside[:, None] & (d < config.head_dim)[None, :], other=0
        )
        if tensors.v_scale is not None:
            weights *= tl.load(tensors.v_scale + scale_offsets, mask=inside, other=0.0)[None, :]
        v = widen(v, config)
        values = tl.dot(weights.to(v.dtype), v, acc=values * shrink[:, None], input_precision=config.precision)
        top = new_top
    return top, total, values


@jit
def join(one: tl.tuple, other: tl.tuple) -> tl.tuple:
    """Two (maximum [M], sum [M], weighted values [M, D]) of disjoint keys -> that of both; `one` has the lower keys."""
    top, total, values = one
    other_top, other_total, other_values = other
    new_top = tl.maximum(top, other_top)
    finite_top = tl.where(new_top == NEGATIVE_INFINITY, 0.0, new_top)
    shrink = tl.exp(top - finite_top)
    other_shrink = tl.exp(other_top - finite_top)
    new_values = values * shrink[:, None] + other_values * other_shrink[:, None]
    return new_top, total * shrink + other_total * other_shrink, new_values


@jit
def normalised(total: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Weighted values [M, D] over their sums [M]; a row that saw no key is 0."""
    return values / tl.where(total > 0, total, 1.0)[:, None]
