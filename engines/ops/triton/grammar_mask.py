"""Grammar masks on CUDA: contract of `engines/ops/grammar_mask.py`, for float32, float16 and bfloat16 logits.

A program does one stretch of one bitmask row, a lane a token; it stores -inf where a bit is 0 and touches nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.grammar_mask import words
from engines.ops.triton.kernel import assert_rows, ceil_div, jit, launch_options, next_power_of_2, row_warps

LARGEST_BLOCK = 4096


class _Tensors(NamedTuple):
    logits: torch.Tensor  # [R, V]
    bitmask: torch.Tensor  # [M, W]
    rows: torch.Tensor | None  # [M]


class _Strides(NamedTuple):
    logits: int
    bitmask: int
    vocab_size: int


@jit
def _grammar_mask_kernel(tensors: tl.tuple, strides: tl.tuple, block: tl.constexpr) -> None:
    mask_row = tl.program_id(0).to(tl.int64)
    row = mask_row
    if tensors.rows is not None:
        row = tl.load(tensors.rows + mask_row).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    inside = token < strides.vocab_size
    word = tl.load(tensors.bitmask + mask_row * strides.bitmask + token // 32, mask=inside, other=-1)
    forbidden = inside & (((word >> (token % 32)) & 1) == 0)
    floor = tl.full((block,), float("-inf"), tensors.logits.dtype.element_ty)
    tl.store(tensors.logits + row * strides.logits + token, floor, mask=forbidden)


def triton_grammar_mask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """logits [R, V] in place, bitmask [M, W] int32, rows [M] integers or None."""
    assert_rows(logits, bitmask)
    vocab_size, masks = int(logits.shape[1]), int(bitmask.shape[0])
    assert bitmask.shape[1] >= words(vocab_size), bitmask.shape
    block = min(LARGEST_BLOCK, next_power_of_2(vocab_size))
    if masks:
        _grammar_mask_kernel[(masks, ceil_div(vocab_size, block))](
            _Tensors(logits, bitmask, rows),
            _Strides(logits.stride(0), bitmask.stride(0), vocab_size),
            block,
            **launch_options(row_warps(block)),
        )
