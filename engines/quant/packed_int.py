"""Integer weights as other tools pack them, into `GroupQuant`, without loss: GPTQ, AWQ, compressed-tensors.

Letters: N outputs, K inputs, G groups, P codes a 32-bit word (8 of four bits, 4 of eight).

    gptq    qweight [K / P, N], lowest bits first along K; qzeros [G, N / P] along N, one less than the zero in format
            "gptq", the zero itself in "gptq_v2"; scales [G, N]; g_idx [K] says whose scale an input has (act-order)
    awq     qweight [K, N / 8], qzeros [G, N / 8], both along N in the order 0 2 4 6 1 3 5 7; scales [G, N]
    pack-quantized  weight_packed [N, K / P] along K, codes shifted up to be unsigned; weight_scale [N, G]
    int-quantized   weight [N, K] int8; weight_scale of any granularity; weight_zero_point optional

All mean w = scale * (code - zero). Knows nothing of files.

Sources: AutoGPTQ's and AutoAWQ's packing code, vllm-project/compressed-tensors (compressors).
Read next: `engines/quant/group.py`, `engines/models/quantized_tensors.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engines.quant.granularity import Granularity
from engines.quant.group import GroupQuant, ScaleArray

Words = npt.NDArray[np.int32]
Codes = npt.NDArray[np.uint8]
WORD_BITS = 32
AWQ_BITS = 4
# Nibble i of a word is column AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_words(words: Words, bits: int) -> Codes:
    """words [rows, W] -> codes [rows, W * 32 / bits], lowest bits first."""
    shifts = np.arange(0, WORD_BITS, bits, dtype=np.uint32)
    codes = np.ascontiguousarray(words).view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(words.shape[0], -1)


def from_gptq(qweight: Words, qzeros: Words, scales: ScaleArray, bits: int, *, first_zero: int = 1) -> GroupQuant:
    """`first_zero` is what stored zeros lack: 1 in format "gptq", 0 in "gptq_v2". Groups run in order of K."""
    codes = unpack_words(np.ascontiguousarray(qweight.T), bits)  # [N, K]
    zeros = unpack_words(qzeros, bits).astype(np.float32).T + np.float32(first_zero)  # [N, G]
    return with_zeros(codes, _turned(scales), zeros, bits)


def from_awq(qweight: Words, qzeros: Words, scales: ScaleArray) -> GroupQuant:
    """Four bits, the layout of AWQ's "gemm" version."""
    codes, zeros = (_awq_columns(words) for words in (qweight, qzeros))  # [K, N], [G, N]
    return with_zeros(np.ascontiguousarray(codes.T), _turned(scales), zeros.astype(np.float32).T, AWQ_BITS)


def from_packed_rows(packed: Words, scales: ScaleArray, bits: int) -> GroupQuant:
    """compressed-tensors "pack-quantized", symmetric: packed [N, K / P], scales [N, G]."""
    return GroupQuant(unpack_words(packed, bits), scales, None, float(1 << (bits - 1)), bits)


def from_int8(
    rows: npt.NDArray[np.int8],
    scales: npt.NDArray[Any],
    granularity: Granularity,
    zero_points: npt.NDArray[np.int8] | None = None,
) -> GroupQuant:
    """rows [N, K] int8 with scales (and zero points) of any granularity. Raises ValueError if their number is wrong."""
    spread = kernel_scales(granularity.scales_by_group(scales, *rows.shape))  # [N, G]
    codes = rows.view(np.uint8) ^ np.uint8(128)
    if zero_points is None:
        return GroupQuant(codes, spread, None, 128.0, 8)
    zeros = granularity.scales_by_group(zero_points, *rows.shape).astype(np.float32) + np.float32(128)
    return with_zeros(codes, spread, zeros, 8)


def kernel_scales(scales: npt.NDArray[Any]) -> ScaleArray:
    """Scales as kernels take them: float16 stays, all else becomes float32."""
    kept: ScaleArray = scales if scales.dtype == np.float16 else scales.astype(np.float32)
    return kept


def with_zeros(codes: Codes, scales: ScaleArray, zeros: npt.NDArray[np.float32], bits: int) -> GroupQuant:
    """w = scale * (code - zero), scales and zeros [N, G]. One zero for all needs no minima.

    Else minima are -zero * scale: float32, unless all of them are float16 numbers.
    """
    if zeros.size and bool((zeros == zeros.flat[0]).all()):
        return GroupQuant(codes, scales, None, float(zeros.flat[0]), bits)
    minima = np.ascontiguousarray(-zeros * scales.astype(np.float32))
    if scales.dtype == np.float16:
        with np.errstate(over="ignore"):
            short = minima.astype(np.float16)
        if bool((short.astype(np.float32) == minima).all()):
            return GroupQuant(codes, scales, short, 0.0, bits)
    return GroupQuant(codes, scales.astype(np.float32), minima, 0.0, bits)


def _turned(scales: ScaleArray) -> ScaleArray:
    return kernel_scales(np.ascontiguousarray(scales.T))


def _awq_columns(words: Words) -> Codes:
    nibbles = unpack_words(words, AWQ_BITS).reshape(words.shape[0], -1, len(AWQ_ORDER))
    ordered = np.empty_like(nibbles)
    ordered[:, :, list(AWQ_ORDER)] = nibbles
    return ordered.reshape(words.shape[0], -1)
