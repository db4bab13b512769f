"""The reference of attention over blocks against the one of the CPU engine, and its options against each other."""

from __future__ import annotations

from dataclasses import replace

import torch

from engines.ops.attention import AttentionInputs, Heads, ReferenceAttention
from engines.ops.kv_cache import KVCache
from engines.ops.kv_write import LayerKV, reference_quantize_heads
from engines.ops.paged_attention import AttentionOptions, reference_paged_attention

HEADS = Heads(num_heads=6, num_kv_heads=2, head_dim=16)


def batch() -> tuple[torch.Tensor, LayerKV, AttentionInputs]:
    """Contexts of 13 and 6 keys in blocks of 4, of which 5 and 1 are new."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 8, 2, 4, 16, generator=generator)
    tables = torch.tensor([[3, 1, 7, 2], [5, 0, 6, 6]], dtype=torch.int32)
    inputs = AttentionInputs(torch.tensor([0, 5, 6]), torch.tensor([13, 6]), tables, torch.empty(0, dtype=torch.int32))
    return torch.randn(6, 6, 16, generator=generator), LayerKV(k, v), inputs


def test_plain_attention_is_that_of_the_cpu_engine() -> None:
    q, kv, inputs = batch()
    pool = KVCache(kv.k[None].clone(), kv.v[None].clone())
    slots = torch.tensor([7 * 4 + 0, 7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 2 * 4 + 0, 0 * 4 + 1])
    k, v = (cache[slots // 4, :, slots % 4] for cache in (kv.k, kv.v))
    step = ReferenceAttention(HEADS).begin(replace(inputs, slot_mapping=slots.int()), pool)
    expected = step.attend(0, q, k, v)
    assert torch.allclose(reference_paged_attention(q, kv, inputs).flatten(1), expected, atol=1e-5)


def test_a_chain_is_a_tree() -> None:
    q, kv, inputs = batch()
    bias = torch.full((6, 5), float("-inf")).triu(1)
    bias[5] = torch.tensor([0.0, *[float("-inf")] * 4])
    chained = reference_paged_attention(q, kv, inputs, tree_bias=bias)
    assert torch.equal(chained, reference_paged_attention(q, kv, inputs))


def test_a_branch_does_not_see_its_sibling() -> None:
    """Changing the sibling's key changes nothing for the branch beside it."""
    q, kv, inputs = batch()
    bias = torch.full((6, 5), float("-inf"))
    for row, seen in enumerate(([0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0])):
        bias[row, seen] = 0.0
    before = reference_paged_attention(q, kv, inputs, tree_bias=bias)
    kv.k[7, :, 1] += 1.0  # key 9 of the first sequence: the second of its new tokens
    after = reference_paged_attention(q, kv, inputs, tree_bias=bias)
    assert torch.equal(after[[0, 2, 4, 5]], before[[0, 2, 4, 5]])
    assert not torch.allclose(after[[1, 3]], before[[1, 3]])


def test_a_window_forgets_and_a_wide_one_does_not() -> None:
    q, kv, inputs = batch()
    plain = reference_paged_attention(q, kv, inputs)
    assert torch.equal(reference_paged_attention(q, kv, inputs, AttentionOptions(window=13)), plain)
    narrow = reference_paged_attention(q, kv, inputs, AttentionOptions(window=1))
    own = kv.v[[7, 7, 7, 7, 2, 0], :, [0, 1, 2, 3, 0, 1]]  # each row sees its own value only
    assert torch.allclose(narrow, own.repeat_interleave(3, 1))


def test_softcap_bounds_scores() -> None:
    q, kv, inputs = batch()
    loud = reference_paged_attention(1e6 * q, kv, inputs, AttentionOptions(softcap=1e-6))
    even = reference_paged_attention(0 * q, kv, inputs)
    assert torch.allclose(loud, even, atol=1e-5)


def test_narrow_caches_are_read_through_their_scales() -> None:
    q, kv, inputs = batch()
    for dtype, allowed in ((torch.int8, 0.02), (torch.float8_e4m3fn, 0.1)):
        (k, k_scale), (v, v_scale) = (reference_quantize_heads(x, dtype) for x in (kv.k, kv.v))
        narrow = reference_paged_attention(q, LayerKV(k, v, k_scale, v_scale), inputs)
        assert float((narrow - reference_paged_attention(q, kv, inputs)).abs().max()) < allowed
