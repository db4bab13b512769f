"""What the matrix products share: the walk of a persistent program over tiles, loading x, storing a tile.

As many programs start as the chip has multiprocessors; each takes every P-th tile. Tile sizes are fixed and a tile's
sum over K has one order, with no split along K: a row of the result depends on that row of x alone, whatever T is and
however many programs run.

Source: https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/ (batch-invariant products).
Read next: `engines/ops/triton/linear.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl

from engines.ops.triton.kernel import ceil_div, jit, num_multiprocessors
from engines.ops.triton.tiles import MatmulTiles


class Tensors(NamedTuple):
    """Pointers; None where an option is off."""

    x: torch.Tensor  # [T, K]
    weight: torch.Tensor  # [N, K], or packed
    out: torch.Tensor  # [T, N]
    bias: torch.Tensor | None = None  # [N]
    row_scales: torch.Tensor | None = None  # [T] float32
    weight_scales: torch.Tensor | None = None  # [N] float32, or d [N, K / g]
    weight_offsets: torch.Tensor | None = None  # m [N, K / g]


class Strides(NamedTuple):
    """Elements between rows, and what the weight fixes."""

    x: int
    weight: int
    out: int
    scales: int
    num_outputs: int
    depth: int


class Config(NamedTuple):
    """Fixed by the weight."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    even_depth: bool  # block_k divides K: no masks along K
    operand: Any  # tl.dtype of both operands of a product
    precision: str  # of float32 products
    group_size: int = 0


class Tile(NamedTuple):
    """Rows [block_m] and columns [block_n] of one tile, and which exist."""

    row: tl.tensor
    column: tl.tensor
    row_inside: tl.tensor
    column_inside: tl.tensor


@jit
def num_tiles(rows: tl.tensor, columns: tl.tensor, config: tl.constexpr) -> tl.tensor:
    """Of a [rows, columns] result."""
    return tl.cdiv(rows, config.block_m) * tl.cdiv(columns, config.block_n)


@jit
def tile_at(index: tl.tensor, rows: tl.tensor, columns: tl.tensor, config: tl.constexpr) -> tl.tuple:
    """The index-th tile: down `group_m` tiles of rows, then to the next column, so that neighbours share operands."""
    tiles_m, tiles_n = tl.cdiv(rows, config.block_m), tl.cdiv(columns, config.block_n)
    group = index // (config.group_m * tiles_n)
    within = index % (config.group_m * tiles_n)
    height = tl.minimum(tiles_m - group * config.group_m, config.group_m)
    row = (group * config.group_m + within % height) * config.block_m + tl.arange(0, config.block_m)
    column = within // height * config.block_n + tl.arange(0, config.block_n)
    return Tile(row.to(tl.int64), column.to(tl.int64), row < rows, column < columns)


@jit
def load_x(tile: tl.tuple, k: tl.tensor, tensors: tl.tuple, strides: tl.tuple, config: tl.constexpr) -> tl.tensor:
    """x at the tile's rows and inputs k [K'] -> [block_m, K'], as stored."""
    mask = tile.row_inside[:, None]
    if not config.even_depth:
        mask = mask & (k < strides.depth)[None, :]
    return tl.load(tensors.x + tile.row[:, None] * strides.x + k[None, :], mask=mask, other=0)


@jit
def load_weight(tile: tl.tuple, k: tl.tensor, tensors: tl.tuple, strides: tl.tuple, config: tl.constexpr) -> tl.tensor:
    """The weight of the tile's outputs at inputs k [K'] -> [K', block_n], as stored."""
    mask = tile.column_inside[None, :]
    if not config.even_depth:
        mask = mask & (k < strides.depth)[:, None]
    return tl.load(tensors.weight + tile.column[None, :] * strides.weight + k[:, None], mask=mask, other=0)


@jit
def store_tile(y: tl.tensor, tile: tl.tuple, tensors: tl.tuple, strides: tl.tuple) -> None:
    """y [block_m, block_n] float32, plus the bias, rounded to the result's dtype."""
    if tensors.bias is not None:
        y += tl.load(tensors.bias + tile.column, mask=tile.column_inside, other=0.0).to(tl.float32)[None, :]
    target = tensors.out + tile.row[:, None] * strides.out + tile.column[None, :]
    tl.store(target, y.to(tensors.out.dtype.element_ty), mask=tile.row_inside[:, None] & tile.column_inside[None, :])


@jit
def scaled(y: tl.tensor, tile: tl.tuple, tensors: tl.tuple) -> tl.tensor:
    """y [block_m, block_n] times the product of its row's and its column's scale."""
    rows = tl.load(tensors.row_scales + tile.row, mask=tile.row_inside, other=0.0)
    columns = tl.load(tensors.weight_scales + tile.column, mask=tile.column_inside, other=0.0)
    return y * (rows[:, None] * columns[None, :])


def persistent_grid(rows: int, num_outputs: int, tiles: MatmulTiles, device: torch.device) -> tuple[int]:
    """One program a multiprocessor, at most one a tile."""
    return (min(num_multiprocessors(device), ceil_div(rows, tiles.block_m) * ceil_div(num_outputs, tiles.block_n)),)


def config_of(tiles: MatmulTiles, operand: Any, depth: int, *, precision: str = "tf32", group_size: int = 0) -> Config:
    """A kernel's `Config` for products of depth K."""
    return Config(
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=tiles.block_k,
        group_m=tiles.group_m,
        even_depth=depth % tiles.block_k == 0,
        operand=operand,
        precision=precision,
        group_size=group_size,
    )
