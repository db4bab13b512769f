"""Float32 and int8 projections: against their definitions; a row's bits do not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engines.ops.linear_fp32 import cpu_linear_float32, pack_float32, reference_linear_float32
from engines.ops.linear_int8 import (
    cpu_linear_int8,
    cpu_linear_int8_fine,
    pack_int8,
    quantize_rows,
    reference_linear_int8,
)

ROWS = (1, 2, 3, 4, 5, 7, 16, 31, 64, 150)
SHAPES = [(64, 96), (576, 960), (1536, 576), (100, 33), (32, 7)]


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_float32(inputs: int, outputs: int, threads: None) -> None:
    x, weight, bias = normal(150, inputs), normal(outputs, inputs, seed=1), normal(outputs, seed=2)
    for given in (None, bias):
        packed = pack_float32(weight, given)
        together = cpu_linear_float32(x, packed)
        exact = reference_linear_float32(x.double(), weight.double(), None if given is None else given.double())
        torch.testing.assert_close(together.double(), exact, rtol=0, atol=2e-4)
        for rows in ROWS:
            assert torch.equal(cpu_linear_float32(x[:rows], packed), together[:rows]), rows
        assert torch.equal(cpu_linear_float32(x.flip(0), packed), together.flip(0))


@pytest.mark.parametrize("fine", [False, True], ids=["7 bits", "14 bits"])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_int8_agrees_with_the_definition_and_rows_are_their_own(
    inputs: int, outputs: int, fine: bool, threads: None
) -> None:
    x, bias = normal(150, inputs), normal(outputs, seed=2)
    x[3] = 0.0
    x[4] *= 1e4
    rows_of_weight, scales = quantize_rows(normal(outputs, inputs, seed=1))
    product = cpu_linear_int8_fine if fine else cpu_linear_int8
    for given in (None, bias):
        packed = pack_int8(rows_of_weight, scales, given)
        together = product(x, packed)
        exact = reference_linear_int8(x, rows_of_weight, scales, given, fine=fine)
        # Where x lies between two levels to the last bit the two may take different sides: one level of one input.
        torch.testing.assert_close(together, exact, rtol=1e-5, atol=3e-3 if fine else 0.05)
        assert float(((together - exact).abs() > 1e-4 * exact.abs() + 1e-5).float().mean()) < 0.02
        for rows in ROWS:
            assert torch.equal(product(x[:rows], packed), together[:rows]), rows
        assert torch.equal(product(x.flip(0), packed), together.flip(0))


def test_int8_keeps_the_largest_values_without_saturation() -> None:
    """All weights and all inputs at their limits: what eight-bit activations would saturate on AVX2."""
    packed = pack_int8(torch.full((8, 512), 127, dtype=torch.int8), torch.full((8,), 1 / 127))
    for product in (cpu_linear_int8, cpu_linear_int8_fine):
        torch.testing.assert_close(product(torch.full((2, 512), 3.0), packed), torch.full((2, 8), 1536.0))
        torch.testing.assert_close(product(torch.full((2, 512), -3.0), packed), torch.full((2, 8), -1536.0))


def test_a_neighbour_with_an_outlier_changes_nothing() -> None:
    """What torch's own dynamic quantization gets wrong: one scale for the whole batch."""
    packed = pack_int8(*quantize_rows(normal(32, 64)))
    x = normal(2, 64, seed=1)
    before = cpu_linear_int8(x, packed)[0]
    x[1] *= 1e6
    assert torch.equal(cpu_linear_int8(x, packed)[0], before)


def test_fourteen_bits_are_a_hundred_times_finer_than_seven() -> None:
    weight, x = normal(64, 512, seed=1), normal(32, 512)
    x[:, 7] = 60.0  # an outlier a row
    rows, scales = quantize_rows(weight)
    exact = x.double() @ (rows.double() * scales.double()[:, None]).t()
    coarse, fine = (
        float((product(x, pack_int8(rows, scales)).double() - exact).pow(2).mean().sqrt())
        for product in (cpu_linear_int8, cpu_linear_int8_fine)
    )
    assert coarse > 100 * fine
    assert fine < 0.06


def test_weights_round_to_the_nearest_of_255_levels_a_row() -> None:
    weight = normal(16, 64)
    weight[5] = 0.0
    rows, scales = quantize_rows(weight)
    assert int(rows.abs().amax()) == 127
    assert int(rows[5].abs().amax()) == 0
    error = (rows.float() * scales[:, None] - weight).abs()
    assert bool((error <= scales[:, None] * 0.5001).all())


def test_packing_leaves_torchs_quantized_engine_as_it_was() -> None:
    before = torch.backends.quantized.engine
    pack_int8(*quantize_rows(normal(4, 8)))
    assert torch.backends.quantized.engine == before
