"""KV write on CUDA: contract of `engines/ops/kv_write.py`, alone or joined with the rotation of q and k.

A program does all key/value heads of one token. A head lies as two halves [G, D / 2], because the rotation pairs them;
a scale is the largest magnitude of both. Rows, values and caches may be float32, float16 or bfloat16, caches also int8
or float8_e4m3fn (written as bytes). Row-local.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl

from engines.ops.kv_write import LEVELS, SMALLEST_MAGNITUDE, LayerKV
from engines.ops.triton.kernel import as_bytes, assert_rows, jit, launch_options, next_power_of_2, row_warps
from engines.ops.triton.numeric import round_half_even, to_e4m3
from engines.ops.triton.rope import rotate


class _Tensors(NamedTuple):
    q: torch.Tensor | None  # [T, H, D], rotated in place
    k: torch.Tensor  # [T, G, D]
    v: torch.Tensor  # [T, G, D]
    cos: torch.Tensor | None  # [T, D]
    sin: torch.Tensor | None  # [T, D]
    k_cache: torch.Tensor  # [N, G, B, D]
    v_cache: torch.Tensor
    k_scale: torch.Tensor | None  # [N, G, B]
    v_scale: torch.Tensor | None
    slots: torch.Tensor  # [T]


class _Strides(NamedTuple):
    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    cos: int
    sin: int
    cache_block: int
    cache_head: int
    cache_token: int
    scale_block: int
    scale_head: int


class _Config(NamedTuple):
    num_heads: int
    num_kv_heads: int
    half: int
    heads_block: int
    kv_heads_block: int
    half_block: int
    block_size: int
    levels: float  # 0: a float cache
    smallest: float


@jit
def _narrow(x: tl.tensor, cache: tl.tensor, config: tl.constexpr) -> tl.tensor:
    """x [G, D / 2] float32, already divided by its scale -> the cache's dtype."""
    if cache.dtype.element_ty == tl.int8:
        y = round_half_even(x).to(tl.int8)
    elif cache.dtype.element_ty == tl.uint8:
        y = to_e4m3(x)
    else:
        y = x.to(cache.dtype.element_ty)
    return y


@jit
def _store_heads(
    a: tl.tensor, b: tl.tensor, cache: tl.tensor, scales: tl.tensor, place: tl.tuple, config: tl.constexpr
) -> None:
    """Halves a, b [G, D / 2] into `cache` at `place` = (offsets [G], scale offsets [G], d [D / 2])."""
    offsets, scale_offsets, d = place
    head_inside = tl.arange(0, config.kv_heads_block) < config.num_kv_heads
    inside = head_inside[:, None] & (d < config.half)[None, :]
    if config.levels > 0:
        largest = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(b), axis=1))
        scale = tl.maximum(largest, config.smallest) / config.levels
        tl.store(scales + scale_offsets, scale, mask=head_inside)
        a = a / scale[:, None]
        b = b / scale[:, None]
    target = cache + offsets[:, None] + d[None, :]
    tl.store(target, _narrow(a, cache, config), mask=inside)
    tl.store(target + config.half, _narrow(b, cache, config), mask=inside)


@jit
def _load_halves(
    x: tl.tensor, head_stride: tl.tensor, num_heads: tl.constexpr, heads_block: tl.constexpr, config: tl.constexpr
) -> tl.tuple:
    """One token's heads as two halves [N, D / 2] float32."""
    head, d = tl.arange(0, heads_block), tl.arange(0, config.half_block)
    inside = (head < num_heads)[:, None] & (d < config.half)[None, :]
    source = x + head[:, None] * head_stride + d[None, :]
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    return a, tl.load(source + config.half, mask=inside, other=0.0).to(tl.float32)


@jit
def _rotate_q(
    token: tl.tensor, cos: tl.tensor, sin: tl.tensor, tensors: tl.tuple, strides: tl.tuple, config: tl.constexpr
) -> None:
    base = tensors.q + token * strides.q_token
    a, b = _load_halves(base, strides.q_head, config.num_heads, config.heads_block, config)
    first, second = rotate(a, b, cos, sin)
    head, d = tl.arange(0, config.heads_block), tl.arange(0, config.half_block)
    inside = (head < config.num_heads)[:, None] & (d < config.half)[None, :]
    target = base + head[:, None] * strides.q_head + d[None, :]
    tl.store(target, first.to(tensors.q.dtype.element_ty), mask=inside)
    tl.store(target + config.half, second.to(tensors.q.dtype.element_ty), mask=inside)


