"""4-bit linear in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.linear_w4a16 import W4Weight, quantize_groups_w4, reference_linear_w4a16
from engines.ops.triton.linear_w4a16 import triton_linear_w4a16

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def weight_of(lab: Any, num_outputs: int, depth: int, group: int, scales: torch.dtype = torch.float16) -> W4Weight:
    weight = quantize_groups_w4(
        torch.randn(num_outputs, depth, generator=torch.Generator().manual_seed(1)), group, scales
    )
    return W4Weight(lab.put(weight.packed), lab.put(weight.d), lab.put(weight.m))


def equals_the_reference(
    lab: Any, shape: tuple[int, int, int], group: int, dtype: torch.dtype, bias: bool = False
) -> None:
    rows, num_outputs, depth = shape
    weight, x = weight_of(lab, num_outputs, depth, group), lab.randn(rows, depth, dtype=dtype)
    added = lab.randn(num_outputs, seed=3, dtype=dtype) if bias else None
    out = lab.run(triton_linear_w4a16, x, weight, added)
    lab.close(out, reference_linear_w4a16(x, weight, added), scale=depth**0.5)


def alone(lab: Any) -> None:
    weight, x = weight_of(lab, 20, 192, 32, torch.float32), lab.randn(70, 192)
    together = lab.run(triton_linear_w4a16, x, weight)
    for rows in (slice(0, 1), slice(33, 36), slice(69, 70)):
        lab.same(lab.run(triton_linear_w4a16, x[rows], weight), together[rows])


CASES = {
    **{
        f"{'x'.join(map(str, shape))}-group-{group}-{str(dtype)[6:]}": partial(
            equals_the_reference, shape=shape, group=group, dtype=dtype
        )
        for shape, group in (
            ((1, 1, 32), 32),
            ((3, 65, 160), 32),
            ((66, 40, 128), 128),
            ((2, 100, 384), 128),
            ((2, 30, 576), 64),
        )
        for dtype in DTYPES
    },
    "bias": partial(equals_the_reference, shape=(5, 70, 64), group=32, dtype=torch.float32, bias=True),
    "alone": alone,
}


def launch(dtype: torch.dtype, group: int) -> None:
    scales = torch.empty(4096, 4096 // group, dtype=torch.float16)
    weight = W4Weight(torch.empty(4096, 2048, dtype=torch.uint8), scales, scales.clone())
    triton_linear_w4a16(torch.empty(7, 4096, dtype=dtype), weight)


LAUNCHES = {
    "float16-128": partial(launch, torch.float16, 128),
    "bfloat16-32": partial(launch, torch.bfloat16, 32),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
