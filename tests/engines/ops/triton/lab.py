"""Buffers with NaN guard bands, and comparisons, for the cases that run in the interpreter. Imported by `worker.py`.

Every tensor that a case hands to a kernel lies inside a larger buffer whose rest is NaN (integers: a pattern no kernel
should survive). Rows are padded too, so that a kernel which runs over the end of a row, and not only of the buffer,
reads NaN. What a launcher allocates meanwhile is NaN until written and lies between bands of a finite pattern: a NaN
that was read out of bounds and written out of bounds would not show in a band of NaN. Afterwards the bands must be as
they were, and what was handed in as read-only unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

BAND = 512  # elements before and after; a multiple of 16 bytes for every dtype
ROW_PADDING = 16
PATTERN = 0x55
# Relative to the value: one rounding of the result's dtype, with room for the interpreter's truncation of bfloat16.
RELATIVE = {torch.float32: 3e-6, torch.float16: 1.2e-3, torch.bfloat16: 1.0e-2}
INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TRUE_EMPTY = torch.empty


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers: NaN equals NaN, and -0 differs from 0."""
    return tensor.contiguous().view(INTEGER_VIEW[tensor.element_size()])


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with 0x55 bytes for integers."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        mark(tensor)


def mark(tensor: torch.Tensor) -> None:
    """Fill with 0x55 bytes: a finite number in every format."""
    tensor.view(torch.uint8).fill_(PATTERN)


class Lab:
    """One case's buffers."""

    def __init__(self) -> None:
        self._bands: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # buffer, which is band, its bits
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def randn(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Guarded, read-only, normally distributed."""
        return self.put(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))

    def put(self, values: torch.Tensor, *, mutable: bool = False, padded: bool = True) -> torch.Tensor:
        """A guarded copy; read-only unless `mutable`, rows padded unless told otherwise."""
        place = self._guarded(tuple(values.shape), values.dtype, padded=padded, fill=poison)
        place.copy_(values)
        if not mutable:
            self._before.append((place, bits(place).clone()))
        return place

    def run(self, launcher: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a launcher; what it allocates is guarded, and NaN until written."""
        with mock.patch.object(torch, "empty", self._empty):
            return launcher(*arguments, **options)

    def verify(self) -> None:
        """Bands intact, read-only tensors unchanged."""
        for buffer, is_band, before in self._bands:
            assert torch.equal(bits(buffer)[is_band], before), "a guard band was written"
        for place, before in self._before:
            assert torch.equal(bits(place), before), "a read-only tensor was written"

    def _empty(self, *shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        assert device is None or torch.device(device).type == "cpu"
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        place = self._guarded(tuple(sizes), dtype, padded=False, fill=mark)
        poison(place)
        return place

    def _guarded(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, padded: bool, fill: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        row = shape[-1] if shape else 1
        stride = row + ROW_PADDING if padded and len(shape) > 1 else row
        strides, step = [1], stride
        for size in reversed(shape[1:-1]):
            strides.insert(0, step)
            step *= size
        if len(shape) > 1:
            strides.insert(0, step)
            step *= shape[0]
        buffer = TRUE_EMPTY(step + 2 * BAND, dtype=dtype)
        fill(buffer)
        strides = strides if shape else []
        is_band = torch.ones(buffer.shape, dtype=torch.bool)
        is_band.as_strided(shape, strides, BAND).fill_(False)
        self._bands.append((buffer, is_band, bits(buffer)[is_band]))
        return buffer.as_strided(shape, strides, BAND)

    @staticmethod
    def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Equal in dtype, shape and every bit."""
        assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
        assert actual.shape == expected.shape, (actual.shape, expected.shape)
        different = (bits(actual) != bits(expected)).nonzero()
        assert not len(different), (
            f"{len(different)} of {actual.numel()} differ, first at {different[0].tolist()}: "
            f"{actual[tuple(different[0])]} is not {expected[tuple(different[0])]}"
        )

    @staticmethod
    def close(actual: torch.Tensor, expected: torch.Tensor, *, relative: float = 0.0, scale: float = 0.0) -> None:
        """|actual - expected| <= tolerance of the dtype x (|expected| + scale); NaN is never close, inf is itself.

        `scale`: the size of what was summed, where a result may cancel; default: the mean magnitude of `expected`.
        """
        assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
        assert actual.shape == expected.shape, (actual.shape, expected.shape)
        found, wanted = actual.double(), expected.double()
        finite = wanted.isfinite()
        scale = scale or (float(wanted[finite].abs().mean()) if finite.any() else 0.0)
        allowed = (relative or RELATIVE[actual.dtype]) * (wanted.abs() + scale)
        fine = torch.where(finite, (found - wanted).abs() <= allowed, found == wanted)
        wrong = (~fine).nonzero()
        assert not len(wrong), (
            f"{len(wrong)} of {actual.numel()} too far, first at {wrong[0].tolist()}: "
            f"{found[tuple(wrong[0])]} for {wanted[tuple(wrong[0])]}, allowed {allowed[tuple(wrong[0])]}"
        )
