"""Log-softmax on CUDA: contract of `engines/ops/log_softmax.py`, for float32, float16 and bfloat16 logits.

A program walks one row three times: its maximum, its sum, its results. Each lane sums its own column of the walk and
the lanes are summed once at the end: one order for a row, whatever the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.triton.kernel import assert_rows, jit, launch_options, next_power_of_2, row_warps

LARGEST_BLOCK = 4096


class _Tensors(NamedTuple):
    logits: torch.Tensor  # [R, V]
    out: torch.Tensor  # [R, V]


class _Strides(NamedTuple):
    logits: int
    out: int
    vocab_size: int


@jit
def _log_softmax_kernel(tensors: tl.tuple, strides: tl.tuple, block: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits = tensors.logits + row * strides.logits
    lane = tl.arange(0, block)
    largest = tl.full((block,), float("-inf"), tl.float32)
    for start in range(0, strides.vocab_size, block):
        inside = start + lane < strides.vocab_size
        x = tl.load(logits + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    top = tl.max(largest, axis=0)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, strides.vocab_size, block):
        inside = start + lane < strides.vocab_size
        x = tl.load(logits + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
        total += tl.where(inside, tl.exp(x - top), 0.0)
    shift = tl.log(tl.sum(total, axis=0))
    for start in range(0, strides.vocab_size, block):
        inside = start + lane < strides.vocab_size
        x = tl.load(logits + start + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(tensors.out + row * strides.out + start + lane, x - top - shift, mask=inside)


def triton_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """logits [R, V] -> [R, V] float32, new memory."""
    assert_rows(logits)
    rows, vocab_size = logits.shape
    out = torch.empty((rows, vocab_size), dtype=torch.float32, device=logits.device)
    block = min(LARGEST_BLOCK, next_power_of_2(vocab_size))
    if rows:
        _log_softmax_kernel[(rows,)](
            _Tensors(logits, out),
            _Strides(logits.stride(0), out.stride(0), vocab_size),
            block,
            **launch_options(row_warps(block)),
        )
    return out
