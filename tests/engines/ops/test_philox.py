"""Counted random numbers: the published answers of Philox 4x32-10, and the laws the sampler relies on."""

from __future__ import annotations

import math

import pytest
import torch

from engines.ops.philox import STREAM_ACCEPT, STREAM_DRAW, exponential, random_bits, unit_interval


@pytest.mark.parametrize(
    ("counter", "key", "first_word"),
    [
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ],
)
def test_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, int], first_word: int) -> None:
    seed = key[0] | (key[1] << 32)
    signed = seed - (1 << 64) if seed >> 63 else seed
    index, position, choice, stream = counter
    bits = random_bits(torch.tensor(signed), torch.tensor(choice), torch.tensor(position), stream, torch.tensor(index))
    assert int(bits) == first_word


def test_every_coordinate_matters_and_nothing_else() -> None:
    one = torch.tensor(1)
    index = torch.arange(1000)
    base = random_bits(one, one, one, STREAM_DRAW, index)
    assert torch.equal(base[17:19], random_bits(one, one, one, STREAM_DRAW, torch.tensor([17, 18])))
    others = [
        random_bits(one + 1, one, one, STREAM_DRAW, index),
        random_bits(one + (1 << 32), one, one, STREAM_DRAW, index),
        random_bits(one, one + 1, one, STREAM_DRAW, index),
        random_bits(one, one, one + 1, STREAM_DRAW, index),
        random_bits(one, one, one, STREAM_ACCEPT, index),
    ]
    assert all(int((base == other).sum()) <= 1 for other in others)


def test_rows_broadcast() -> None:
    seeds = torch.tensor([5, 6])[:, None]
    table = random_bits(seeds, torch.tensor(0), torch.tensor(3), STREAM_DRAW, torch.arange(4))
    assert table.shape == (2, 4)
    assert torch.equal(table[1], random_bits(torch.tensor(6), torch.tensor(0), torch.tensor(3), 0, torch.arange(4)))


def test_ends_of_the_unit_interval() -> None:
    ends = unit_interval(torch.tensor([0, 1, 0xFFFFFFFF]))
    assert ends.tolist() == [2.0**-33, 1.5 * 2.0**-32, 1.0]
    draws = exponential(torch.tensor([0, 0xFFFFFFFF]))
    assert draws.tolist() == [2.0**-33, math.inf]


def test_exponential_has_its_distribution() -> None:
    """Kolmogorov-Smirnov over 100,000 draws: below the 1 % critical value, 1.63 / sqrt(n)."""
    count = 100_000
    draws = exponential(random_bits(torch.tensor(7), torch.tensor(0), torch.tensor(0), 0, torch.arange(count)))
    cumulative = 1.0 - torch.exp(-draws.double().sort().values)
    steps = torch.arange(1, count + 1).double() / count
    assert float((cumulative - steps).abs().max()) < 1.63 / math.sqrt(count)


def test_the_series_meets_the_logarithm() -> None:
    bits = (torch.tensor([0.0156, 0.015624, 0.015626, 0.0157], dtype=torch.float64) * 2.0**32).long()
    exact = -torch.log1p(-(bits.double() + 0.5) / 2.0**32)
    assert torch.allclose(exponential(bits).double(), exact, rtol=5e-6, atol=0)
