"""Verification of drafts on CUDA: contract of `engines/ops/rejection.py`.

`verify_sampled` is two kernels: one program a row races the token that would end a run there (it reads the row once),
then one program a sequence decides how far its drafts stand, all of them at once in one vector.
`verify_matching` is the second alone. Row-local; a number drawn is a function of its place (`engines/ops/philox.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.philox import STREAM_ACCEPT, STREAM_DRAW, STREAM_RECOVER, StreamKeys
from engines.ops.triton.attention_tile import find_sequence
from engines.ops.triton.draw import Place, leader
from engines.ops.triton.kernel import assert_rows, jit, launch_options, next_power_of_2
from engines.ops.triton.numeric import random_bits, unit_interval
from engines.ops.triton.truncation import NUM_WARPS, TILE_TOKENS


class _Tensors(NamedTuple):
    draft_ids: torch.Tensor  # [D]
    draft_start: torch.Tensor  # [S + 1]
    p: torch.Tensor | None  # [D + S, V]
    q: torch.Tensor | None  # [D, V]
    has_q: torch.Tensor | None  # [S]
    seeds: torch.Tensor | None  # [S]
    choices: torch.Tensor | None  # [S]
    positions: torch.Tensor | None  # [S]
    ends: torch.Tensor  # [D + S], the token that ends a run at each row
    tokens: torch.Tensor  # [S, W + 1]
    counts: torch.Tensor  # [S]


class _Strides(NamedTuple):
    p: int
    q: int
    vocab_size: int


class _Config(NamedTuple):
    tile: int
    block: int  # >= W + 1
    draw: int  # streams
    accept: int
    recover: int


@jit
def _race(
    row: tl.tensor,
    other: tl.tensor,
    vocab_size: tl.tensor,
    place: tl.tuple,
    minus: tl.constexpr,
    stream: tl.constexpr,
    config: tl.constexpr,
) -> tl.tensor:
    """A token in proportion to row [V], or if `minus` to max(row - other, 0); -1 if that is nowhere positive."""
    best, winner = 0.0, place.position.to(tl.int32) * 0 - 1
    for start in range(0, vocab_size, config.tile):
        token = start + tl.arange(0, config.tile)
        weight = tl.load(row + token, mask=token < vocab_size, other=0.0)
        if minus:
            weight = tl.maximum(weight - tl.load(other + token, mask=token < vocab_size, other=0.0), 0.0)
        best, winner = leader((best, winner), weight, token, place, stream)
    return winner


@jit
def _ends_kernel(tensors: tl.tuple, strides: tl.tuple, num_sequences: tl.tensor, config: tl.constexpr) -> None:
    row = tl.program_id(0)
    sequence = find_sequence(tensors.draft_start, row, num_sequences, 1)
    first = tl.load(tensors.draft_start + sequence).to(tl.int32)
    num_drafts = tl.load(tensors.draft_start + sequence + 1).to(tl.int32) - first
    step = row - first - sequence
    position = tl.load(tensors.positions + sequence) + step
    place = Place(tl.load(tensors.seeds + sequence), tl.load(tensors.choices + sequence), position)
    p = tensors.p + row.to(tl.int64) * strides.p
    with_q = step < num_drafts
    if tensors.has_q is not None:
        with_q = with_q & (tl.load(tensors.has_q + sequence) != 0)
    winner = row * 0 - 1
    if with_q:
        q = tensors.q + (first + step).to(tl.int64) * strides.q
        winner = _race(p, q, strides.vocab_size, place, True, config.recover, config)
    if winner < 0:
        winner = _race(p, p, strides.vocab_size, place, False, config.draw, config)
    tl.store(tensors.ends + row, winner)


@jit
def _stands(
    sequence: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    inside: tl.tensor,
    tensors: tl.tuple,
    strides: tl.tuple,
    config: tl.constexpr,
) -> tl.tensor:
    """Whether each draft [block] of a sequence stands by itself."""
    draft = tl.load(tensors.draft_ids + first + step, mask=inside, other=-1)
    row = first + sequence + step
    stands = draft == tl.load(tensors.ends + row, mask=inside, other=-2)
    if tensors.q is not None:
        seed, choice = tl.load(tensors.seeds + sequence), tl.load(tensors.choices + sequence)
        position = tl.load(tensors.positions + sequence) + step
        u = unit_interval(random_bits(seed, choice, position, config.accept, step * 0))
        with_q = inside & (draft >= 0) & (draft < strides.vocab_size)
        if tensors.has_q is not None:
            # A block and not a scalar: the interpreter broadcasts a compared scalar as an integer, which is no mask.
            with_q = with_q & (tl.load(tensors.has_q + sequence + step * 0) != 0)
        p = tl.load(tensors.p + row.to(tl.int64) * strides.p + draft, mask=with_q, other=0.0)
        q = tl.load(tensors.q + (first + step).to(tl.int64) * strides.q + draft, mask=with_q, other=0.0)
        accepted = (p > 0) & (u * q <= p)
        stands = tl.where(with_q, accepted, stands)
    return stands & (draft >= 0)


@jit
def _verify_kernel(tensors: tl.tuple, strides: tl.tuple, width: tl.tensor, config: tl.constexpr) -> None:
    sequence = tl.program_id(0)
    first = tl.load(tensors.draft_start + sequence).to(tl.int32)
    num_drafts = tl.load(tensors.draft_start + sequence + 1).to(tl.int32) - first
    step = tl.arange(0, config.block)
    inside = step < num_drafts
    stands = _stands(sequence, first, step, inside, tensors, strides, config)
    accepted = tl.min(tl.where(inside & (stands == 0), step, num_drafts), axis=0)
    draft = tl.load(tensors.draft_ids + first + step, mask=step < accepted, other=-1)
    end = tl.load(tensors.ends + first + sequence + step, mask=step == accepted, other=-1)
    tokens = tensors.tokens + sequence.to(tl.int64) * (width + 1) + step
    tl.store(tokens, tl.where(step == accepted, end, draft), mask=step <= width)
    tl.store(tensors.counts + sequence, accepted + 1)


def triton_verify_matching(
    draft_ids: torch.Tensor, draft_start: torch.Tensor, drawn_ids: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (tokens [S, width + 1] int32, counts [S] int32), new memory."""
    tokens, counts = _outputs(draft_start, width)
    nothing = (None,) * 6
    tensors = _Tensors(draft_ids, draft_start, *nothing, ends=drawn_ids, tokens=tokens, counts=counts)
    _launch_verify(tensors, width)
    return tokens, counts


