"""Grouped LoRA in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.lora import LoraPlan, lora_plan, reference_lora_expand, reference_lora_shrink
from engines.ops.triton.lora import triton_lora_expand, triton_lora_shrink

MIXED = (2, -1, 0, 0, 2, 2, -1, 0)
CROWD = tuple([1] * 19 + [0])  # more than a tile of tokens


def plan_of(lab: Any, adapters: tuple[int, ...], num_adapters: int) -> LoraPlan:
    plan = lora_plan(torch.tensor(adapters), num_adapters)
    return LoraPlan(lab.put(plan.order), lab.put(plan.start))


def both(lab: Any, adapters: tuple[int, ...], rank: int, width: tuple[int, int], dtype: torch.dtype) -> None:
    depth, num_outputs = width
    plan, tokens = plan_of(lab, adapters, 3), len(adapters)
    x, a = lab.randn(tokens, depth, dtype=dtype), lab.randn(3, rank, depth, seed=1, dtype=dtype)
    b, scales = lab.randn(3, num_outputs, rank, seed=2, dtype=dtype), lab.put(torch.tensor([0.5, 2.0, 1.0]))
    has = torch.tensor(adapters) >= 0
    hidden = lab.run(triton_lora_shrink, x, a, scales, plan)
    expected = reference_lora_shrink(x, a, scales, plan)
    lab.close(hidden[has], expected[has], scale=depth**0.5)
    # Rows without an adapter are undefined: NaN here, which must not reach the result.
    base = torch.randn(tokens, num_outputs, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = lab.put(base, mutable=True)
    lab.run(triton_lora_expand, hidden, b, plan, out)
    reference_lora_expand(hidden, b, plan, base)
    lab.close(out.contiguous(), base, scale=(rank * depth) ** 0.5)
    lab.same(out[~has], base[~has])


def a_slice_of_columns(lab: Any) -> None:
    """The adapter of v in a merged q, k, v: the columns beside it stay."""
    plan = plan_of(lab, MIXED, 3)
    merged = lab.put(torch.ones(8, 96), mutable=True)
    hidden, b = lab.randn(8, 8), lab.randn(3, 32, 8, seed=1)
    expected = torch.ones(8, 96)
    reference_lora_expand(hidden, b, plan, expected[:, 64:])
    lab.run(triton_lora_expand, hidden, b, plan, merged[:, 64:])
    lab.close(merged.contiguous(), expected)
    lab.same(merged[:, :64], expected[:, :64])


def alone(lab: Any) -> None:
    """A token gives the same bits among neighbours of any adapter."""
    x, a, b = lab.randn(8, 100), lab.randn(3, 8, 100, seed=1), lab.randn(3, 40, 8, seed=2)
    scales, plan = lab.put(torch.ones(3)), plan_of(lab, MIXED, 3)
    together = lab.run(triton_lora_shrink, x, a, scales, plan)
    out = torch.zeros(8, 40)
    lab.run(triton_lora_expand, together, b, plan, out)
    for token, adapter in enumerate(MIXED):
        if adapter >= 0:
            own, one = plan_of(lab, (adapter,), 3), slice(token, token + 1)
            hidden = lab.run(triton_lora_shrink, x[one], a, scales, own)
            lab.same(hidden, together[one])
            single = torch.zeros(1, 40)
            lab.run(triton_lora_expand, hidden, b, own, single)
            lab.same(single, out[one])


CASES = {
    **{
        f"{name}-rank-{rank}-{'x'.join(map(str, width))}-{str(dtype)[6:]}": partial(
            both, adapters=adapters, rank=rank, width=width, dtype=dtype
        )
        for name, adapters, rank, width in (
            ("mixed", MIXED, 8, (100, 70)),
            ("crowd", CROWD, 16, (64, 130)),
            ("one", (1,), 1, (1, 1)),
            ("ragged-rank", MIXED, 70, (33, 20)),
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    },
    "none": partial(both, adapters=(-1, -1), rank=8, width=(20, 20), dtype=torch.float32),
    "slice": a_slice_of_columns,
    "alone": alone,
}
PLAN = LoraPlan(torch.zeros(64, dtype=torch.int32), torch.zeros(9, dtype=torch.int32))
BF16 = torch.bfloat16
LAUNCHES = {
    "shrink": lambda: triton_lora_shrink(
        torch.empty(64, 4096, dtype=BF16), torch.empty(8, 16, 4096, dtype=BF16), torch.empty(8), PLAN
    ),
    "expand": lambda: triton_lora_expand(
        torch.empty(64, 16), torch.empty(8, 4096, 16, dtype=BF16), PLAN, torch.empty(64, 4096, dtype=BF16)
    ),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
