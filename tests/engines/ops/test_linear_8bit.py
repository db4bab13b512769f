"""8-bit rows and products, int8 and e4m3: what the references promise."""

from __future__ import annotations

import torch

from engines.ops.linear_fp8 import reference_linear_fp8, reference_quantize_rows_fp8
from engines.ops.linear_w8a8 import reference_linear_w8a8, reference_quantize_rows
from engines.ops.log_softmax import reference_log_softmax


def test_int8_rows_come_back_within_half_a_step() -> None:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(0))
    rows, scales = reference_quantize_rows(x)
    assert bool(((rows * scales[:, None] - x).abs() <= 0.5001 * scales[:, None]).all())
    assert rows.abs().amax(1).tolist() == [127] * 4


def test_products_are_near_those_of_floats() -> None:
    x, weight = (torch.randn(n, 300, generator=torch.Generator().manual_seed(n)) for n in (4, 6))
    bias = torch.arange(6.0)
    exact = x @ weight.t() + bias
    for quantize, product, allowed in (
        (reference_quantize_rows, reference_linear_w8a8, 0.015),
        (reference_quantize_rows_fp8, reference_linear_fp8, 0.06),
    ):
        out = product(*quantize(x), *quantize(weight), bias)
        assert float((out - exact).square().mean() / exact.square().mean()) ** 0.5 < allowed


def test_a_row_of_zeros_stays_one() -> None:
    for quantize in (reference_quantize_rows, reference_quantize_rows_fp8):
        rows, scales = quantize(torch.zeros(1, 5))
        assert not bool(rows.float().any())
        assert float(scales) > 0


def test_log_softmax_sums_to_one() -> None:
    out = reference_log_softmax(torch.tensor([[1.0, 2.0, float("-inf")]]))
    assert torch.allclose(out.exp().sum(-1), torch.ones(1))
    assert float(out[0, 2]) == float("-inf")
