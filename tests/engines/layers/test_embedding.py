"""A table is built in whichever format its packed tensors have."""

from __future__ import annotations

import torch

from engines.layers.embedding import Float32Embedding, Int8Embedding, build_embedding
from engines.ops.embedding import quantize_groups

TABLE = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([9, 0, 9])


def test_float32() -> None:
    layer = build_embedding({"e.weight": TABLE}, "e")
    assert isinstance(layer, Float32Embedding)
    assert torch.equal(layer(IDS), TABLE[IDS])


def test_int8() -> None:
    groups, scales = quantize_groups(TABLE)
    layer = build_embedding({"e.groups": groups, "e.scales": scales}, "e")
    assert isinstance(layer, Int8Embedding)
    expected = (groups.float() * scales[..., None]).view(10, 64)[IDS]
    assert torch.equal(layer(IDS), expected)
