"""Every ggml format as groups equals the `gguf` package's own dequantization, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engines.quant.ggml import CONVERSIONS, from_ggml
from engines.quant.group import GroupQuant, quantize_groups

# Where each format keeps its half-precision numbers: random bytes there would be infinities.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_rows(kind: str, outputs: int, blocks: int, seed: int) -> np.ndarray:
    """Rows in which every bit pattern of codes and small scales may occur; the halves are finite and of both signs."""
    rng = np.random.default_rng(seed)
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    raw = rng.integers(0, 256, size=(outputs, blocks, block_bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        values = rng.normal(0.0, 0.02, size=(outputs, blocks)).astype(np.float16)
        raw[:, :, at : at + 2] = values[:, :, None].view(np.uint8)
    return raw.reshape(outputs, -1)


@pytest.mark.parametrize("kind", sorted(CONVERSIONS))
def test_a_ggml_format_keeps_every_weight(kind: str) -> None:
    rows = random_rows(kind, outputs=7, blocks=5, seed=3)
    weight = from_ggml(kind, rows)
    weight.check()
    expected = dequantize(rows, GGMLQuantizationType[kind])
    assert weight.shape == expected.shape
    np.testing.assert_array_equal(weight.dequantize(), expected)


@pytest.mark.parametrize("kind", sorted(CONVERSIONS))
def test_a_conversion_knows_its_block_size(kind: str) -> None:
    elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert CONVERSIONS[kind][0] == block_bytes
    weight = from_ggml(kind, random_rows(kind, outputs=1, blocks=2, seed=4))
    assert weight.shape == (1, 2 * elements)
    assert weight.group == (16 if kind in ("Q2_K", "Q3_K", "Q6_K") else 32)


def test_a_row_that_is_not_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes are not whole Q8_0 blocks of 34"):
        from_ggml("Q8_0", np.zeros((2, 33), dtype=np.uint8))


def test_a_format_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="IQ2_XXS is not in groups"):
        from_ggml("IQ2_XXS", np.zeros((2, 66), dtype=np.uint8))


def test_floats_become_eight_bit_codes_within_half_a_step() -> None:
    rng = np.random.default_rng(5)
    weight = rng.normal(0.0, 0.05, size=(9, 96)).astype(np.float32)
    weight[3, :32] = 0.0
    weight[4, 32:64] = 1e-7  # below any normal float16 scale: becomes zero
    quant = quantize_groups(weight)
    quant.check()
    assert (quant.bits, quant.group, quant.zero, quant.scales.dtype) == (8, 32, 128.0, np.dtype(np.float16))
    step = np.repeat(quant.scales.astype(np.float32), 32, axis=1)
    # A float16 scale is within 2**-11 of max / 127, which moves the largest code by at most 0.07 of a step.
    assert np.all(np.abs(quant.dequantize() - weight) <= 0.57 * step + 2e-7)
    assert not quant.dequantize()[3, :32].any()


def test_large_floats_keep_float32_scales() -> None:
    weight = np.full((1, 32), 1e9, dtype=np.float32)
    quant = quantize_groups(weight)
    assert quant.scales.dtype == np.float32
    np.testing.assert_allclose(quant.dequantize(), weight, rtol=1e-6)


def test_parts_that_do_not_fit_are_found() -> None:
    codes, scales = np.full((2, 64), 16, dtype=np.uint8), np.ones((2, 2), dtype=np.float32)
    with pytest.raises(ValueError, match="do not fit 4 bits"):
        GroupQuant(codes, scales, None, 8.0, 4).check()
    with pytest.raises(ValueError, match="do not divide"):
        GroupQuant(codes, scales[:1], None, 8.0, 8).check()
    with pytest.raises(ValueError, match="another shape"):
        GroupQuant(codes, scales, scales[:, :1], 8.0, 8).check()
    with pytest.raises(ValueError, match="not a multiple of 32"):
        quantize_groups(np.ones((1, 40), dtype=np.float32))
