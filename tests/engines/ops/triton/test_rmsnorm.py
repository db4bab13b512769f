"""RMSNorm, with a residual and with int8 rows, in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.rmsnorm import reference_rms_norm
from engines.ops.rmsnorm_fused import reference_add_rms_norm, reference_rms_norm_int8
from engines.ops.triton.rmsnorm import triton_add_rms_norm, triton_rms_norm, triton_rms_norm_int8

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 1e-5


def plain(lab: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight = lab.randn(rows, width, dtype=dtype), lab.randn(width, seed=1, dtype=dtype)
    lab.close(lab.run(triton_rms_norm, x, weight, EPS), reference_rms_norm(x.float(), weight.float(), EPS).to(dtype))


def with_residual(lab: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = lab.randn(rows, width, dtype=dtype), lab.randn(rows, width, seed=2, dtype=dtype)
    weight = lab.randn(width, seed=1)
    normed, total = lab.run(triton_add_rms_norm, x, residual, weight, EPS)
    expected, expected_total = reference_add_rms_norm(x, residual, weight, EPS)
    if dtype == torch.bfloat16:  # the interpreter truncates: compare each step by itself
        lab.close(total, expected_total)
        expected = reference_rms_norm(total.float(), weight, EPS).to(dtype)
    else:
        lab.same(total, expected_total)
    lab.close(normed, expected)
    lab.same(normed, lab.run(triton_rms_norm, total, weight, EPS))  # fused is unfused


def to_int8(lab: Any, rows: int, width: int, dtype: torch.dtype, residual: bool) -> None:
    x, weight = lab.randn(rows, width, dtype=dtype), lab.randn(width, seed=1)
    other = lab.randn(rows, width, seed=2, dtype=dtype) if residual else None
    quantized, scales, total = lab.run(triton_rms_norm_int8, x, other, weight, EPS)
    expected, expected_scales, expected_total = reference_rms_norm_int8(x, other, weight, EPS)
    lab.close(scales, expected_scales, relative=3e-6 if dtype != torch.bfloat16 else 2e-2)
    if dtype != torch.bfloat16 or not residual:
        assert int((quantized.int() - expected.int()).abs().max()) <= 1
        assert float((quantized == expected).float().mean()) > 0.99
    if residual:
        lab.close(total, expected_total)
    else:
        assert total is None


def zeros(lab: Any) -> None:
    x, weight = lab.put(torch.zeros(2, 40)), lab.randn(40)
    lab.same(lab.run(triton_rms_norm, x, weight, EPS).abs(), torch.zeros(2, 40))
    quantized, scales, _ = lab.run(triton_rms_norm_int8, x, None, weight, EPS)
    lab.same(quantized, torch.zeros(2, 40, dtype=torch.int8))
    assert bool((scales > 0).all())


def alone(lab: Any) -> None:
    x, residual, weight = lab.randn(4, 576), lab.randn(4, 576, seed=2), lab.randn(576, seed=1)
    together, total = lab.run(triton_add_rms_norm, x, residual, weight, EPS)
    rows8, scales, _ = lab.run(triton_rms_norm_int8, x, residual, weight, EPS)
    for row in range(4):
        one = slice(row, row + 1)
        normed, sums = lab.run(triton_add_rms_norm, x[one], residual[one], weight, EPS)
        lab.same(normed, together[one])
        lab.same(sums, total[one])
        quantized, scale, _ = lab.run(triton_rms_norm_int8, x[one], residual[one], weight, EPS)
        lab.same(quantized, rows8[one])
        lab.same(scale, scales[one])


SHAPES = ((1, 1), (3, 100), (2, 576), (1, 2049))
CASES = {
    **{
        f"{name}-{rows}x{width}-{str(dtype)[6:]}": partial(check, rows=rows, width=width, dtype=dtype)
        for name, check in (
            ("plain", plain),
            ("residual", with_residual),
            ("int8", partial(to_int8, residual=False)),
            ("residual-int8", partial(to_int8, residual=True)),
        )
        for rows, width in SHAPES
        for dtype in DTYPES
    },
    "no-rows": partial(plain, rows=0, width=8, dtype=torch.float32),
    "zeros": zeros,
    "alone": alone,
}

X = torch.empty(4, 576, dtype=torch.bfloat16)
WEIGHT = torch.empty(576, dtype=torch.bfloat16)
LAUNCHES = {
    "plain": lambda: triton_rms_norm(X, WEIGHT, EPS),
    "residual": lambda: triton_add_rms_norm(X, X, WEIGHT, EPS),
    "residual-int8": lambda: triton_rms_norm_int8(X, X, WEIGHT, EPS),
    "wide": lambda: triton_rms_norm(torch.empty(2, 8192), torch.empty(8192), EPS),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
