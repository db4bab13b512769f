"""The references of KV write: joined is one after the other, and quantization keeps its promise of half a step."""

from __future__ import annotations

import pytest
import torch

from engines.ops.kv_write import (
    LEVELS,
    LayerKV,
    reference_kv_write,
    reference_quantize_heads,
    reference_rope_kv_write,
)
from engines.ops.rope import reference_rope, rotary_tables


@pytest.mark.parametrize("dtype", list(LEVELS))
def test_a_value_comes_back_within_half_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
    values, scales = reference_quantize_heads(x, dtype)
    back = values.float() * scales[..., None]
    if dtype == torch.int8:
        assert bool(((back - x).abs() <= 0.5001 * scales[..., None]).all())
    else:  # three bits of mantissa; below 2^-6 levels the step is 2^-9 levels
        allowed = torch.maximum(x.abs() * 2**-4, scales[..., None] * 2**-10) * 1.001
        assert bool(((back - x).abs() <= allowed).all())


def test_negative_slots_write_nothing_and_others_land_where_they_say() -> None:
    k = torch.arange(3.0)[:, None, None].expand(3, 2, 4) + 1
    kv = LayerKV(torch.zeros(3, 2, 5, 4), torch.zeros(3, 2, 5, 4))
    reference_kv_write(k, -k, kv, torch.tensor([7, -1, 14], dtype=torch.int32))
    expected = torch.zeros(3, 2, 5, 4)
    expected[1, :, 2], expected[2, :, 4] = 1.0, 3.0
    assert torch.equal(kv.k, expected)
    assert torch.equal(kv.v, -expected)


def test_joined_is_one_after_the_other() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(4, heads, 8, generator=generator) for heads in (4, 2, 2))
    cos, sin = (table[3:7] for table in rotary_tables(10, 8, 10000.0))
    slots = torch.tensor([0, 1, 2, 3])
    joined, apart = (LayerKV(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8)) for _ in range(2))
    rotated = reference_rope(q, cos, sin)
    reference_kv_write(reference_rope(k, cos, sin), v, apart, slots)
    reference_rope_kv_write(q, k, v, cos, sin, joined, slots)
    assert torch.equal(q, rotated)
    assert torch.equal(joined.k, apart.k)
    assert torch.equal(joined.v, apart.v)
