"""ggml's block formats as `GroupQuant`: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and the k-quants Q2_K to Q6_K, without loss.

A ggml row is a run of blocks; each block's bytes are cut into codes and scales here with numpy, once at load.
Super-block scales of k-quants are multiplied out to float32, which is exact. Knows nothing of files or kernels.

Source of the layouts: ggml/src/ggml-common.h and the `gguf` package's quants.py.
Read next: `engines/quant/group.py`, `engines/ops/group_linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engines.quant.group import GroupQuant, ScaleArray

Bytes = npt.NDArray[np.uint8]
# Shift counts and masks as bytes, so that bytes stay bytes.
TWO, FOUR = np.uint8(2), np.uint8(4)
LOW_HALF, SIX_BITS, TOP_PAIR = np.uint8(15), np.uint8(63), np.uint8(48)


def from_ggml(kind: str, rows: Bytes) -> GroupQuant:
    """`kind` a ggml type name in `CONVERSIONS`, rows [N, bytes a row] -> the same weights in groups.

    Raises ValueError if the type is another, or a row is not whole blocks.
    """
    if kind not in CONVERSIONS:
        raise ValueError(f"number format {kind} is not in groups ({', '.join(CONVERSIONS)} are)")
    block_bytes, convert = CONVERSIONS[kind]
    if rows.ndim != 2 or rows.shape[1] % block_bytes:
        raise ValueError(f"rows of {rows.shape[-1]} bytes are not whole {kind} blocks of {block_bytes}")
    return convert(np.ascontiguousarray(rows).reshape(rows.shape[0], -1, block_bytes))


def _float16(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """The half-precision number at byte `at` of each block: [N, blocks]."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


def _nibbles(packed: Bytes) -> Bytes:
    """[N, blocks, 16] -> [N, blocks, 32]: low halves, then high halves."""
    return np.concatenate((packed & LOW_HALF, packed >> FOUR), axis=2)


def _fifth_bits(packed: Bytes) -> Bytes:
    """[N, blocks, 4]: bit j of 32 is the fifth bit of code j -> [N, blocks, 32], shifted into place."""
    return np.unpackbits(packed, axis=2, bitorder="little") << FOUR


def _flat(codes: Bytes, scales: ScaleArray, minima: ScaleArray | None, zero: float, bits: int) -> GroupQuant:
    """Codes of any inner shape, scales of any inner shape, each flattened to a row."""
    rows = codes.shape[0]
    return GroupQuant(
        np.ascontiguousarray(codes).reshape(rows, -1),
        scales.reshape(rows, -1),
        None if minima is None else minima.reshape(rows, -1),
        zero,
        bits,
    )


def _q4_0(blocks: Bytes) -> GroupQuant:
    return _flat(_nibbles(blocks[:, :, 2:]), _float16(blocks, 0), None, 8.0, 4)


def _q4_1(blocks: Bytes) -> GroupQuant:
    return _flat(_nibbles(blocks[:, :, 4:]), _float16(blocks, 0), _float16(blocks, 2), 0.0, 4)


def _q5_0(blocks: Bytes) -> GroupQuant:
    codes = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])
    return _flat(codes, _float16(blocks, 0), None, 16.0, 8)


def _q5_1(blocks: Bytes) -> GroupQuant:
    codes = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    return _flat(codes, _float16(blocks, 0), _float16(blocks, 2), 0.0, 8)


def _q8_0(blocks: Bytes) -> GroupQuant:
    # int8 + 128 as unsigned is the sign bit flipped.
    return _flat(blocks[:, :, 2:] ^ np.uint8(128), _float16(blocks, 0), None, 128.0, 8)


def _scaled(blocks: Bytes, at: int, factors: npt.NDArray[np.number]) -> npt.NDArray[np.float32]:
    """A super-block's half-precision number times small integers [N, blocks, groups]: exact in float32."""
    product: npt.NDArray[np.float32] = _float16(blocks, at).astype(np.float32)[:, :, None] * factors.astype(np.float32)
    return product


def _six_bit_pairs(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 12 scale bytes of Q4_K and Q5_K -> scales and minima [N, blocks, 8], six bits each."""
    d, m, both = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = np.concatenate((d & SIX_BITS, (both & LOW_HALF) | (d >> TWO & TOP_PAIR)), axis=2)
    minima = np.concatenate((m & SIX_BITS, (both >> FOUR) | (m >> TWO & TOP_PAIR)), axis=2)
    return scales, minima


def _shifted(packed: Bytes, run: int, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Runs of `run` bytes, each read once a shift: [N, blocks, runs * len(shifts) * run]."""
    runs = packed.reshape(*packed.shape[:2], -1, 1, run) >> np.array(shifts, dtype=np.uint8).reshape(1, 1, 1, -1, 1)
    return (runs & np.uint8(mask)).reshape(*packed.shape[:2], -1)


def _q2_k(blocks: Bytes) -> GroupQuant:
    factors, packed = blocks[:, :, :16], blocks[:, :, 16:80]
    codes = _shifted(packed, 32, (0, 2, 4, 6), 3)
    return _flat(codes, _scaled(blocks, 80, factors & LOW_HALF), -_scaled(blocks, 82, factors >> FOUR), 0.0, 4)


def _q3_k(blocks: Bytes) -> GroupQuant:
    high, packed, factors = blocks[:, :, :32], blocks[:, :, 32:96], blocks[:, :, 96:108]
    codes = _shifted(packed, 32, (0, 2, 4, 6), 3) | _shifted(high, 32, tuple(range(8)), 1) << TWO
    low, top = _shifted(factors[:, :, :8], 8, (0, 4), 15), _shifted(factors[:, :, 8:], 4, (0, 2, 4, 6), 3)
    signed = (low | top << FOUR).astype(np.int8) - np.int8(32)
    return _flat(codes, _scaled(blocks, 108, signed), None, 4.0, 4)


def _q4_k(blocks: Bytes) -> GroupQuant:
    scales, minima = _six_bit_pairs(blocks[:, :, 4:16])
    codes = _shifted(blocks[:, :, 16:], 32, (0, 4), 15)
    return _flat(codes, _scaled(blocks, 0, scales), -_scaled(blocks, 2, minima), 0.0, 4)


def _q5_k(blocks: Bytes) -> GroupQuant:
    scales, minima = _six_bit_pairs(blocks[:, :, 4:16])
    high = _shifted(blocks[:, :, 16:48], 32, tuple(range(8)), 1)
    codes = _shifted(blocks[:, :, 48:], 32, (0, 4), 15) | high << FOUR
    return _flat(codes, _scaled(blocks, 0, scales), -_scaled(blocks, 2, minima), 0.0, 8)


def _q6_k(blocks: Bytes) -> GroupQuant:
    low, high, factors = blocks[:, :, :128], blocks[:, :, 128:192], blocks[:, :, 192:208]
    codes = _shifted(low, 64, (0, 4), 15) | _shifted(high, 32, (0, 2, 4, 6), 3) << FOUR
    return _flat(codes, _scaled(blocks, 208, factors.view(np.int8)), None, 32.0, 8)


# ggml type name -> bytes a block, conversion.
CONVERSIONS: dict[str, tuple[int, Callable[[Bytes], GroupQuant]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k),
    "Q3_K": (110, _q3_k),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
