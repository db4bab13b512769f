"""KV write, quantized and joined with the rotation, in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.kv_write import LEVELS, LayerKV, reference_kv_write, reference_rope_kv_write
from engines.ops.rope import rotary_tables
from engines.ops.triton.kv_write import triton_kv_write, triton_rope_kv_write

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CACHES = (*DTYPES, torch.int8, torch.float8_e4m3fn)
SLOTS = (37, 3, -1, 0, 20)
BLOCKS = 6


def empty_cache(lab: Any, heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> LayerKV:
    """Every slot holds NaN (or 0x7F bytes) until written."""
    shape = (BLOCKS, heads, block_size, head_dim)
    fill = (
        torch.full(shape, 0x7F, dtype=torch.uint8).view(dtype)
        if dtype.itemsize == 1
        else torch.full(shape, float("nan"), dtype=dtype)
    )
    k, v = (lab.put(fill, mutable=True) for _ in range(2))
    if dtype not in LEVELS:
        return LayerKV(k, v)
    k_scale, v_scale = (lab.put(torch.full(shape[:3], float("nan")), mutable=True) for _ in range(2))
    return LayerKV(k, v, k_scale, v_scale)


def compare(lab: Any, actual: torch.Tensor | None, expected: torch.Tensor | None, *, exact: bool) -> None:
    """All slots: written ones near the reference, the others as they were."""
    if actual is None or expected is None:
        assert actual is expected
        return
    if exact:
        lab.same(actual, expected)
    elif actual.dtype == torch.int8:
        assert int((actual.int() - expected.int()).abs().max()) <= 1
        assert float((actual == expected).float().mean()) > 0.99
    elif actual.dtype == torch.float8_e4m3fn:  # neighbours in order of bytes are neighbours in value
        assert int((actual.view(torch.int8).int() - expected.view(torch.int8).int()).abs().max()) <= 1
        assert float((actual.view(torch.uint8) == expected.view(torch.uint8)).float().mean()) > 0.99
    else:
        untouched = expected.isnan()
        assert torch.equal(actual.isnan(), untouched)
        lab.close(actual.nan_to_num(0.0), expected.nan_to_num(0.0))


def read_back(kv: LayerKV, name: str) -> torch.Tensor:
    values, scales = getattr(kv, name).float(), getattr(kv, name + "_scale")
    return (values if scales is None else values * scales[..., None]).nan_to_num(0.0)


def written(lab: Any, heads: int, head_dim: int, dtype: torch.dtype, cache: torch.dtype, block_size: int = 8) -> None:
    k = lab.randn(len(SLOTS), heads, head_dim, dtype=dtype)
    v = lab.randn(len(SLOTS), heads, head_dim, seed=1, dtype=dtype)
    slots = lab.put(torch.tensor(SLOTS, dtype=torch.int32))
    actual, expected = (empty_cache(lab, heads, block_size, head_dim, cache) for _ in range(2))
    lab.run(triton_kv_write, k, v, actual, slots)
    reference_kv_write(k, v, expected, slots)
    exact = cache != torch.bfloat16 or dtype == torch.bfloat16  # the interpreter truncates float32 -> bfloat16
    for name in ("k", "v", "k_scale", "v_scale"):
        compare(lab, getattr(actual, name), getattr(expected, name), exact=exact)


def rotated(lab: Any, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, cache: torch.dtype) -> None:
    tokens, (num_heads, num_kv_heads) = len(SLOTS), heads
    q = torch.randn(tokens, num_heads, head_dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    q_actual, q_expected = lab.put(q, mutable=True), q.clone()
    k = lab.randn(tokens, num_kv_heads, head_dim, dtype=dtype)
    v = lab.randn(tokens, num_kv_heads, head_dim, seed=1, dtype=dtype)
    cos, sin = (lab.put(table[torch.arange(tokens) * 11]) for table in rotary_tables(100, head_dim, 10000.0))
    slots = lab.put(torch.tensor(SLOTS, dtype=torch.int32))
    actual, expected = (empty_cache(lab, num_kv_heads, 8, head_dim, cache) for _ in range(2))
    lab.run(triton_rope_kv_write, q_actual, k, v, cos, sin, actual, slots)
    reference_rope_kv_write(q_expected, k, v, cos, sin, expected, slots)
    lab.close(q_actual.contiguous(), q_expected)
    lab.same(q_actual[2], q[2])  # the padding row
    if dtype == torch.bfloat16:  # one truncation may move a whole step of the cache: compare what is read back
        step = {torch.int8: 0.03, torch.float8_e4m3fn: 0.13}.get(cache, 0.01)
        for name in ("k", "v"):
            lab.close(read_back(actual, name), read_back(expected, name), relative=step, scale=1.0)
        return
    for name in ("k", "v", "k_scale", "v_scale"):
        compare(lab, getattr(actual, name), getattr(expected, name), exact=False)


def extremes(lab: Any) -> None:
    """Zeros, values of one magnitude, subnormal steps of e4m3, ties: the bytes of torch's own conversion."""
    row = torch.tensor([448.0, -448.0, 0.0, 2**-9, 2**-10, 3 * 2**-10, 0.0146484375, 0.015625, 17.0, 19.0, 27.0, -1e-6])
    k = lab.put(torch.stack((row, torch.zeros(12), torch.full((12,), -3e38), torch.full((12,), 1e-38)))[:, None])
    slots = lab.put(torch.arange(4, dtype=torch.int32))
    for dtype in LEVELS:
        actual, expected = (empty_cache(lab, 1, 8, 12, dtype) for _ in range(2))
        lab.run(triton_kv_write, k, k, actual, slots)
        reference_kv_write(k, k, expected, slots)
        for name in ("k", "v", "k_scale", "v_scale"):
            lab.same(getattr(actual, name), getattr(expected, name))


