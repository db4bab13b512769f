"""The compiled group linear equals the reference bit for bit, whatever the shape, the format and the company."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from engines.ops.group_linear import (
    NativeGroupLinear,
    aligned_bytes,
    pack_panels,
    quantize_activations,
    reference_group_linear,
    unpack_panels,
    why_unsupported,
)
from engines.ops.native import NativeUnavailableError, Pool
from engines.quant.group import GroupQuant

# bits, group, scale dtype, stored minima: every path through the kernel.
FORMATS = [
    (bits, group, dtype, minima)
    for bits in (4, 8)
    for group in (16, 32, 128)
    for dtype in (np.float16, np.float32)
    for minima in (False, True)
]
BAND = 64


def random_weight(
    outputs: int, inputs: int, form: tuple[int, int, type, bool] = (4, 32, np.float16, True), seed: int = 0
) -> GroupQuant:
    bits, group, dtype, minima = form
    rng = np.random.default_rng(seed)
    shape = (outputs, inputs // group)
    return GroupQuant(
        rng.integers(0, 1 << bits, size=(outputs, inputs), dtype=np.uint8),
        rng.normal(0.0, 0.02, size=shape).astype(dtype),
        rng.normal(0.0, 0.1, size=shape).astype(dtype) if minima else None,
        0.0 if minima else float(1 << (bits - 1)),
        bits,
    )


def random_rows(rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """Rows with outliers, zeros and tiny groups."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    x[:, ::37] *= 50.0
    x[0, :32] = 0.0
    x[-1, -32:] = 1e-33
    return x


def linear(library: ctypes.CDLL, weight: GroupQuant, threads: int = 1, bias: np.ndarray | None = None):
    return NativeGroupLinear(library, Pool(library, threads), pack_panels(weight), bias)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_format_equals_the_reference(native_library: ctypes.CDLL, form: tuple[int, int, type, bool]) -> None:
    weight = random_weight(44, 256, form, seed=1)
    bias = np.random.default_rng(2).normal(size=44).astype(np.float32)
    kernel = linear(native_library, weight, threads=2, bias=bias)
    for rows in (1, 5, 13):
        x = random_rows(rows, 256, seed=rows)
        assert torch.equal(kernel(x), reference_group_linear(x, weight, torch.from_numpy(bias)))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 7, 12, 13, 31, 48, 49, 67])
def test_every_number_of_rows_equals_the_reference(native_library: ctypes.CDLL, rows: int) -> None:
    for bits in (4, 8):
        weight = random_weight(24, 96, (bits, 32, np.float16, bits == 4), seed=3)
        x = random_rows(rows, 96, seed=rows)
        assert torch.equal(linear(native_library, weight)(x), reference_group_linear(x, weight))


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 32), (7, 64), (8, 4096), (9, 160), (17, 1536), (23, 576), (65, 32)]
)
def test_awkward_sizes_equal_the_reference(native_library: ctypes.CDLL, outputs: int, inputs: int) -> None:
    for bits in (4, 8):
        weight = random_weight(outputs, inputs, (bits, 32, np.float16, True), seed=4)
        x = random_rows(7, inputs, seed=5)
        assert torch.equal(linear(native_library, weight, threads=2)(x), reference_group_linear(x, weight))


def test_the_largest_codes_do_not_overflow(native_library: ctypes.CDLL) -> None:
    """All codes at their ends: the sums of a group come within 7 % of what 16 bits hold."""
    for bits in (4, 8):
        codes = np.full((8, 64), (1 << bits) - 1, dtype=np.uint8)
        weight = GroupQuant(codes, np.ones((8, 2), dtype=np.float16), None, 0.0, bits)
        for sign in (1.0, -1.0):
            y = linear(native_library, weight)(torch.full((7, 64), sign))
            assert torch.equal(y, torch.full((7, 8), sign * 64 * ((1 << bits) - 1)))


