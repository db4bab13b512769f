"""Layouts of GPTQ, AWQ and compressed-tensors against packing written out by hand; granularities."""

from __future__ import annotations

import numpy as np
import pytest

from engines.quant.granularity import Granularity
from engines.quant.group import quantize_4bit, quantize_channels
from engines.quant.packed_int import from_awq, from_gptq, from_int8, from_packed_rows, unpack_words

OUTPUTS, INPUTS, GROUP = 16, 64, 32


def plain(seed: int, bits: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [N, K], zeros [N, G] of at least 1, scales [N, G] float16."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (OUTPUTS, INPUTS))
    zeros = rng.integers(1, 1 << bits, (OUTPUTS, INPUTS // GROUP))
    return codes, zeros, rng.uniform(0.001, 0.1, zeros.shape).astype(np.float16)


def by_hand(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """w = scale * (code - zero), one number at a time."""
    out = np.zeros(codes.shape, dtype=np.float32)
    for n in range(OUTPUTS):
        for k in range(INPUTS):
            g = k // GROUP
            out[n, k] = np.float32(scales[n, g]) * np.float32(int(codes[n, k]) - int(zeros[n, g]))
    return out


def words(rows: int, columns: int) -> np.ndarray:
    return np.zeros((rows, columns), dtype=np.uint32)


def gptq_words(codes: np.ndarray, zeros: np.ndarray, bits: int, less: int) -> tuple[np.ndarray, np.ndarray]:
    pack = 32 // bits
    qweight, qzeros = words(INPUTS // pack, OUTPUTS), words(INPUTS // GROUP, OUTPUTS // pack)
    for n in range(OUTPUTS):
        for k in range(INPUTS):
            qweight[k // pack, n] |= np.uint32(int(codes[n, k]) << bits * (k % pack))
        for g in range(INPUTS // GROUP):
            qzeros[g, n // pack] |= np.uint32(int(zeros[n, g] - less) << bits * (n % pack))
    return qweight.view(np.int32), qzeros.view(np.int32)


@pytest.mark.parametrize(("bits", "less"), [(4, 1), (4, 0), (8, 1)])
def test_gptq(bits: int, less: int) -> None:
    codes, zeros, scales = plain(1, bits)
    quant = from_gptq(*gptq_words(codes, zeros, bits, less), scales.T, bits, first_zero=less)
    quant.check()
    assert (quant.bits, quant.group, quant.shape) == (bits, GROUP, (OUTPUTS, INPUTS))
    np.testing.assert_array_equal(quant.dequantize(), by_hand(codes, zeros, scales))


def test_awq() -> None:
    """Nibble i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight."""
    codes, zeros, scales = plain(2)
    qweight, qzeros = words(INPUTS, OUTPUTS // 8), words(INPUTS // GROUP, OUTPUTS // 8)
    for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        for word in range(OUTPUTS // 8):
            for k in range(INPUTS):
                qweight[k, word] |= np.uint32(int(codes[8 * word + column, k]) << 4 * nibble)
            for g in range(INPUTS // GROUP):
                qzeros[g, word] |= np.uint32(int(zeros[8 * word + column, g]) << 4 * nibble)
    quant = from_awq(qweight.view(np.int32), qzeros.view(np.int32), scales.T)
    quant.check()
    np.testing.assert_array_equal(quant.dequantize(), by_hand(codes, zeros, scales))


def test_one_zero_for_all_needs_no_minima_and_stays_exact() -> None:
    codes, zeros, scales = plain(3)
    zeros[:] = 8
    quant = from_gptq(*gptq_words(codes, zeros, 4, 1), scales.T, 4)
    assert (quant.minima, quant.zero, quant.scales.dtype) == (None, 8.0, np.dtype(np.float16))
    np.testing.assert_array_equal(quant.dequantize(), by_hand(codes, zeros, scales))


def test_packed_rows() -> None:
    codes, _, scales = plain(4)
    packed = words(OUTPUTS, INPUTS // 8)
    for k in range(INPUTS):
        packed[:, k // 8] |= (codes[:, k] << 4 * (k % 8)).astype(np.uint32)
    np.testing.assert_array_equal(unpack_words(packed.view(np.int32), 4), codes)
    quant = from_packed_rows(packed.view(np.int32), scales, 4)
    np.testing.assert_array_equal(quant.dequantize(), by_hand(codes, np.full(scales.shape, 8), scales))


@pytest.mark.parametrize(
    ("granularity", "shape"),
    [
        (Granularity(kind="tensor"), (1,)),
        (Granularity(kind="channel"), (OUTPUTS, 1)),
        (Granularity(kind="group", columns=32), (OUTPUTS, 2)),
        (Granularity(kind="block", rows=12, columns=32), (2, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("with_zeros", [False, True])
def test_int8_of_every_granularity(granularity: Granularity, shape: tuple[int, ...], with_zeros: bool) -> None:
    rng = np.random.default_rng(5)
    rows = rng.integers(-128, 128, (OUTPUTS, INPUTS)).astype(np.int8)
    scales = rng.uniform(0.001, 0.1, shape).astype(np.float32)
    zeros = rng.integers(-20, 20, shape).astype(np.int8) if with_zeros else None
    quant = from_int8(rows, scales, granularity, zeros)
    quant.check()
    grid = granularity.scales_shape(OUTPUTS, INPUTS)
    expected = np.zeros((OUTPUTS, INPUTS), dtype=np.float32)
    for n in range(OUTPUTS):
        for k in range(INPUTS):
            r = {1: 0, OUTPUTS: n}.get(grid[0], n // 12)
            at = r, k * grid[1] // INPUTS
            zero = 0 if zeros is None else int(zeros.reshape(grid)[at])
            expected[n, k] = scales.reshape(grid)[at] * np.float32(int(rows[n, k]) - zero)
    np.testing.assert_allclose(quant.dequantize(), expected, rtol=0, atol=0 if zeros is None else 3e-6)


def test_granularities_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="granularity group has rows 0, columns 0"):
        Granularity(kind="group")
    with pytest.raises(ValueError, match="64 inputs are not a multiple of the group of 48"):
        Granularity(kind="group", columns=48).scales_shape(16, 64)
    with pytest.raises(ValueError, match=r"3 scales, but channel of \[16, 64\] has 16"):
        Granularity(kind="channel").scales_by_group(np.ones(3, dtype=np.float32), 16, 64)
    assert str(Granularity(kind="block", rows=128, columns=64)) == "block of 128 x 64"


def test_our_own_four_bits_beat_plain_rounding() -> None:
    weight = np.random.default_rng(6).normal(0.0, 0.02, (32, 256)).astype(np.float32)
    quant = quantize_4bit(weight, 128)
    quant.check()
    assert (quant.bits, str(quant.granularity)) == (4, "group of 128")
    x = weight.reshape(32, -1, 128)
    step = (x.max(axis=2) - x.min(axis=2))[:, :, None] / 15
    plain_error = np.square(np.rint((x - x.min(axis=2)[:, :, None]) / step) * step + x.min(axis=2)[:, :, None] - x)
    error = np.square(quant.dequantize() - weight)
    assert float(error.sum()) < 0.97 * float(plain_error.sum())
    assert not quantize_4bit(np.zeros((2, 128), dtype=np.float32)).dequantize().any()
    with pytest.raises(ValueError, match="100 inputs are not a multiple of 128"):
        quantize_4bit(weight[:, :100])


def test_a_scale_a_channel() -> None:
    weight = np.random.default_rng(7).normal(0.0, 0.02, (9, 96)).astype(np.float32)
    quant = quantize_channels(weight)
    assert (quant.bits, str(quant.granularity)) == (8, "channel")
    assert np.all(np.abs(quant.dequantize() - weight) <= 0.57 * quant.scales.astype(np.float32))
