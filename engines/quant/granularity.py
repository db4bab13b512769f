"""How many numbers share a scale: the one descriptor that every format of weights, keys and values is told by.

Over a matrix [N, K]: "tensor" has one scale, "channel" one a row, "group" one a row and `columns` inputs, "block" one a
tile of `rows` x `columns`. Whatever the granularity, `scales_by_group` brings the scales to the form that kernels take:
one a row and group. Knows nothing of files, codes or kernels.

Read next: `engines/quant/group.py`, `engines/quant/packed_int.py`.
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)


class Granularity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rows` and `columns` of what shares a scale; 0 is all of the matrix. `kind` says which of them count."""

    kind: Literal["tensor", "channel", "group", "block"]
    rows: int = 0
    columns: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError if the numbers are not those of the kind."""
        wanted = {"tensor": (False, False), "channel": (False, False), "group": (False, True), "block": (True, True)}
        if (self.rows > 0, self.columns > 0) != wanted[self.kind]:
            raise ValueError(f"granularity {self.kind} has rows {self.rows}, columns {self.columns}")

    def __str__(self) -> str:
        """Short: "channel", "group of 128", "block of 128 x 128"."""
        return {
            "group": f"group of {self.columns}",
            "block": f"block of {self.rows} x {self.columns}",
        }.get(self.kind, self.kind)

    def scales_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """[rows, columns] of the scales of a matrix [N, K]. Raises ValueError if groups do not divide K.

        A block may be cut off by the edge of the matrix, as in checkpoints that have blocks.
        """
        if self.kind == "tensor":
            return 1, 1
        if self.kind == "channel":
            return outputs, 1
        if self.kind == "group":
            if inputs % self.columns:
                raise ValueError(f"{inputs} inputs are not a multiple of the group of {self.columns}")
            return outputs, inputs // self.columns
        return math.ceil(outputs / self.rows), math.ceil(inputs / self.columns)

    def scales_by_group(self, scales: npt.NDArray[Scalar], outputs: int, inputs: int) -> npt.NDArray[Scalar]:
        """Scales of any shape that holds `scales_shape` numbers -> [N, G], one a row and group of K / G inputs.

        Raises ValueError if the number of scales is another, or if cut-off blocks leave no groups of one size.
        """
        shape = self.scales_shape(outputs, inputs)
        if scales.size != math.prod(shape):
            raise ValueError(f"{scales.size} scales, but {self} of [{outputs}, {inputs}] has {math.prod(shape)}")
        square = scales.reshape(shape)
        if self.kind != "block":
            return np.ascontiguousarray(np.broadcast_to(square, (outputs, shape[1])))
        if inputs % self.columns:
            raise ValueError(f"{inputs} inputs are not a multiple of the block's {self.columns}")
        return np.ascontiguousarray(np.repeat(square, self.rows, axis=0)[:outputs])
