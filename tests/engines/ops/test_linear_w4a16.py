"""4-bit groups: GGUF's own bits go in as they are, and a value comes back within half a step."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engines.ops.linear_w4a16 import (
    W4Weight,
    dequantize_w4,
    pack_nibbles,
    quantize_groups_w4,
    reference_linear_w4a16,
    unpack_nibbles,
)


@pytest.mark.parametrize("group", [2, 32, 128])
def test_nibbles_come_back(group: int) -> None:
    values = torch.randint(0, 16, (3, 256), generator=torch.Generator().manual_seed(group)).to(torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(values, group), group), values)


def test_the_halves_of_a_group_lie_in_the_halves_of_its_bytes() -> None:
    assert pack_nibbles(torch.arange(8)[None], 4).tolist() == [[0x20, 0x31, 0x64, 0x75]]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_ggufs_own_bits(kind: str) -> None:
    weight = np.random.default_rng(0).standard_normal((6, 96)).astype(np.float32)
    tensor_type = gguf.GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(weight, tensor_type).reshape(6, 3, -1)  # [N, K / 32, bytes]
    d = torch.from_numpy(blocks[:, :, :2].copy().view(np.float16)[..., 0])
    if kind == "Q4_0":
        m, codes = (-8 * d.float()), blocks[:, :, 2:]
    else:
        m, codes = torch.from_numpy(blocks[:, :, 2:4].copy().view(np.float16)[..., 0]), blocks[:, :, 4:]
    ours = W4Weight(torch.from_numpy(codes.reshape(6, 48).copy()), d.to(m.dtype), m)
    theirs = gguf.quants.dequantize(blocks.reshape(6, -1), tensor_type)
    assert np.array_equal(dequantize_w4(ours).numpy(), theirs)


def test_a_weight_comes_back_within_half_a_step() -> None:
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    packed = quantize_groups_w4(weight, 32, torch.float32)
    error = (dequantize_w4(packed) - weight).abs().view(5, 4, 32)
    assert bool((error <= 0.5001 * packed.d[..., None]).all())
    assert (packed.num_inputs, packed.group_size) == (128, 32)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    out = reference_linear_w4a16(x, packed, torch.ones(5))
    assert torch.allclose(out, x @ dequantize_w4(packed).t() + 1.0, atol=1e-4)
