"""y = x W^T + b with weights in groups (`engines/quant/group.py`) and activations in 8 bits a group of 32.

Contract: x [M, K] float32, W a GroupQuant [N, K] with K a multiple of 32 and a group of 16 or a multiple of 32 -> y
[M, N] float32. For each row and each 32 inputs, s = max|x| / 127 and a = round(x / s) (nearest even; a group below
1e-30 is zero); then for each weight group g in order, all float32:

    y = fma(s, fma(d, dot(q, a), m * sum(a)), y)          after the last group: y + b

The two integers are exact, so a row's bits depend on that row alone: not on M, neighbours or threads. The sum of
codes, not of x, meets m: the error of rounding x is then weighted by w = d * q + m and not by the larger d * q. A row
with a NaN or an infinity gives NaNs in its outputs.

Layout of the compiled kernel ("panels"): `engines/ops/csrc/facet_native.h`. Read next: `engines/ops/decoder.py`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engines.ops.native import STATUS, Matrix, NativeUnavailableError, Pool
from engines.quant.group import GroupQuant

LEVELS = 127
SMALLEST_MAGNITUDE = 1e-30
GROUP = 32
PANEL = 8
ALIGNMENT = 64


def why_unsupported(weight: GroupQuant) -> str:
    """Why the panels cannot hold `weight`; empty if they can."""
    inputs, group = weight.shape[1], weight.group
    if inputs % GROUP:
        return f"{inputs} inputs are not a multiple of {GROUP}"
    if group != GROUP // 2 and group % GROUP:
        return f"groups of {group} are neither {GROUP // 2} nor a multiple of {GROUP}"
    return ""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A GroupQuant in panels. `data`: 1-D uint8, 64-byte aligned where the kernel reads it; never written."""

    data: npt.NDArray[np.uint8]
    num_outputs: int
    num_inputs: int
    bits: int
    group: int
    scale_bytes: int
    has_minima: bool
    zero: float

    @property
    def num_panels(self) -> int:
        """Panels of 8 outputs; the last may be partly empty."""
        return -(-self.num_outputs // PANEL)

    @property
    def panel_bytes(self) -> int:
        """Codes and scales of 8 outputs, up to a multiple of 32."""
        return panel_bytes(self.num_inputs, self.bits, self.group, self.scale_bytes, self.has_minima)

    def native(self, bias: npt.NDArray[np.float32] | None = None) -> Matrix:
        """The C structure. It points into `data` and `bias`, which must outlive it."""
        assert self.data.ctypes.data % GROUP == 0
        return Matrix(
            data=self.data.ctypes.data,
            bias=None if bias is None else bias.ctypes.data,
            panel_bytes=self.panel_bytes,
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            code_bits=self.bits,
            group=self.group,
            scale_bytes=self.scale_bytes,
            has_min=int(self.has_minima),
            zero=self.zero,
        )


def panel_bytes(num_inputs: int, bits: int, group: int, scale_bytes: int, has_minima: bool) -> int:
    """Bytes of one panel: codes, then scales, up to a multiple of 32."""
    used = num_inputs * bits + num_inputs // group * PANEL * scale_bytes * (1 + has_minima)
    return -(-used // GROUP) * GROUP


def pack_panels(weight: GroupQuant) -> PackedMatrix:
    """Lay `weight` out for the kernel, in aligned memory. Raises ValueError if it does not fit panels."""
    reason = why_unsupported(weight)
    if reason:
        raise ValueError(reason)
    (outputs, inputs), bits = weight.shape, weight.bits
    panels = -(-outputs // PANEL)
    size = panel_bytes(inputs, bits, weight.group, weight.scales.dtype.itemsize, weight.minima is not None)
    data = aligned_bytes(panels * size)
    rows = data.reshape(panels, size)
    code_bytes = inputs * bits
    rows[:, :code_bytes] = _panel_codes(weight.codes, panels, bits)
    parts = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    scales = np.zeros((panels * PANEL, inputs // weight.group, len(parts)), dtype=weight.scales.dtype)
    for place, part in enumerate(parts):
        scales[:outputs, :, place] = part
    # [panel, output, group, part] -> [panel, group, part, output]
    ordered = np.ascontiguousarray(scales.reshape(panels, PANEL, -1, len(parts)).transpose(0, 2, 3, 1))
    scale_rows = ordered.reshape(panels, -1).view(np.uint8)
    rows[:, code_bytes : code_bytes + scale_rows.shape[1]] = scale_rows
    return PackedMatrix(
        data,
        outputs,
        inputs,
        bits,
        weight.group,
        weight.scales.dtype.itemsize,
        weight.minima is not None,
        weight.zero,
    )


def _panel_codes(codes: npt.NDArray[np.uint8], panels: int, bits: int) -> npt.NDArray[np.uint8]:
    """[N, K] -> [panels, K * bits]: steps of 4 inputs x 8 outputs, two steps a byte when codes have 4 bits."""
    outputs, inputs = codes.shape
    if outputs < panels * PANEL:
        codes = np.concatenate((codes, np.zeros((panels * PANEL - outputs, inputs), dtype=np.uint8)))
    # Four inputs move as one 32-bit word.
    words = np.ascontiguousarray(codes).view(np.uint32).reshape(panels, PANEL, inputs // 4)
    steps = np.ascontiguousarray(words.transpose(0, 2, 1))  # [panels, K / 4, 8]
    if bits == 4:
        steps = steps[:, 0::2] | steps[:, 1::2] << np.uint32(4)
    return steps.reshape(panels, -1).view(np.uint8)


def unpack_panels(packed: PackedMatrix) -> GroupQuant:
    """The inverse of `pack_panels`: for the reference and for tests."""
    panels, inputs, bits = packed.num_panels, packed.num_inputs, packed.bits
    rows = packed.data.reshape(panels, packed.panel_bytes)
    steps = np.ascontiguousarray(rows[:, : inputs * bits]).view(np.uint32).reshape(panels, -1, PANEL)
    if bits == 4:
        mask = np.uint32(0x0F0F0F0F)
        steps = np.stack((steps & mask, steps >> np.uint32(4) & mask), axis=2).reshape(panels, -1, PANEL)
    codes = np.ascontiguousarray(steps.transpose(0, 2, 1)).view(np.uint8).reshape(panels * PANEL, inputs)
    groups, parts = inputs // packed.group, 1 + packed.has_minima
    stored = np.ascontiguousarray(
        rows[:, inputs * bits : inputs * bits + groups * parts * PANEL * packed.scale_bytes]
    ).view(np.float16 if packed.scale_bytes == 2 else np.float32)
    ordered = stored.reshape(panels, groups, parts, PANEL).transpose(0, 3, 1, 2).reshape(panels * PANEL, groups, parts)
    outputs = packed.num_outputs
    minima = np.ascontiguousarray(ordered[:outputs, :, 1]) if packed.has_minima else None
    return GroupQuant(codes[:outputs], np.ascontiguousarray(ordered[:outputs, :, 0]), minima, packed.zero, bits)


def aligned_bytes(count: int) -> npt.NDArray[np.uint8]:
    """Zeros on a 64-byte border."""
    raw = np.zeros(count + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + count]


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] float32 -> codes [M, K / 32, 32] float32 (whole numbers within +-127), scales [M, K / 32] float32."""
    grouped = x.reshape(x.shape[0], -1, GROUP)
    largest = grouped.abs().amax(dim=-1)
    zero = largest < SMALLEST_MAGNITUDE
    # A tensor divided by a tensor rounds once; a number divided by a tensor is its reciprocal times the number.
    levels = torch.full_like(largest, LEVELS)
    scales = torch.where(zero, 0.0, largest / levels)
    inverse = torch.where(zero, 0.0, levels / largest)
    return torch.round(grouped * inverse[..., None]), scales


def reference_group_linear(x: torch.Tensor, weight: GroupQuant, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The definition. Fused steps go through float64, whose rounding differs from a fused one once in about 2**29."""
    codes, scales = quantize_activations(x)  # [M, K / 32, 32], [M, K / 32]
    rows = x.shape[0]
    part = min(weight.group, GROUP)  # inputs that share both scales
    codes = codes.reshape(rows, -1, part)
    q = torch.from_numpy(weight.codes).double().reshape(weight.shape[0], -1, part)
    d = torch.from_numpy(weight.scales.astype(np.float32))  # [N, G]
    m = d * -weight.zero if weight.minima is None else torch.from_numpy(weight.minima.astype(np.float32))
    y = torch.zeros(rows, weight.shape[0])
    for g in range(codes.shape[1]):
        at = g * part // weight.group
        dot = codes[:, g].double() @ q[:, g].t()  # [M, N], exact
        offset = (m[:, at] * codes[:, g].sum(dim=-1)[:, None]).double()  # [M, N], rounded to float32 first
        share = (d[:, at].double() * dot + offset).float().double()
        y = (scales[:, g * part // GROUP, None].double() * share + y.double()).float()
    return y if bias is None else y + bias


class NativeGroupLinear:
    """The compiled kernel. One thread calls it at a time."""

    def __init__(
        self, library: ctypes.CDLL, pool: Pool, weight: PackedMatrix, bias: npt.NDArray[np.float32] | None = None
    ) -> None:
        """Keeps what is given; copies nothing."""
        self._library, self._pool, self._weight, self._bias = library, pool, weight, bias
        self._matrix = weight.native(bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] float32 -> [M, N] float32, new memory."""
        y = torch.empty(x.shape[0], self._weight.num_outputs)
        self.into(x, y)
        return y

    def into(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Write x W^T + b into y [M, N]; both contiguous float32."""
        assert x.dtype == y.dtype == torch.float32
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert x.shape[1:] == (self._weight.num_inputs,)
        assert y.shape == (x.shape[0], self._weight.num_outputs)
        status = self._library.facet_linear(
            self._pool.handle, ctypes.byref(self._matrix), x.data_ptr(), x.shape[0], y.data_ptr()
        )
        if status:
            raise NativeUnavailableError(STATUS[status])
