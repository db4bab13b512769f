"""Truncation on CUDA: `keep` of `engines/ops/truncation.py`; the vocabulary is never sorted.

A program does one row and walks the vocabulary in tiles. A cut is found from the top four bits of the answer down: each
of eight walks compares every token's order-preserving key (`ordered_key`) with 16 pivots at once and keeps the largest
pivot that still reaches k tokens, or the wanted mass. So top-k is exact, and ties are settled by one more walk that
counts equal tokens in order of id. Sums run in one fixed order: the same row gives the same cut in any batch.

A row costs up to 22 walks, nearly all from the L2; greedy rows cost two.
Read next: `engines/ops/triton/numeric.py`, `engines/ops/triton/draw.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.triton.kernel import assert_rows, jit, launch_options
from engines.ops.triton.numeric import LARGEST_FLOAT, from_ordered_key, ordered_key
from engines.ops.truncation import Kept, Truncation

# Tokens a walk takes at a time; 16 pivots each must fit the registers of 8 warps.
TILE_TOKENS = 1024
NUM_WARPS = 8

INFINITY = tl.constexpr(float("inf"))
NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


class _Tensors(NamedTuple):
    logits: torch.Tensor  # [R, V]
    temperature: torch.Tensor  # [R], and so on
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    largest: torch.Tensor
    threshold: torch.Tensor
    last_id: torch.Tensor
    mass: torch.Tensor


class _Strides(NamedTuple):
    logits: int
    vocab_size: int


class Row(NamedTuple):
    """One program's row: pointer to its logits, its temperature, V."""

    logits: tl.tensor
    temperature: tl.tensor
    vocab_size: tl.tensor


class Config(NamedTuple):
    """Tokens a tile."""

    tile: int


@jit
def tile_of(row: tl.tuple, start: tl.tensor, config: tl.constexpr) -> tl.tuple:
    """-> x [tile] float32, -inf past the row, and ids [tile]."""
    token = start + tl.arange(0, config.tile)
    x = tl.load(row.logits + token, mask=token < row.vocab_size, other=NEGATIVE_INFINITY).to(tl.float32)
    x = tl.where(x == x, x, NEGATIVE_INFINITY)
    x = x / tl.where(row.temperature > 0, row.temperature, 1.0)
    return tl.minimum(x, LARGEST_FLOAT), token


@jit
def _largest(row: tl.tuple, config: tl.constexpr) -> tl.tuple:
    """-> largest x, how many x are not -inf."""
    best = tl.full((config.tile,), NEGATIVE_INFINITY, tl.float32)
    count = tl.zeros((config.tile,), tl.int32)
    for start in range(0, row.vocab_size, config.tile):
        x, _token = tile_of(row, start, config)
        best = tl.maximum(best, x)
        count += (x > NEGATIVE_INFINITY).to(tl.int32)
    return tl.max(best, axis=0), tl.sum(count, axis=0)


@jit
def _reach(row: tl.tuple, wanted: tl.tensor, floor: tl.tuple, by_mass: tl.constexpr, config: tl.constexpr) -> tl.tensor:
    """The largest key such that tokens with at least that key number `wanted`, or hold that mass.

    By mass, only tokens above floor = (key, mass at the key, largest x) count singly; those at it hold `mass` together.
    """
    floor_key, floor_mass, largest = floor
    digit = tl.arange(0, 16)
    prefix = floor_key ^ floor_key
    for step in range(8):
        shift = (28 - 4 * step) + digit * 0
        pivot = prefix + (digit << shift).to(tl.uint32, bitcast=True)
        sums = tl.zeros((config.tile, 16), tl.float32 if by_mass else tl.int32)
        for start in range(0, row.vocab_size, config.tile):
            x, _token = tile_of(row, start, config)
            key = ordered_key(x)
            reached = key[:, None] >= pivot[None, :]
            if by_mass:
                weight = tl.where(key > floor_key, tl.exp(x - largest), 0.0)
                sums += tl.where(reached, weight[:, None], 0.0)
            else:
                sums += reached.to(tl.int32)
        total = tl.sum(sums, axis=0)
        if by_mass:
            total = (total + tl.where(pivot <= floor_key, floor_mass, 0.0)).to(tl.float64)
        chosen = tl.max(tl.where(total >= wanted, pivot, prefix), axis=0)
        prefix = chosen
    return prefix


@jit
def _above(row: tl.tuple, key: tl.tensor, largest: tl.tensor, config: tl.constexpr) -> tl.tuple:
    """-> how many tokens have a larger key, how many this key (not asked of -inf), and the mass of the larger ones."""
    more = tl.zeros((config.tile,), tl.int32)
    equal = tl.zeros((config.tile,), tl.int32)
    mass = tl.zeros((config.tile,), tl.float32)
    for start in range(0, row.vocab_size, config.tile):
        x, _token = tile_of(row, start, config)
        other = ordered_key(x)
        more += (other > key).to(tl.int32)
        equal += (other == key).to(tl.int32)
        mass += tl.where(other > key, tl.exp(x - largest), 0.0)
    return tl.sum(more, axis=0), tl.sum(equal, axis=0), tl.sum(mass, axis=0)


@jit
def _least_likely_enough(row: tl.tuple, largest: tl.tensor, min_p: tl.tensor, config: tl.constexpr) -> tl.tensor:
    """The least x with exp(x - largest) >= min_p."""
    low = tl.full((config.tile,), INFINITY, tl.float32)
    for start in range(0, row.vocab_size, config.tile):
        x, _token = tile_of(row, start, config)
        low = tl.minimum(low, tl.where(tl.exp(x - largest) >= min_p, x, INFINITY))
    return tl.min(low, axis=0)


