"""The weights of a decoder for the compiled kernels: the checkpoint's own bits, or our own quantization of its floats.

    native  the checkpoint's own codes; floats in 8 bits, groups of 32
    q8      8 bits, groups of 32
    q4      4 bits with minima, groups of 128 (64 or 32 where 128 does not divide a row)
    w8a8    8 bits, one scale an output channel, activations smoothed first (`engines/models/smooth.py`)

The embedding and the head keep the checkpoint's own codes, or have 8 bits in groups of 32: their rows are read one at a
time, or decide a token. Activations always have 8 bits a token and 32 inputs (`engines/ops/group_linear.py`). Knows
nothing of files or of how panels lie.

Read next: `engines/models/smooth.py`, `engines/quant/group.py`, `engines/models/llama_native.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engines.config import DType
from engines.models.base import Checkpoint
from engines.models.smooth import CALIBRATION_DIGEST, SmoothedWeights
from engines.quant.group import GroupQuant, quantize_4bit, quantize_channels, quantize_groups

GROUP = 32
LARGE_GROUPS = (128, 64, 32)
REQUANTIZED: tuple[DType, ...] = ("q8", "q4", "w8a8")
Floats = npt.NDArray[np.float32]


class Weights(Protocol):
    """What packing asks of a decoder's weights, by canonical names."""

    def matrix(self, name: str) -> GroupQuant:
        """A projection. Raises CheckpointError."""
        ...

    def vector(self, name: str) -> Floats:
        """A norm or a bias."""
        ...


class OwnWeights:
    """Matrices in the checkpoint's own codes, floats in 8 bits."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Reads when asked."""
        self._checkpoint = checkpoint

    def matrix(self, name: str) -> GroupQuant:
        """See `Weights`."""
        own = self._checkpoint.groups(name)
        return quantize_groups(self._checkpoint.float32(name).numpy(), GROUP) if own is None else own

    def vector(self, name: str) -> Floats:
        """See `Weights`."""
        values: Floats = self._checkpoint.float32(name).numpy()
        return values


class RequantizedWeights:
    """Matrices dequantized and quantized anew in 4 or 8 bits; vectors as they are."""

    def __init__(self, checkpoint: Checkpoint, bits: int) -> None:
        """Reads when asked."""
        self._checkpoint, self._bits = checkpoint, bits

    def matrix(self, name: str) -> GroupQuant:
        """See `Weights`."""
        weight = self._checkpoint.float32(name).numpy()
        if self._bits == 8:
            return quantize_groups(weight, GROUP)
        group = next((one for one in LARGE_GROUPS if weight.shape[1] % one == 0), GROUP)
        return quantize_4bit(weight, group)

    def vector(self, name: str) -> Floats:
        """See `Weights`."""
        values: Floats = self._checkpoint.float32(name).numpy()
        return values


class ChannelWeights:
    """Smoothed matrices in 8 bits with one scale a channel."""

    def __init__(self, smoothed: SmoothedWeights) -> None:
        """`smoothed` gives floats."""
        self._smoothed = smoothed

    def matrix(self, name: str) -> GroupQuant:
        """See `Weights`."""
        return quantize_channels(self._smoothed.float32(name).numpy())

    def vector(self, name: str) -> Floats:
        """See `Weights`."""
        values: Floats = self._smoothed.float32(name).numpy()
        return values


def weights_for(dtype: DType, checkpoint: Checkpoint, path: str) -> Weights:
    """Of `checkpoint` (whose files are at `path`) for "native" or a format in REQUANTIZED. Raises CheckpointError."""
    if dtype == "q8":
        return RequantizedWeights(checkpoint, 8)
    if dtype == "q4":
        return RequantizedWeights(checkpoint, 4)
    if dtype == "w8a8":
        return ChannelWeights(SmoothedWeights(checkpoint, path))
    return OwnWeights(checkpoint)


def format_name(dtype: DType, checkpoint: Checkpoint) -> str:
    """What a digest calls the weights: "q4_1" (most projections' own), "q4-g128", "w8a8-3f2a..."."""
    if dtype == "q4":
        return f"q4-g{LARGE_GROUPS[0]}"
    if dtype == "w8a8":
        return f"w8a8-{CALIBRATION_DIGEST}"
    return "q8" if dtype == "q8" else _own_format(checkpoint)


def _own_format(checkpoint: Checkpoint) -> str:
    """The format of most projection weights; "q8" for what was float: that is how it runs."""
    counts = Counter[str]()
    for name in checkpoint.names():
        if name.endswith("_proj.weight"):
            counts[checkpoint.number_format(name)] += int(np.prod(checkpoint.shape(name)))
    most = counts.most_common(1)[0][0]
    return "q8" if most == "float" else most