@jit
def _kv_write_kernel(tensors: tl.tuple, strides: tl.tuple, config: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(tensors.slots + token).to(tl.int64)
    if slot < 0:
        return
    head, d = tl.arange(0, config.kv_heads_block), tl.arange(0, config.half_block)
    block, offset = slot // config.block_size, slot % config.block_size
    place = (
        block * strides.cache_block + head * strides.cache_head + offset * strides.cache_token,
        block * strides.scale_block + head * strides.scale_head + offset,
        d,
    )
    k_row, v_row = tensors.k + token * strides.k_token, tensors.v + token * strides.v_token
    a, b = _load_halves(k_row, strides.k_head, config.num_kv_heads, config.kv_heads_block, config)
    if tensors.q is not None:
        # The second halves of both tables: the first half of `sin` is negated by contract.
        inside = d < config.half
        cos = tl.load(tensors.cos + token * strides.cos + config.half + d, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(tensors.sin + token * strides.sin + config.half + d, mask=inside, other=0.0).to(tl.float32)
        _rotate_q(token, cos, sin, tensors, strides, config)
        a, b = rotate(a, b, cos, sin)
        a = a.to(tensors.k.dtype.element_ty).to(tl.float32)  # as if `rope` had stored it
        b = b.to(tensors.k.dtype.element_ty).to(tl.float32)
    _store_heads(a, b, tensors.k_cache, tensors.k_scale, place, config)
    c, e = _load_halves(v_row, strides.v_head, config.num_kv_heads, config.kv_heads_block, config)
    _store_heads(c, e, tensors.v_cache, tensors.v_scale, place, config)


def triton_kv_write(k: torch.Tensor, v: torch.Tensor, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
    """k and v [T, G, D] into `kv` at slot_mapping [T]; negative slots are skipped."""
    _launch(_tensors(None, k, v, None, None, kv, slot_mapping))


def triton_rope_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: LayerKV,
    slot_mapping: torch.Tensor,
) -> None:
    """As `triton_kv_write`, after rotating q [T, H, D] (in place) and k by cos, sin [T, D]."""
    _launch(_tensors(q, k, v, cos, sin, kv, slot_mapping))


def _tensors(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    kv: LayerKV,
    slot_mapping: torch.Tensor,
) -> _Tensors:
    assert_rows(q, k, v, cos, sin, kv.k, kv.v, kv.k_scale, kv.v_scale)
    assert kv.k.stride() == kv.v.stride(), "k and v blocks are laid out alike"
    assert (kv.k_scale is not None) == (kv.k.dtype in LEVELS), kv.k.dtype
    return _Tensors(q, k, v, cos, sin, as_bytes(kv.k), as_bytes(kv.v), kv.k_scale, kv.v_scale, slot_mapping)


def _launch(tensors: _Tensors) -> None:
    tokens, num_kv_heads, head_dim = tensors.k.shape
    cache, q, scale = tensors.k_cache, tensors.q, tensors.k_scale
    strides = _Strides(
        q_token=0 if q is None else q.stride(0),
        q_head=0 if q is None else q.stride(1),
        k_token=tensors.k.stride(0),
        k_head=tensors.k.stride(1),
        v_token=tensors.v.stride(0),
        v_head=tensors.v.stride(1),
        cos=0 if tensors.cos is None else tensors.cos.stride(0),
        sin=0 if tensors.sin is None else tensors.sin.stride(0),
        cache_block=cache.stride(0),
        cache_head=cache.stride(1),
        cache_token=cache.stride(2),
        scale_block=0 if scale is None else scale.stride(0),
        scale_head=0 if scale is None else scale.stride(1),
    )
    levels = {torch.int8: LEVELS[torch.int8], torch.uint8: LEVELS[torch.float8_e4m3fn]}.get(cache.dtype, 0.0)
    num_heads = num_kv_heads if q is None else int(q.shape[1])
    config = _Config(
        num_heads,
        num_kv_heads,
        head_dim // 2,
        next_power_of_2(num_heads),
        next_power_of_2(num_kv_heads),
        next_power_of_2(head_dim // 2),
        int(cache.shape[2]),
        levels,
        SMALLEST_MAGNITUDE,
    )
    if tokens:
        _kv_write_kernel[(tokens,)](
            tensors, strides, config, **launch_options(row_warps(config.heads_block * config.half_block * 2))
        )
