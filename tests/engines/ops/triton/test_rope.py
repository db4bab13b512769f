"""Rotary positions in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.rope import reference_rope, rotary_tables
from engines.ops.triton.rope import triton_rope, triton_rope_in_place

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tables(lab: Any, tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary_tables(1000, head_dim, 10000.0)
    positions = torch.arange(tokens) * 37 + 5
    return lab.put(cos[positions]), lab.put(sin[positions])


def equals_the_reference(lab: Any, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    cos, sin = tables(lab, 3, head_dim)
    x = lab.randn(3, heads, head_dim, dtype=dtype)
    expected = reference_rope(x.float(), cos, sin).to(dtype)
    out = lab.run(triton_rope, x, cos, sin)
    lab.close(out, expected)
    changed = lab.put(x, mutable=True)
    lab.run(triton_rope_in_place, changed, cos, sin)
    lab.same(changed.contiguous(), out)


def heads_of_a_merged_projection(lab: Any) -> None:
    """q is a slice of [T, (H + 2 G) D]: k and v beside it stay as they were."""
    merged = lab.put(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)), mutable=True)
    before = merged.clone()
    cos, sin = tables(lab, 2, 16)
    lab.run(triton_rope_in_place, merged[:, :3], cos, sin)
    lab.close(merged[:, :3].contiguous(), reference_rope(before[:, :3], cos, sin))
    lab.same(merged[:, 3:].contiguous(), before[:, 3:].contiguous())


CASES = {
    **{
        f"{heads}x{head_dim}-{str(dtype)[6:]}": partial(
            equals_the_reference, heads=heads, head_dim=head_dim, dtype=dtype
        )
        for heads, head_dim in ((1, 64), (3, 80), (9, 96), (4, 128))
        for dtype in DTYPES
    },
    "merged": heads_of_a_merged_projection,
}
LAUNCHES = {
    "new": lambda: triton_rope(torch.empty(4, 9, 64, dtype=torch.bfloat16), torch.empty(4, 64), torch.empty(4, 64)),
    "in-place-80": lambda: triton_rope_in_place(torch.empty(4, 32, 80), torch.empty(4, 80), torch.empty(4, 80)),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
