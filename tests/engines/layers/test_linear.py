"""A projection is built in whichever format its packed tensors have."""

from __future__ import annotations

import pytest
import torch

from engines.layers.linear import Float32Linear, Int8Linear, build_linear
from engines.ops.linear_int8 import quantize_rows, reference_linear_int8

WEIGHT = torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
BIAS = torch.arange(24.0)
X = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))


def test_float32() -> None:
    layer = build_linear({"p.weight": WEIGHT, "other.rows": WEIGHT}, "p")
    assert isinstance(layer, Float32Linear)
    torch.testing.assert_close(layer(X), X @ WEIGHT.t())
    biased = build_linear({"p.weight": WEIGHT, "p.bias": BIAS}, "p")
    torch.testing.assert_close(biased(X), X @ WEIGHT.t() + BIAS)


@pytest.mark.parametrize(("part", "fine"), [("rows", False), ("fine_rows", True)])
def test_int8(part: str, fine: bool) -> None:
    rows, scales = quantize_rows(WEIGHT)
    layer = build_linear({f"p.{part}": rows, "p.scales": scales, "p.bias": BIAS}, "p")
    assert isinstance(layer, Int8Linear)
    torch.testing.assert_close(layer(X), reference_linear_int8(X, rows, scales, BIAS, fine=fine), rtol=1e-5, atol=1e-5)


def test_a_projection_that_is_not_there_is_our_mistake() -> None:
    with pytest.raises(KeyError, match=r"q\.weight"):
        build_linear({"p.weight": WEIGHT}, "q")
