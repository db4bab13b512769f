"""Drawing on CUDA: `draw` and `probabilities` of `engines/ops/truncation.py`, after `engines/ops/triton/truncation.py`.

A token is drawn by an exponential race in one walk over a row: no sort, no running sum, hence no order of tiles that
could show. A program does one row.
Read next: `engines/ops/triton/rejection.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.philox import STREAM_DRAW, StreamKeys
from engines.ops.triton.kernel import assert_rows, ceil_div, jit, launch_options
from engines.ops.triton.numeric import exponential, random_bits
from engines.ops.triton.truncation import NUM_WARPS, TILE_TOKENS, Config, Row, is_kept, tile_of
from engines.ops.truncation import Kept, Truncation


class Place(NamedTuple):
    """Whose random numbers: scalars of one row."""

    seed: tl.tensor
    choice: tl.tensor
    position: tl.tensor


class _Tensors(NamedTuple):
    logits: torch.Tensor  # [R, V]
    temperature: torch.Tensor  # [R], and so on
    largest: torch.Tensor
    threshold: torch.Tensor
    last_id: torch.Tensor
    mass: torch.Tensor
    seeds: torch.Tensor | None
    choices: torch.Tensor | None
    positions: torch.Tensor | None
    out: torch.Tensor  # tokens [R] int32, or probabilities [R, V]


class _Strides(NamedTuple):
    logits: int
    out: int
    vocab_size: int


@jit
def leader(lead: tl.tuple, weight: tl.tensor, token: tl.tensor, place: tl.tuple, stream: tl.constexpr) -> tl.tuple:
    """One tile of the race: lead = (best score, winner) so far, weight and token [tile] -> the new lead.

    Of equal scores the lowest id wins; a weight of 0 never does.
    """
    best, winner = lead
    score = weight / exponential(random_bits(place.seed, place.choice, place.position, stream, token))
    top = tl.max(score, axis=0)
    first = tl.min(tl.where(score == top, token, 0x7FFFFFFF), axis=0)
    is_better = top > best
    return tl.where(is_better, top, best), tl.where(is_better, first, winner)


@jit
def _tile_probability(
    tensors: tl.tuple, strides: tl.tuple, row: tl.tensor, start: tl.tensor, config: tl.constexpr
) -> tl.tuple:
    """-> p [tile] of one row's tokens, 0 where not kept or past the row, and ids [tile]."""
    source = Row(
        tensors.logits + row.to(tl.int64) * strides.logits,
        tl.load(tensors.temperature + row),
        strides.vocab_size,
    )
    x, token = tile_of(source, start, config)
    kept = is_kept(x, token, tl.load(tensors.threshold + row), tl.load(tensors.last_id + row))
    p = tl.exp(x - tl.load(tensors.largest + row)) / tl.load(tensors.mass + row)
    return tl.where(kept & (token < strides.vocab_size), p, 0.0), token


@jit
def _draw_kernel(tensors: tl.tuple, strides: tl.tuple, stream: tl.constexpr, config: tl.constexpr) -> None:
    row = tl.program_id(0)
    place = Place(tl.load(tensors.seeds + row), tl.load(tensors.choices + row), tl.load(tensors.positions + row))
    best, winner = 0.0, row * 0 - 1
    for start in range(0, strides.vocab_size, config.tile):
        p, token = _tile_probability(tensors, strides, row, start, config)
        best, winner = leader((best, winner), p, token, place, stream)
    tl.store(tensors.out + row, winner)


@jit
def _probabilities_kernel(tensors: tl.tuple, strides: tl.tuple, config: tl.constexpr) -> None:
    row = tl.program_id(0)
    p, token = _tile_probability(tensors, strides, row, tl.program_id(1) * config.tile, config)
    tl.store(tensors.out + row.to(tl.int64) * strides.out + token, p, mask=token < strides.vocab_size)


def triton_draw(logits: torch.Tensor, params: Truncation, kept: Kept, keys: StreamKeys) -> torch.Tensor:
    """logits [R, V] -> tokens [R] int32, new memory."""
    out = torch.empty((logits.shape[0],), dtype=torch.int32, device=logits.device)
    if logits.shape[0]:
        _draw_kernel[(logits.shape[0],)](
            _tensors(logits, params, kept, keys, out),
            _Strides(logits.stride(0), 0, int(logits.shape[1])),
            STREAM_DRAW,
            Config(TILE_TOKENS),
            **launch_options(NUM_WARPS),
        )
    return out


def triton_probabilities(logits: torch.Tensor, params: Truncation, kept: Kept) -> torch.Tensor:
    """logits [R, V] -> [R, V] float32, new memory."""
    out = torch.empty(tuple(logits.shape), dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        _probabilities_kernel[(logits.shape[0], ceil_div(int(logits.shape[1]), TILE_TOKENS))](
            _tensors(logits, params, kept, None, out),
            _Strides(logits.stride(0), out.stride(0), int(logits.shape[1])),
            Config(TILE_TOKENS),
            **launch_options(4),
        )
    return out


def _tensors(
    logits: torch.Tensor, params: Truncation, kept: Kept, keys: StreamKeys | None, out: torch.Tensor
) -> _Tensors:
    assert_rows(logits)
    return _Tensors(
        logits=logits,
        temperature=params.temperature,
        largest=kept.largest,
        threshold=kept.threshold,
        last_id=kept.last_id,
        mass=kept.mass,
        seeds=None if keys is None else keys.seeds,
        choices=None if keys is None else keys.choices,
        positions=None if keys is None else keys.positions,
        out=out,
    )