def triton_verify_sampled(
    draft_ids: torch.Tensor,
    draft_start: torch.Tensor,
    probabilities: torch.Tensor,
    draft_probabilities: torch.Tensor,
    keys: StreamKeys,
    width: int,
    has_q: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (tokens [S, width + 1] int32, counts [S] int32), new memory."""
    assert_rows(probabilities, draft_probabilities)
    tokens, counts = _outputs(draft_start, width)
    num_rows = int(probabilities.shape[0])
    ends = torch.empty((num_rows,), dtype=torch.int32, device=probabilities.device)
    tensors = _Tensors(
        draft_ids,
        draft_start,
        probabilities,
        draft_probabilities,
        None if has_q is None else has_q.view(torch.uint8),
        keys.seeds,
        keys.choices,
        keys.positions,
        ends,
        tokens,
        counts,
    )
    if num_rows:
        _ends_kernel[(num_rows,)](
            tensors, _strides(tensors), int(counts.shape[0]), _config(width), **launch_options(NUM_WARPS)
        )
    _launch_verify(tensors, width)
    return tokens, counts


def _outputs(draft_start: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_sequences = int(draft_start.shape[0]) - 1
    tokens = torch.empty((num_sequences, width + 1), dtype=torch.int32, device=draft_start.device)
    return tokens, torch.empty((num_sequences,), dtype=torch.int32, device=draft_start.device)


def _strides(tensors: _Tensors) -> _Strides:
    p, q = tensors.p, tensors.q
    if p is None or q is None:
        return _Strides(0, 0, 0)
    return _Strides(p.stride(0), q.stride(0), int(p.shape[1]))


def _config(width: int) -> _Config:
    return _Config(TILE_TOKENS, next_power_of_2(width + 1), STREAM_DRAW, STREAM_ACCEPT, STREAM_RECOVER)


def _launch_verify(tensors: _Tensors, width: int) -> None:
    if tensors.counts.shape[0]:
        _verify_kernel[(int(tensors.counts.shape[0]),)](
            tensors, _strides(tensors), width, _config(width), **launch_options(1)
        )