CASES = {
    **{
        f"{str(dtype)[6:]}-into-{str(cache)[6:]}-{heads}x{head_dim}": partial(
            written, heads=heads, head_dim=head_dim, dtype=dtype, cache=cache
        )
        for dtype in DTYPES
        for cache in CACHES
        for heads, head_dim in ((1, 64), (3, 80))
    },
    "block-of-7": partial(written, heads=8, head_dim=96, dtype=torch.float32, cache=torch.int8, block_size=7),
    **{
        f"rotated-{str(dtype)[6:]}-into-{str(cache)[6:]}-{heads[0]}/{heads[1]}x{head_dim}": partial(
            rotated, heads=heads, head_dim=head_dim, dtype=dtype, cache=cache
        )
        for dtype in DTYPES
        for cache in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
        for heads, head_dim in (((9, 3), 64), ((8, 2), 80))
    },
    "extremes": extremes,
}


def launch(cache: torch.dtype, rotate: bool) -> None:
    rows = {heads: torch.empty(4, heads, 64, dtype=torch.bfloat16) for heads in (9, 3)}
    scale = torch.empty(6, 3, 16) if cache in LEVELS else None
    blocks = torch.empty(6, 3, 16, 64, dtype=cache)
    kv, slots = LayerKV(blocks, blocks.clone(), scale, scale), torch.empty(4, dtype=torch.int32)
    if rotate:
        table = torch.empty(4, 64)
        triton_rope_kv_write(rows[9], rows[3], rows[3], table, table, kv, slots)
    else:
        triton_kv_write(rows[3], rows[3], kv, slots)


LAUNCHES = {
    f"{'rotated-' if rotate else ''}{str(cache)[6:]}": partial(launch, cache, rotate)
    for cache, rotate in (
        (torch.bfloat16, False),
        (torch.int8, False),
        (torch.bfloat16, True),
        (torch.float8_e4m3fn, True),
    )
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
