"""Rows to e4m3 and the e4m3 linear, in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from engines.ops.linear_fp8 import reference_linear_fp8, reference_quantize_rows_fp8
from engines.ops.triton.linear_fp8 import triton_linear_fp8
from engines.ops.triton.row_quantize import triton_quantize_rows_fp8

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn


def product(lab: Any, shape: tuple[int, int, int], dtype: torch.dtype, native: bool, bias: bool = False) -> None:
    rows, num_outputs, depth = shape
    x, weight = (lab.randn(n, depth, seed=n, dtype=torch.float32) for n in (rows, num_outputs))
    x, row_scales = (lab.put(t) for t in reference_quantize_rows_fp8(x))
    weight, weight_scales = (lab.put(t) for t in reference_quantize_rows_fp8(weight))
    added = lab.randn(num_outputs, seed=3, dtype=dtype) if bias else None
    out = lab.run(triton_linear_fp8, x, row_scales, weight, weight_scales, added, dtype, native)
    lab.close(out, reference_linear_fp8(x, row_scales, weight, weight_scales, added, dtype), scale=depth**0.5)


def rows_to_e4m3(lab: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    x = lab.randn(rows, width, dtype=dtype)
    for found, wanted in zip(lab.run(triton_quantize_rows_fp8, x), reference_quantize_rows_fp8(x), strict=True):
        lab.same(found, wanted)


def every_byte(lab: Any) -> None:
    """All 254 numbers of e4m3 through the decoder, each alone against a one."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    x, one = lab.put(codes[:, None]).view(FP8), lab.put(torch.ones(1, 1).to(FP8).view(torch.uint8)).view(FP8)
    ones = lab.put(torch.ones(254))
    out = lab.run(triton_linear_fp8, x, ones, one, ones[:1], None, torch.float32, False)
    lab.same(out + 0.0, codes.view(FP8).float()[:, None] + 0.0)


def every_step(lab: Any) -> None:
    """Numbers on, beside and halfway between all neighbours of e4m3 round as torch rounds them."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    halves = (codes[1:] + codes[:-1]) / 2
    values = torch.cat((codes, halves, torch.nextafter(halves, torch.tensor(0.0)), torch.nextafter(halves, codes[1:])))
    x = lab.put(torch.cat((values, -values))[None])
    found, scales = lab.run(triton_quantize_rows_fp8, x)
    assert float(scales) == 1.0
    lab.same(found, x.to(FP8))


def alone(lab: Any) -> None:
    x = lab.randn(70, 90)
    weight, weight_scales = (lab.put(t) for t in reference_quantize_rows_fp8(lab.randn(20, 90, seed=1)))
    rows, row_scales = lab.run(triton_quantize_rows_fp8, x)
    together = lab.run(triton_linear_fp8, rows, row_scales, weight, weight_scales)
    for row in (0, 33, 69):
        one, scale = lab.run(triton_quantize_rows_fp8, x[row : row + 1])
        lab.same(one, rows[row : row + 1])
        lab.same(lab.run(triton_linear_fp8, one, scale, weight, weight_scales), together[row : row + 1])


CASES = {
    **{
        f"product-{'x'.join(map(str, shape))}-{str(dtype)[6:]}{'-native' if native else ''}": partial(
            product, shape=shape, dtype=dtype, native=native
        )
        for shape in ((1, 1, 1), (3, 65, 130), (66, 64, 128))
        for dtype in DTYPES
        for native in (False, True)
    },
    "bias": partial(product, shape=(5, 70, 64), dtype=torch.float32, native=False, bias=True),
    **{
        f"rows-{rows}x{width}-{str(dtype)[6:]}": partial(rows_to_e4m3, rows=rows, width=width, dtype=dtype)
        for rows, width in ((1, 1), (3, 100), (2, 1536))
        for dtype in DTYPES
    },
    "every-byte": every_byte,
    "every-step": every_step,
    "alone": alone,
}
ROWS, SCALES = torch.empty(7, 4096, dtype=FP8), torch.empty(4096)


def launch_product(native: bool) -> None:
    weight = torch.empty(4096, 4096, dtype=FP8)
    triton_linear_fp8(ROWS, SCALES, weight, SCALES, None, torch.bfloat16, native)


LAUNCHES = {
    "product": partial(launch_product, False),
    "product-native": partial(launch_product, True),
    "rows": lambda: triton_quantize_rows_fp8(torch.empty(7, 4096, dtype=torch.bfloat16)),
}
# What the launcher asks of each chip (`is_native`).
TARGETS = {"product": (80,), "product-native": (90, 100)}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)


def test_no_such_type_on_sm_80(compiles: Any) -> None:
    """Why there are two forms; when this passes no more, one can go."""
    with pytest.raises(AssertionError, match="fp8e4nv not supported"):
        compiles("product-native", 80)