def test_nothing_outside_the_rows_is_read_or_written(native_library: ctypes.CDLL) -> None:
    """NaN bands around every buffer: read, they would spread; written, they would vanish."""
    for rows, outputs in ((1, 13), (5, 8), (49, 21)):
        weight = random_weight(outputs, 96, seed=6)
        packed = pack_panels(weight)
        banded = aligned_bytes(packed.data.nbytes + 2 * BAND)
        banded[:] = 0xFF  # as float16 or float32 scales, NaN
        banded[BAND:-BAND] = packed.data
        inside = pack_panels(weight)
        object.__setattr__(inside, "data", banded[BAND:-BAND])
        x_band = torch.full((rows * 96 + 2 * BAND,), float("nan"))
        y_band = torch.full((rows * outputs + 2 * BAND,), float("nan"))
        x, y = x_band[BAND:-BAND].view(rows, 96), y_band[BAND:-BAND].view(rows, outputs)
        x.copy_(random_rows(rows, 96))
        NativeGroupLinear(native_library, Pool(native_library, 2), inside).into(x, y)
        assert torch.equal(y, reference_group_linear(x, weight))
        assert torch.isnan(y_band[:BAND]).all()
        assert torch.isnan(y_band[-BAND:]).all()


def test_a_row_does_not_know_its_neighbours_its_place_or_the_threads(native_library: ctypes.CDLL) -> None:
    for bits in (4, 8):
        weight = random_weight(40, 320, (bits, 32, np.float16, True), seed=7)
        x = random_rows(67, 320, seed=8)
        whole = linear(native_library, weight, threads=1)(x)
        for threads in (2, 3):
            assert torch.equal(linear(native_library, weight, threads=threads)(x), whole)
        kernel = linear(native_library, weight, threads=2)
        for rows in (1, 2, 5, 6, 7, 47, 48, 50):
            assert torch.equal(kernel(x[:rows].clone()), whole[:rows])
            assert torch.equal(kernel(x[67 - rows :].clone()), whole[67 - rows :])
        order = torch.randperm(67, generator=torch.Generator().manual_seed(9))
        assert torch.equal(kernel(x[order]), whole[order])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_stays_in_its_row(native_library: ctypes.CDLL, bad: float) -> None:
    weight = random_weight(16, 64, seed=10)
    x = random_rows(9, 64, seed=11)
    clean = linear(native_library, weight)(x)
    x[4, 40] = bad
    y = linear(native_library, weight)(x)
    assert not torch.isfinite(y[4]).any()
    others = torch.arange(9) != 4
    assert torch.equal(y[others], clean[others])


def test_activations_keep_eight_bits_of_their_own_group() -> None:
    x = random_rows(3, 128, seed=12)
    codes, scales = quantize_activations(x)
    assert int(codes.abs().max()) == 127
    assert torch.equal(codes, codes.round())
    error = (codes * scales[..., None]).reshape(x.shape) - x
    assert bool((error.abs().reshape(3, 4, 32) <= scales[..., None] * 0.5001 + 1e-30).all())


def test_the_product_is_close_to_that_of_the_floats(native_library: ctypes.CDLL) -> None:
    weight = random_weight(64, 512, seed=13)
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(14))
    exact = x.double() @ torch.from_numpy(weight.dequantize()).double().t()
    error = (linear(native_library, weight)(x).double() - exact).norm() / exact.norm()
    assert error < 0.01


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_packing_loses_nothing(form: tuple[int, int, type, bool]) -> None:
    weight = random_weight(19, 256, form, seed=15)
    back = unpack_panels(pack_panels(weight))
    assert (back.bits, back.zero, back.group) == (weight.bits, weight.zero, weight.group)
    np.testing.assert_array_equal(back.codes, weight.codes)
    np.testing.assert_array_equal(back.scales, weight.scales)
    if weight.minima is None:
        assert back.minima is None
    else:
        np.testing.assert_array_equal(back.minima, weight.minima)


def test_what_does_not_fit_panels_is_refused() -> None:
    odd = GroupQuant(np.zeros((8, 48), dtype=np.uint8), np.ones((8, 3), dtype=np.float16), None, 8.0, 4)
    assert why_unsupported(odd) == "48 inputs are not a multiple of 32"
    with pytest.raises(ValueError, match="48 inputs are not a multiple of 32"):
        pack_panels(odd)
    small = GroupQuant(np.zeros((8, 64), dtype=np.uint8), np.ones((8, 8), dtype=np.float16), None, 8.0, 4)
    with pytest.raises(ValueError, match="groups of 8 are neither 16 nor a multiple of 32"):
        pack_panels(small)


def test_a_matrix_that_contradicts_itself_is_not_run(native_library: ctypes.CDLL) -> None:
    kernel = linear(native_library, random_weight(8, 64, seed=16))
    kernel._matrix.panel_bytes -= 32
    with pytest.raises(NativeUnavailableError, match="do not take"):
        kernel(torch.zeros(1, 64))
