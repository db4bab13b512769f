"""Device functions on numbers: rounding, e4m3 bytes, order-preserving keys, counted randomness.

Written with plain arithmetic and bit operations only, so that they mean the same in the interpreter and on every chip
(no inline assembly, no libdevice, no float8 type).

Source of the random numbers: Salmon et al., 2011, Philox 4x32-10 (`engines/ops/philox.py` is the same in torch).
Read next: `engines/ops/philox.py`.
"""

from __future__ import annotations

import triton.language as tl

from engines.ops.triton.kernel import jit

# 1.5 * 2^23: adding it to |x| < 2^22 leaves no fraction bits, so the sum is rounded to nearest, ties to even.
ROUNDING = tl.constexpr(12582912.0)
E4M3_MAX = tl.constexpr(448.0)
# Below this magnitude e4m3 is fixed point with steps of 2^-9.
E4M3_SMALLEST_NORMAL = tl.constexpr(0.015625)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
# Where -log(1 - v) is taken from its series, because 1 - v would lose v's low bits.
SERIES_BELOW = tl.constexpr(0.015625)


@jit
def round_half_even(x: tl.tensor) -> tl.tensor:
    """float32 within +-2^22 -> the nearest whole float32, ties to even."""
    return (x + ROUNDING) - ROUNDING


@jit
def tanh(x: tl.tensor) -> tl.tensor:
    """float32; exact at both ends: exp overflows to inf or underflows to 0."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 -> e4m3 byte (uint8), nearest even, clamped to +-448 first; NaN becomes 448."""
    magnitude = tl.minimum(tl.abs(x), E4M3_MAX)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponent bias 127 -> 7, in units of 1/8 octave
    tiny = round_half_even(magnitude * 512.0).to(tl.int32)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(magnitude < E4M3_SMALLEST_NORMAL, tiny, normal) | sign).to(tl.uint8)


@jit
def from_e4m3(byte: tl.tensor) -> tl.tensor:
    """e4m3 byte (uint8) -> float32, exact; the two NaN bytes read as +-480.

    The bits are those of a float16 with another exponent bias; float16 holds every e4m3 value, subnormals included.
    """
    wide = byte.to(tl.int16)
    half = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@jit
def ordered_key(x: tl.tensor) -> tl.tensor:
    """float32 -> uint32 with the same order (-0 counts as 0; NaN is not allowed)."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | (-2147483648))).to(tl.uint32, bitcast=True)


@jit
def from_ordered_key(key: tl.tensor) -> tl.tensor:
    """The float32 whose `ordered_key` this is."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ ((~(bits >> 31)) | (-2147483648))).to(tl.float32, bitcast=True)


@jit
def random_bits(
    seed: tl.tensor, choice: tl.tensor, position: tl.tensor, stream: tl.tensor, index: tl.tensor
) -> tl.tensor:
    """uint32 for each `index` (a block): the first word of Philox of the counter (index, position, choice, stream)."""
    counter = index.to(tl.uint32)
    zero = counter * 0
    word, _b, _c, _d = tl.philox(
        seed.to(tl.uint64), counter, zero + position.to(tl.uint32), zero + choice.to(tl.uint32), zero + stream
    )
    return word


@jit
def unit_interval(bits: tl.tensor) -> tl.tensor:
    """uint32 -> float32 in (0, 1]: (bits + 1/2) / 2^32, rounded."""
    return bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10


@jit
def exponential(bits: tl.tensor) -> tl.tensor:
    """uint32 -> a draw from Exp(1), float32, with 2^-33 as its least value."""
    v = unit_interval(bits)
    series = v * (1.0 + v * (0.5 + v * 0.3333333432674408))
    return tl.where(v < SERIES_BELOW, series, -tl.log(1.0 - v))
