"""Grouped adapters against one token at a time."""

from __future__ import annotations

import torch

from engines.ops.lora import lora_plan, reference_lora_expand, reference_lora_shrink


def test_a_plan_lists_each_adapters_tokens_in_order() -> None:
    plan = lora_plan(torch.tensor([2, -1, 0, 2, 0, -1]), 4)
    assert plan.start.tolist() == [0, 2, 2, 4, 4]
    assert plan.order[:4].tolist() == [2, 4, 0, 3]
    assert lora_plan(torch.tensor([-1, -1]), 2).start.tolist() == [0, 0, 0]


def test_each_token_has_its_own_adapter() -> None:
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(*shape, generator=generator) for shape in ((5, 12), (3, 4, 12), (3, 7, 4)))
    adapters, scales = [1, -1, 2, 1, 0], torch.tensor([1.0, 0.5, 2.0])
    plan = lora_plan(torch.tensor(adapters), 3)
    out = torch.ones(5, 7)
    reference_lora_expand(reference_lora_shrink(x, a, scales, plan), b, plan, out)
    for token, adapter in enumerate(adapters):
        added = torch.zeros(7) if adapter < 0 else scales[adapter] * (b[adapter] @ (a[adapter] @ x[token]))
        assert torch.allclose(out[token], 1.0 + added, atol=1e-4)
