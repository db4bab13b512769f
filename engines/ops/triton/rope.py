"""Rotary positions on CUDA: contract of `engines/ops/rope.py`, for float32, float16 and bfloat16.

A program rotates all heads of one token: both halves are loaded before either is stored, so it may run in place.
The same rotation joined with the KV write is in `engines/ops/triton/kv_write.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.triton.kernel import assert_rows, jit, launch_options, next_power_of_2, row_warps


class _Tensors(NamedTuple):
    x: torch.Tensor  # [T, N, D]
    out: torch.Tensor  # [T, N, D]
    cos: torch.Tensor  # [T, D]
    sin: torch.Tensor  # [T, D]


class _Strides(NamedTuple):
    x_token: int
    x_head: int
    out_token: int
    out_head: int
    cos: int
    sin: int


class _Config(NamedTuple):
    num_heads: int
    half: int
    heads_block: int
    half_block: int


@jit
def rotate(a: tl.tensor, b: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """The halves a, b [N, D / 2] by the angles of cos, sin [D / 2]."""
    return a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :]


@jit
def _rope_kernel(tensors: tl.tuple, strides: tl.tuple, config: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, config.heads_block)
    d = tl.arange(0, config.half_block)
    inside_d = d < config.half
    inside = (head < config.num_heads)[:, None] & inside_d[None, :]
    # The second halves of both tables: the first half of `sin` is negated by contract.
    cos = tl.load(tensors.cos + token * strides.cos + config.half + d, mask=inside_d, other=0.0).to(tl.float32)
    sin = tl.load(tensors.sin + token * strides.sin + config.half + d, mask=inside_d, other=0.0).to(tl.float32)
    source = tensors.x + token * strides.x_token + head[:, None] * strides.x_head + d[None, :]
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + config.half, mask=inside, other=0.0).to(tl.float32)
    first, second = rotate(a, b, cos, sin)
    target = tensors.out + token * strides.out_token + head[:, None] * strides.out_head + d[None, :]
    tl.store(target, first.to(tensors.out.dtype.element_ty), mask=inside)
    tl.store(target + config.half, second.to(tensors.out.dtype.element_ty), mask=inside)


def triton_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, N, D], cos and sin [T, D] float32 -> [T, N, D] of x's dtype, new memory."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, out, cos, sin)
    return out


def triton_rope_in_place(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """As `triton_rope`, into x itself."""
    _launch(x, x, cos, sin)


def _launch(x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    assert_rows(x, out, cos, sin)
    tokens, num_heads, head_dim = x.shape
    config = _Config(num_heads, head_dim // 2, next_power_of_2(num_heads), next_power_of_2(head_dim // 2))
    if tokens:
        _rope_kernel[(tokens,)](
            _Tensors(x, out, cos, sin),
            _Strides(x.stride(0), x.stride(1), out.stride(0), out.stride(1), cos.stride(0), sin.stride(0)),
            config,
            **launch_options(row_warps(config.heads_block * config.half_block * 2)),
        )
