"""SiLU-mul in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.silu_mul import reference_silu_mul
from engines.ops.triton.silu_mul import triton_silu_mul

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def equals_the_reference(lab: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = lab.put(3 * lab.randn(rows, 2 * width, dtype=dtype))
    lab.close(lab.run(triton_silu_mul, gate_up), reference_silu_mul(gate_up.float()).to(dtype))


def extremes(lab: Any) -> None:
    """exp overflows for a very negative gate: the result is -0 x up, never NaN."""
    gate_up = lab.put(torch.tensor([[-1e4, 1e4, 0.0, -88.0, 2.0, 2.0, 2.0, 2.0]]))
    lab.close(lab.run(triton_silu_mul, gate_up), reference_silu_mul(gate_up))


def a_row_alone_is_the_row_in_a_batch(lab: Any) -> None:
    gate_up = lab.randn(5, 2 * 300)
    together = lab.run(triton_silu_mul, gate_up)
    for row in range(5):
        lab.same(lab.run(triton_silu_mul, gate_up[row : row + 1]), together[row : row + 1])


CASES = {
    **{
        f"{rows}x{width}-{str(dtype)[6:]}": partial(equals_the_reference, rows=rows, width=width, dtype=dtype)
        for rows, width in ((1, 1), (3, 100), (2, 1536), (1, 5000))
        for dtype in DTYPES
    },
    "no-rows": partial(equals_the_reference, rows=0, width=8, dtype=torch.float32),
    "extremes": extremes,
    "alone": a_row_alone_is_the_row_in_a_batch,
}
LAUNCHES = {
    str(dtype)[6:]: partial(triton_silu_mul, torch.empty(4, 2 * 1536, dtype=dtype))
    for dtype in (torch.float32, torch.bfloat16)
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