@jit
def _nth_equal(row: tl.tuple, threshold: tl.tensor, count: tl.tensor, config: tl.constexpr) -> tl.tensor:
    """The id of the count-th token, in order of ids, whose x is the threshold."""
    seen = count * 0
    last = seen - 1
    for start in range(0, row.vocab_size, config.tile):
        x, token = tile_of(row, start, config)
        equal = (x == threshold) & (token < row.vocab_size)
        rank = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(equal & (rank <= count), token, -1), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0)
    return last


@jit
def is_kept(x: tl.tensor, token: tl.tensor, threshold: tl.tensor, last_id: tl.tensor) -> tl.tensor:
    """See `Kept`."""
    return (x > threshold) | ((x == threshold) & (token <= last_id))


@jit
def _kept_mass(
    row: tl.tuple, largest: tl.tensor, threshold: tl.tensor, last_id: tl.tensor, config: tl.constexpr
) -> tl.tensor:
    mass = tl.zeros((config.tile,), tl.float32)
    for start in range(0, row.vocab_size, config.tile):
        x, token = tile_of(row, start, config)
        inside = is_kept(x, token, threshold, last_id) & (token < row.vocab_size)
        mass += tl.where(inside, tl.exp(x - largest), 0.0)
    return tl.sum(mass, axis=0)


@jit
def _cut(row: tl.tuple, bounds: tl.tuple, top_k: tl.tensor, top_p: tl.tensor, config: tl.constexpr) -> tl.tuple:
    """bounds = (largest x, finite count) -> key of the last kept tokens, and how many of those with that key stay."""
    largest, count = bounds
    nothing = ordered_key(largest * 0.0 + NEGATIVE_INFINITY)
    key, ties = nothing, count * 0
    if (top_k > 0) & (top_k < count):
        key = _reach(row, top_k, (nothing, 0.0, largest), False, config)
        more, equal, mass = _above(row, key, largest, config)
        ties = top_k - more
    if top_p < 1.0:
        more, equal, mass = _above(row, key, largest, config)
        weight = tl.exp(from_ordered_key(key) - largest)
        at_key = ties.to(tl.float32) * weight
        # In double: a share of a sum of equal masses must fall on the token it falls on by hand.
        wanted = top_p.to(tl.float64) * (mass + at_key).to(tl.float64)
        lower = _reach(row, wanted, (key, at_key, largest), True, config)
        if lower > key:
            more, equal, mass = _above(row, lower, largest, config)
            weight = tl.exp(from_ordered_key(lower) - largest)
            key, ties = lower, equal
        # As few of the equal tokens as reach the mass; those at -inf have none and do not stay.
        needed = tl.ceil((wanted - mass.to(tl.float64)) / tl.maximum(weight, 1e-38).to(tl.float64))
        fewest = tl.minimum(tl.maximum(needed, 1.0), ties.to(tl.float64)).to(tl.int32)
        ties = tl.where(weight > 0, fewest, ties)
    return key, ties


@jit
def _keep_kernel(tensors: tl.tuple, strides: tl.tuple, config: tl.constexpr) -> None:
    program = tl.program_id(0)
    temperature = tl.load(tensors.temperature + program)
    row = Row(tensors.logits + program.to(tl.int64) * strides.logits, temperature, strides.vocab_size)
    largest, count = _largest(row, config)
    tl.store(tensors.largest + program, largest)
    if count == 0:
        tl.store(tensors.threshold + program, INFINITY)
        tl.store(tensors.last_id + program, -1)
        tl.store(tensors.mass + program, 0.0)
    elif temperature == 0:
        tl.store(tensors.threshold + program, largest)
        tl.store(tensors.last_id + program, _nth_equal(row, largest, 1, config))
        tl.store(tensors.mass + program, 1.0)
    else:
        top_k, top_p = tl.load(tensors.top_k + program), tl.load(tensors.top_p + program)
        key, ties = _cut(row, (largest, count), top_k, top_p, config)
        threshold = from_ordered_key(key)
        min_p = tl.load(tensors.min_p + program)
        last_id = strides.vocab_size + ties * 0
        least = threshold
        if min_p > 0:
            least = _least_likely_enough(row, largest, min_p, config)
        if least > threshold:
            threshold = least
        else:
            last_id = _nth_equal(row, threshold, ties, config)
        tl.store(tensors.threshold + program, threshold)
        tl.store(tensors.last_id + program, last_id)
        tl.store(tensors.mass + program, _kept_mass(row, largest, threshold, last_id, config))


def triton_keep(logits: torch.Tensor, params: Truncation) -> Kept:
    """logits [R, V] -> Kept of R rows, new memory."""
    assert_rows(logits)
    rows, device = logits.shape[:1], logits.device
    largest, threshold, mass = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
    kept = Kept(largest, threshold, torch.empty(rows, dtype=torch.int32, device=device), mass)
    if logits.shape[0]:
        _keep_kernel[(logits.shape[0],)](
            _Tensors(
                logits,
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
                kept.largest,
                kept.threshold,
                kept.last_id,
                kept.mass,
            ),
            _Strides(logits.stride(0), int(logits.shape[1])),
            Config(TILE_TOKENS),
            **launch_options(NUM_WARPS),
        )
    return kept
