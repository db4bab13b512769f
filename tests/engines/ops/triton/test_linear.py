"""Dense linear in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch

from engines.ops.triton import matmul_tile
from engines.ops.triton.linear import triton_linear
from engines.ops.triton.tiles import MatmulTiles

SMALL = MatmulTiles(block_m=16, block_n=16, block_k=16, group_m=2, num_warps=4, num_stages=2)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ weight.double().t()
    return (out if bias is None else out + bias.double()).to(x.dtype)


def equals_the_reference(lab: Any, shape: tuple[int, int, int], dtype: torch.dtype, bias: bool = False) -> None:
    rows, num_outputs, depth = shape
    x, weight = lab.randn(rows, depth, dtype=dtype), lab.randn(num_outputs, depth, seed=1, dtype=dtype)
    added = lab.randn(num_outputs, seed=2, dtype=dtype) if bias else None
    lab.close(lab.run(triton_linear, x, weight, added), reference(x, weight, added), scale=depth**0.5)


def many_small_tiles(lab: Any, programs: int) -> None:
    """Fewer programs than tiles, as many, and more: the walk covers each tile once, and the bits are the same."""
    x, weight = lab.randn(50, 40), lab.randn(37, 40, seed=1)
    with mock.patch.object(matmul_tile, "num_multiprocessors", return_value=programs):
        out = lab.run(triton_linear, x, weight, tiles=SMALL)
    lab.close(out, reference(x, weight, None), scale=40**0.5)
    lab.same(out, lab.run(triton_linear, x, weight, tiles=SMALL))


def a_row_does_not_depend_on_the_others(lab: Any) -> None:
    x, weight = lab.randn(33, 70), lab.randn(20, 70, seed=1)
    together = lab.run(triton_linear, x, weight, tiles=SMALL)
    for rows in (slice(0, 1), slice(7, 9), slice(32, 33), slice(3, 25)):
        lab.same(lab.run(triton_linear, x[rows], weight, tiles=SMALL), together[rows])


CASES = {
    **{
        f"{'x'.join(map(str, shape))}-{str(dtype)[6:]}": partial(equals_the_reference, shape=shape, dtype=dtype)
        for shape in ((1, 1, 1), (3, 65, 33), (65, 64, 64), (2, 100, 576))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    },
    "bias": partial(equals_the_reference, shape=(5, 70, 64), dtype=torch.float16, bias=True),
    "wide": partial(equals_the_reference, shape=(2, 2050, 40), dtype=torch.float32),
    "no-rows": partial(equals_the_reference, shape=(0, 8, 8), dtype=torch.float32),
    "one-program": partial(many_small_tiles, programs=1),
    "five-programs": partial(many_small_tiles, programs=5),
    "many-programs": partial(many_small_tiles, programs=200),
    "alone": a_row_does_not_depend_on_the_others,
}


def launch(dtype: torch.dtype, num_outputs: int, depth: int, native: bool = False) -> None:
    x, weight = torch.empty(7, depth, dtype=dtype), torch.empty(num_outputs, depth, dtype=dtype)
    triton_linear(x, weight, torch.empty(num_outputs, dtype=dtype), native_bf16=native)


LAUNCHES = {
    "float32": partial(launch, torch.float32, 576, 576),
    "bfloat16": partial(launch, torch.bfloat16, 4096, 4096),
    "bfloat16-native": partial(launch, torch.bfloat16, 4096, 4096, native=True),
    "float16-ragged": partial(launch, torch.float16, 1000, 100),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
