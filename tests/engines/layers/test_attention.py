"""Self-attention of a layer: the merged projection is cut, turned and put together as the definition says."""

from __future__ import annotations

import math

import torch

from engines.layers.attention import SelfAttention, StepContext
from engines.layers.linear import Float32Linear
from engines.layers.mlp import GatedMLP
from engines.layers.rotary import Rotary
from engines.ops.attention import AttentionInputs, Heads
from engines.ops.dispatch import CPU
from engines.ops.kv_cache import allocate_kv_cache

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=16)
HIDDEN, TOKENS = 48, 21


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def turned(x: torch.Tensor, position: int) -> torch.Tensor:
    """One head [16] at one position, pair by pair."""
    out = x.clone()
    for i in range(8):
        angle = position / 10000.0 ** (2 * i / 16)
        out[i] = x[i] * math.cos(angle) - x[i + 8] * math.sin(angle)
        out[i + 8] = x[i + 8] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def test_self_attention_is_its_definition() -> None:
    qkv, output = normal(8 * 16, HIDDEN, seed=1) / 7, normal(HIDDEN, 4 * 16, seed=2) / 8
    x = normal(TOKENS, HIDDEN, seed=3)
    layer = SelfAttention(Float32Linear(qkv, None), Float32Linear(output, None), HEADS, CPU)
    kv = allocate_kv_cache(3, 2, 2, 16, 16)
    inputs = AttentionInputs(
        query_start=torch.tensor([0, TOKENS], dtype=torch.int32),
        context_lens=torch.tensor([TOKENS], dtype=torch.int32),
        block_tables=torch.tensor([[1, 0]], dtype=torch.int32),
        slot_mapping=torch.tensor([16 + p if p < 16 else p - 16 for p in range(TOKENS)], dtype=torch.int32),
    )
    rows = Rotary(64, 16, 10000.0).rows(torch.arange(TOKENS, dtype=torch.int32))
    got = layer(x, 2, StepContext(*rows, {0: CPU.attention(HEADS).begin(inputs, kv)}))

    heads = (x @ qkv.t()).view(TOKENS, 8, 16)
    q = torch.stack([torch.stack([turned(heads[p, h], p) for h in range(4)]) for p in range(TOKENS)])
    k = torch.stack([torch.stack([turned(heads[p, 4 + h], p) for h in range(2)]) for p in range(TOKENS)])
    v = heads[:, 6:]
    mixed = torch.zeros(TOKENS, 4, 16)
    for p in range(TOKENS):
        for h in range(4):
            weights = torch.softmax(k[: p + 1, h // 2] @ q[p, h] / 4.0, dim=0)
            mixed[p, h] = weights @ v[: p + 1, h // 2]
    torch.testing.assert_close(got, mixed.flatten(1) @ output.t(), rtol=0, atol=1e-5)
    torch.testing.assert_close(kv.k[2, 1].transpose(0, 1), k[:16], rtol=0, atol=1e-5)
    torch.testing.assert_close(kv.v[2, 0, :, :5].transpose(0, 1), v[16:], rtol=0, atol=1e-5)


def test_the_gated_mlp_is_its_definition() -> None:
    gate, up, down = (normal(*shape, seed=i) / 7 for i, shape in enumerate([(32, 48), (32, 48), (48, 32)]))
    x = normal(5, 48, seed=9)
    layer = GatedMLP(Float32Linear(torch.cat((gate, up)), None), Float32Linear(down, None), CPU)
    g = x @ gate.t()
    torch.testing.assert_close(layer(x), (g * torch.sigmoid(g) * (x @ up.t())) @ down.t(), rtol=0, atol=1e-5)
