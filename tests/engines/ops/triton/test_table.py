"""The table of ops: a small decoder step over it equals the same step over the references."""

from __future__ import annotations

from typing import Any

import torch

from engines.ops.attention import AttentionInputs, Heads
from engines.ops.dispatch import REFERENCE, Ops
from engines.ops.kv_cache import KVCache
from engines.ops.triton.table import TRITON

HEADS = Heads(num_heads=6, num_kv_heads=2, head_dim=16)
LAYERS, BLOCKS, BLOCK_SIZE = 2, 6, 4


def step(lab: Any, ops: Ops, contexts: tuple[tuple[int, int], ...], kv: KVCache) -> list[torch.Tensor]:
    """Two layers of norm, rotation, attention and gate; what each layer's attention and gate gave."""
    tokens = sum(new for _, new in contexts)
    tables = torch.tensor([[1, 3, 0], [2, 5, 4]], dtype=torch.int32)
    positions = torch.cat([torch.arange(context - new, context) for context, new in contexts])
    owner = torch.tensor([row for row, (_, new) in enumerate(contexts) for _ in range(new)])
    slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    inputs = AttentionInputs(
        torch.tensor([0, *(new for _, new in contexts)]).cumsum(0).int(),
        torch.tensor([context for context, _ in contexts], dtype=torch.int32),
        tables,
        slots.int(),
    )
    attention = ops.attention(HEADS).begin(inputs, kv)
    results = []
    for layer in range(LAYERS):
        q, k, v = (
            torch.randn(tokens, heads, 16, generator=torch.Generator().manual_seed(100 * layer + heads + seed))
            for heads, seed in ((6, 0), (2, 1), (2, 2))
        )
        angles = positions[:, None].float() / torch.arange(1, 17)
        cos, sin = angles.cos(), torch.cat((-angles.sin()[:, :8], angles.sin()[:, :8]), dim=1)
        q, k = lab.run(ops.rope, q, cos, sin), lab.run(ops.rope, k, cos, sin)
        attended = lab.run(attention.attend, layer, q, k, v)
        results += [attended, lab.run(ops.silu_mul, lab.run(ops.rms_norm, attended, torch.ones(96), 1e-5))]
    return results


def decoder_step(lab: Any, contexts: tuple[tuple[int, int], ...]) -> None:
    """On a cache of NaN, prompts first so that every slot below a context is written by the op itself."""
    pools = [
        KVCache(*(torch.full((LAYERS, BLOCKS, 2, BLOCK_SIZE, 16), float("nan")) for _ in range(2))) for _ in range(2)
    ]
    for batch in (tuple((context - new, context - new) for context, new in contexts), contexts):
        found, wanted = (step(lab, ops, batch, kv) for ops, kv in zip((TRITON, REFERENCE), pools, strict=True))
        for one, other in zip(found, wanted, strict=True):
            lab.close(one, other, relative=1e-5)
    lab.close(pools[0].k.nan_to_num(0.0), pools[1].k.nan_to_num(0.0))


CASES = {
    "decode": lambda lab: decoder_step(lab, ((8, 1), (10, 1))),
    "mixed": lambda lab: decoder_step(lab, ((7, 1), (12, 11))),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)
