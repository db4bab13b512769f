"""Random numbers that are a function of their place: no generator, no state, nothing to hand over or roll back.

Contract: `random_bits(seed, choice, position, stream, index)` -> uint32 values in an int64 tensor: the first word of
Philox 4x32-10 under the key `seed` (64 bits) with the counter (index, position, choice, stream). A replica that takes
over, a neighbour, a rejected draft: none of them moves the numbers of another place. `exponential` makes draws from
Exp(1) of them, `unit_interval` numbers in (0, 1].

A token is drawn as the argmax of p / Exp(1) over the vocabulary (an exponential race): its distribution is p, and it
needs neither a sort nor a running sum, whose rounding would depend on how the vocabulary is cut into tiles.

Source: Salmon, Moraes, Dror, Shaw, 2011, Parallel random numbers: as easy as 1, 2, 3,
https://doi.org/10.1145/2063384.2063405.
Read next: `engines/ops/truncation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MASK = 0xFFFFFFFF
ROUNDS = 10
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)

# What a number is used for: the same place in a sequence needs independent numbers for each.
STREAM_DRAW = 0
STREAM_ACCEPT = 1
STREAM_RECOVER = 2

SERIES_BELOW = 0.015625


@dataclass(frozen=True, slots=True)
class StreamKeys:
    """Of R rows: `seeds` [R] int64 (any 64 bits), `choices` [R] int32, `positions` [R] int32 of the token to draw."""

    seeds: torch.Tensor
    choices: torch.Tensor
    positions: torch.Tensor


def random_bits(
    seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor, stream: int, index: torch.Tensor
) -> torch.Tensor:
    """Integer tensors that broadcast -> int64 in 0 .. 2^32 - 1, of the broadcast shape."""
    counter = [index.long() & MASK, position.long() & MASK, choice.long() & MASK, torch.tensor(stream)]
    key = [seed.long() & MASK, (seed.long() >> 32) & MASK]
    for _ in range(ROUNDS):
        first, third = MULTIPLIERS[0] * counter[0], MULTIPLIERS[1] * counter[2]  # wrap at 2^64: the bits are right
        counter = [
            ((third >> 32) & MASK) ^ counter[1] ^ key[0],
            third & MASK,
            ((first >> 32) & MASK) ^ counter[3] ^ key[1],
            first & MASK,
        ]
        key = [(key[0] + KEY_STEPS[0]) & MASK, (key[1] + KEY_STEPS[1]) & MASK]
    return counter[0]


def unit_interval(bits: torch.Tensor) -> torch.Tensor:
    """uint32 values -> float32 in (0, 1]: (bits + 1/2) / 2^32, rounded."""
    return bits.float() * 2.0**-32 + 2.0**-33


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """uint32 values -> draws from Exp(1), float32, with 2^-33 as the least value."""
    v = unit_interval(bits)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
    return torch.where(v < SERIES_BELOW, series, -torch.log(1.0 - v))
