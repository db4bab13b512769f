"""Grouped LoRA on CUDA: contract of `engines/ops/lora.py`.

A program takes up to 16 tokens of one adapter (`LoraPlan` has them in a row) and a tile of outputs. Shrink sums over
K in one order, with no split along K; expand adds one product of depth R to what is there. Programs for adapters with
fewer tokens end at once, so the grid needs no number from the device. Products are of float32 values: float16 and
bfloat16 ones are exact in TF32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.lora import LoraPlan
from engines.ops.triton.kernel import assert_rows, ceil_div, jit, launch_options, next_power_of_2

TILE_TOKENS = 16
TILE_INPUTS = 64
TILE_OUTPUTS = 128
# tl.dot takes no smaller side.
SMALLEST_SIDE = 16


class _Tensors(NamedTuple):
    x: torch.Tensor  # [T, K], or hidden [T, R]
    weight: torch.Tensor  # [A, N, K]
    out: torch.Tensor  # [T, N]
    scales: torch.Tensor | None  # [A]
    order: torch.Tensor  # [T]
    start: torch.Tensor  # [A + 1]


class _Strides(NamedTuple):
    x: int
    adapter: int
    weight: int
    out: int
    num_outputs: int
    depth: int


class _Config(NamedTuple):
    tile_tokens: int
    tile_outputs: int
    tile_inputs: int
    precision: str
    adds: bool


@jit
def _lora_kernel(tensors: tl.tuple, strides: tl.tuple, config: tl.constexpr) -> None:
    adapter = tl.program_id(1)
    first = tl.load(tensors.start + adapter).to(tl.int32) + tl.program_id(0) * config.tile_tokens
    last = tl.load(tensors.start + adapter + 1).to(tl.int32)
    if first >= last:
        return
    place = first + tl.arange(0, config.tile_tokens)
    row_inside = place < last
    token = tl.load(tensors.order + place, mask=row_inside, other=0).to(tl.int64)
    column = tl.program_id(2) * config.tile_outputs + tl.arange(0, config.tile_outputs)
    column_inside = column < strides.num_outputs
    weight = tensors.weight + adapter.to(tl.int64) * strides.adapter + column[None, :].to(tl.int64) * strides.weight
    acc = tl.zeros((config.tile_tokens, config.tile_outputs), tl.float32)
    for begin in range(0, strides.depth, config.tile_inputs):
        k = begin + tl.arange(0, config.tile_inputs)
        k_inside = k < strides.depth
        x = tl.load(
            tensors.x + token[:, None] * strides.x + k[None, :], mask=row_inside[:, None] & k_inside[None, :], other=0.0
        ).to(tl.float32)
        w = tl.load(weight + k[:, None], mask=k_inside[:, None] & column_inside[None, :], other=0.0).to(tl.float32)
        acc = tl.dot(x, w, acc=acc, input_precision=config.precision)
    if tensors.scales is not None:
        acc *= tl.load(tensors.scales + adapter)
    target = tensors.out + token[:, None] * strides.out + column[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    if config.adds:
        acc += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, acc.to(tensors.out.dtype.element_ty), mask=inside)


def triton_lora_shrink(x: torch.Tensor, a: torch.Tensor, scales: torch.Tensor, plan: LoraPlan) -> torch.Tensor:
    """x [T, K], a [A, R, K] of its dtype, scales [A] float32 -> [T, R] float32, new memory."""
    hidden = torch.empty((x.shape[0], a.shape[1]), dtype=torch.float32, device=x.device)
    _launch(_Tensors(x, a, hidden, scales, plan.order, plan.start), adds=False)
    return hidden


def triton_lora_expand(hidden: torch.Tensor, b: torch.Tensor, plan: LoraPlan, out: torch.Tensor) -> None:
    """hidden [T, R] float32, b [A, N, R], added to out [T, N] in place."""
    _launch(_Tensors(hidden, b, out, None, plan.order, plan.start), adds=True)


def _launch(tensors: _Tensors, *, adds: bool) -> None:
    assert_rows(tensors.x, tensors.weight, tensors.out)
    tokens, (num_adapters, num_outputs, depth) = int(tensors.x.shape[0]), tensors.weight.shape
    config = _Config(
        TILE_TOKENS,
        min(TILE_OUTPUTS, max(SMALLEST_SIDE, next_power_of_2(num_outputs))),
        min(TILE_INPUTS, max(SMALLEST_SIDE, next_power_of_2(depth))),
        # `hidden` is float32; x and a of float32 need all their bits too.
        "tf32x3" if tensors.x.dtype == torch.float32 else "tf32",
        adds,
    )
    weight = tensors.weight
    if tokens and num_adapters:
        _lora_kernel[(ceil_div(tokens, TILE_TOKENS), num_adapters, ceil_div(num_outputs, config.tile_outputs))](
            tensors,
            _Strides(
                tensors.x.stride(0), weight.stride(0), weight.stride(1), tensors.out.stride(0), num_outputs, depth
            ),
            config,
            **launch_options(4),
        )
