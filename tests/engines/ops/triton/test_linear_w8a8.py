"""Rows to int8 and the int8 linear, in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.linear_w8a8 import reference_linear_w8a8, reference_quantize_rows
from engines.ops.triton.linear_w8a8 import triton_linear_w8a8
from engines.ops.triton.row_quantize import triton_quantize_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def int8(lab: Any, rows: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values: torch.Tensor = lab.put(torch.randint(-127, 128, (rows, width), generator=generator).to(torch.int8))
    return values


def product(lab: Any, shape: tuple[int, int, int], dtype: torch.dtype, bias: bool = False) -> None:
    """Bits, not a tolerance: the integer sum is exact and the two roundings are the reference's."""
    rows, num_outputs, depth = shape
    x, weight = int8(lab, rows, depth, 1), int8(lab, num_outputs, depth, 2)
    row_scales, weight_scales = lab.put(lab.randn(rows).abs()), lab.put(lab.randn(num_outputs, seed=1).abs())
    added = lab.randn(num_outputs, seed=3, dtype=dtype) if bias else None
    out = lab.run(triton_linear_w8a8, x, row_scales, weight, weight_scales, added, dtype)
    expected = reference_linear_w8a8(x, row_scales, weight, weight_scales, added, dtype)
    if dtype == torch.bfloat16:
        lab.close(out, expected)  # the interpreter truncates
    else:
        lab.same(out, expected)


def saturated(lab: Any) -> None:
    """All 127 against all -127, 2,000 deep: where 16-bit sums would break."""
    ones = lab.put(torch.full((2, 2000), 127, dtype=torch.int8))
    weight, scales = lab.put(torch.full((3, 2000), -127, dtype=torch.int8)), lab.put(torch.ones(3))
    out = lab.run(triton_linear_w8a8, ones, scales[:2], weight, scales)
    assert out.tolist() == [[-127.0 * 127 * 2000] * 3] * 2


def rows_to_int8(lab: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    x = lab.randn(rows, width, dtype=dtype)
    for found, wanted in zip(lab.run(triton_quantize_rows, x), reference_quantize_rows(x), strict=True):
        lab.same(found, wanted)


def ties_round_to_even(lab: Any) -> None:
    x = lab.put(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 126.5], [0.0] * 8]))
    found, scales = lab.run(triton_quantize_rows, x)
    assert found.tolist() == [[127, 0, 2, 2, 0, -2, -127, 126], [0] * 8]
    assert float(scales[0]) == 1.0


def alone(lab: Any) -> None:
    x, weight = lab.randn(70, 90), int8(lab, 20, 90, 2)
    scales = lab.put(torch.ones(20))
    rows, row_scales = lab.run(triton_quantize_rows, x)
    together = lab.run(triton_linear_w8a8, rows, row_scales, weight, scales)
    for row in (0, 33, 69):
        one, scale = lab.run(triton_quantize_rows, x[row : row + 1])
        lab.same(one, rows[row : row + 1])
        lab.same(lab.run(triton_linear_w8a8, one, scale, weight, scales), together[row : row + 1])


CASES = {
    **{
        f"product-{'x'.join(map(str, shape))}-{str(dtype)[6:]}": partial(product, shape=shape, dtype=dtype)
        for shape in ((1, 1, 1), (3, 65, 130), (66, 64, 128), (2, 100, 576))
        for dtype in DTYPES
    },
    "bias": partial(product, shape=(5, 70, 64), dtype=torch.float32, bias=True),
    "saturated": saturated,
    **{
        f"rows-{rows}x{width}-{str(dtype)[6:]}": partial(rows_to_int8, rows=rows, width=width, dtype=dtype)
        for rows, width in ((1, 1), (3, 100), (2, 1536))
        for dtype in DTYPES
    },
    "ties": ties_round_to_even,
    "alone": alone,
}
ROWS, SCALES = torch.empty(7, 4096, dtype=torch.int8), torch.empty(4096)
LAUNCHES = {
    "product": lambda: triton_linear_w8a8(
        ROWS, SCALES, torch.empty(4096, 4096, dtype=torch.int8), SCALES, None, torch.bfloat16
    ),
    "rows": lambda: triton_quantize_rows(torch.empty(7, 4096, dtype=torch.bfloat16)),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
