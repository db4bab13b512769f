"""One descriptor for weights in groups: w[n, k] = d[n, g] * q[n, k] + m[n, g], g = k // group, q unsigned.

Q4_0 to Q8_0, the k-quants, GPTQ, AWQ and int8 a channel all are this, so that one kernel and one reference serve them.
Says nothing of files (`engines/quant/ggml.py`) or of how a kernel lays codes out (`engines/ops/group_linear.py`).

Letters: N outputs, K inputs, G = K / group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engines.quant.granularity import Granularity

ScaleArray = npt.NDArray[np.float16] | npt.NDArray[np.float32]
LEVELS = 127
# Codes of symmetric 8-bit weights count from here.
SYMMETRIC_ZERO = 128
# Smaller scales do not become float16: too few of their bits would be left.
SMALLEST_SHORT_SCALE = 2.0**-20
# A group of smaller scale is zero: one over it might not be finite, or it is nothing beside the matrix's largest.
SMALLEST_SCALE = 2.0**-100
NEGLIGIBLE_SHARE = 2.0**-20
# Shares of a group's reach that a 4-bit code may span.
SHRINKS = (1.0, 0.94, 0.88, 0.82)


@dataclass(frozen=True, slots=True)
class GroupQuant:
    """Weights [N, K] in groups. Arrays are never written.

    codes   [N, K] uint8, below 2**bits
    scales  [N, G] float16 or float32: d
    minima  [N, G], the dtype of `scales`: m; None: m = -zero * d
    bits    4 or 8
    """

    codes: npt.NDArray[np.uint8]
    scales: ScaleArray
    minima: ScaleArray | None
    zero: float
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return int(self.codes.shape[0]), int(self.codes.shape[1])

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    @property
    def granularity(self) -> Granularity:
        """Of the scales."""
        if self.scales.shape[1] == 1:
            return Granularity(kind="channel")
        return Granularity(kind="group", columns=self.group)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """[N, K] float32. Equals the `gguf` package's floats bit for bit: d * (q - zero), or d * q + m, rounded."""
        outputs, groups = self.scales.shape
        codes = self.codes.reshape(outputs, groups, -1).astype(np.float32)
        d = self.scales.astype(np.float32)[:, :, None]
        if self.minima is None:
            return (d * (codes - np.float32(self.zero))).reshape(self.shape)
        return (d * codes + self.minima.astype(np.float32)[:, :, None]).reshape(self.shape)

    def check(self) -> None:
        """Raise ValueError if the parts do not fit each other."""
        (outputs, inputs), groups = self.codes.shape, self.scales.shape[1]
        if self.bits not in (4, 8) or (self.codes.size and int(self.codes.max()) >> self.bits):
            raise ValueError(f"codes do not fit {self.bits} bits (4 and 8 are possible)")
        if self.scales.shape[0] != outputs or groups < 1 or inputs % groups:
            raise ValueError(f"scales {list(self.scales.shape)} do not divide codes {list(self.codes.shape)}")
        if self.minima is not None and (self.minima.shape, self.minima.dtype) != (self.scales.shape, self.scales.dtype):
            raise ValueError("minima have another shape or dtype than scales")


def quantize_4bit(weight: npt.NDArray[np.float32], group: int = 128) -> GroupQuant:
    """weight [N, K] -> 4-bit codes from each group's least to its largest, drawn in to the least squared error.

    `group` divides K. Raises ValueError if not.
    """
    outputs, inputs = weight.shape
    if inputs % group:
        raise ValueError(f"{inputs} inputs are not a multiple of {group}")
    x = np.ascontiguousarray(weight, dtype=np.float32).reshape(outputs, -1, group)
    middle, reach = (x.max(axis=2) + x.min(axis=2)) / 2, (x.max(axis=2) - x.min(axis=2)) / 2
    best = np.full(middle.shape, np.inf, dtype=np.float32)
    codes = np.zeros(x.shape, dtype=np.uint8)
    scales, minima = np.zeros(middle.shape, dtype=np.float32), np.zeros(middle.shape, dtype=np.float32)
    for share in SHRINKS:
        # Scales are what a float16 keeps of them, so that codes are chosen for the numbers that run.
        d = np.maximum(reach * np.float32(share / 7.5), SMALLEST_SHORT_SCALE).astype(np.float16).astype(np.float32)
        m = (middle - d * np.float32(7.5)).astype(np.float16).astype(np.float32)
        q = np.clip(np.rint((x - m[:, :, None]) / d[:, :, None]), 0, 15)
        error = np.square(q * d[:, :, None] + m[:, :, None] - x).sum(axis=2)
        better = error < best
        best, scales, minima = np.where(better, error, best), np.where(better, d, scales), np.where(better, m, minima)
        codes[better] = q[better].astype(np.uint8)
    empty = (middle == 0) & (reach == 0)
    scales[empty], minima[empty] = 0.0, 0.0
    return GroupQuant(codes.reshape(weight.shape), scales.astype(np.float16), minima.astype(np.float16), 0.0, 4)


def quantize_channels(weight: npt.NDArray[np.float32]) -> GroupQuant:
    """weight [N, K] -> symmetric 8-bit codes with one scale a row."""
    return quantize_groups(weight, weight.shape[1])


def quantize_groups(weight: npt.NDArray[np.float32], group: int = 32) -> GroupQuant:
    """weight [N, K] -> symmetric 8-bit codes, as Q8_0 rounds them. `group` divides K. Raises ValueError if not."""
    outputs, inputs = weight.shape
    if inputs % group:
        raise ValueError(f"{inputs} inputs are not a multiple of {group}")
    grouped = np.ascontiguousarray(weight, dtype=np.float32).reshape(outputs, -1, group)
    d = (np.abs(grouped).max(axis=2) / np.float32(LEVELS)).astype(np.float32)
    # A float16 holds most scales; where it would not hold one, all stay float32.
    largest = float(d.max(initial=0.0))
    floor = max(SMALLEST_SCALE, largest * NEGLIGIBLE_SHARE)
    smallest = float(d.min(initial=np.inf, where=d >= floor))
    short = largest < float(np.finfo(np.float16).max) and smallest >= SMALLEST_SHORT_SCALE
    scales: ScaleArray = d.astype(np.float16) if short else d
    step = scales.astype(np.float32)
    inverse = np.divide(np.float32(1.0), step, out=np.zeros_like(step), where=step >= floor)
    codes = np.clip(np.rint(grouped * inverse[:, :, None]), -LEVELS, LEVELS) + SYMMETRIC_ZERO
    return GroupQuant(codes.astype(np.uint8).reshape(weight.shape), scales, None, float(SYMMETRIC_ZERO), 8)
