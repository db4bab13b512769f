"""Number formats of keys and values: exact by hand, the kernel's bits are the definition's, rows stand alone."""

from __future__ import annotations

import ctypes
from typing import get_args

import numpy as np
import pytest
import torch

from engines.config import KVDType
from engines.ops.kv_cache import KVRows, allocate_kv_cache
from engines.ops.kv_format import FORMATS, hadamard

NAMES = get_args(KVDType)
SCALED = ("int8", "float8", "int4")
HEAD_DIMS = (32, 64, 96, 256)


def awkward_rows(head_dim: int) -> torch.Tensor:
    """Random rows over many magnitudes; zeros, one spike, ties of rounding, subnormals, the largest floats."""
    generator = torch.Generator().manual_seed(head_dim)
    rows = torch.randn(64, head_dim, generator=generator) * torch.logspace(-20, 20, 64)[:, None]
    wide = torch.randn(64, head_dim, generator=generator) * torch.logspace(-7, 0, head_dim)
    spike = torch.zeros(1, head_dim)
    spike[0, -1] = -3.0
    ties = torch.arange(head_dim).float()[None] * 0.5 - head_dim / 4
    edges = torch.full((3, head_dim), 1e-41)
    edges[1], edges[2] = 0.0, 3e38
    # e4m3's own values and the middles between them: 448 keeps the scale at one.
    codes = torch.arange(head_dim, dtype=torch.uint8).clamp(max=0x7E).view(torch.float8_e4m3fn).float()
    middles = (codes + codes.roll(-1)) / 2
    middles[0], codes[0] = 448.0, 448.0
    return torch.cat((rows, wide, spike, ties, edges, codes[None], middles[None]))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_compiled_kernel_stores_and_loads_the_definitions_bits(
    native_library: ctypes.CDLL, name: KVDType, head_dim: int
) -> None:
    form, x = FORMATS[name], awkward_rows(head_dim)
    codes, scales = form.store(x)
    own = torch.full(codes.shape, 1, dtype=torch.uint8).repeat(1, form.storage.itemsize)
    own_scales = torch.full(x.shape[:1], float("nan"))
    status = native_library.facet_kv_store(
        form.code, x.data_ptr(), x.shape[0], head_dim, own.data_ptr(), own_scales.data_ptr()
    )
    assert status == 0
    assert torch.equal(own, codes.contiguous().view(torch.uint8))
    if scales is not None:
        assert torch.equal(own_scales, scales)
    back = torch.full_like(x, float("nan"))
    status = native_library.facet_kv_load(
        form.code, own.data_ptr(), own_scales.data_ptr(), x.shape[0], head_dim, back.data_ptr()
    )
    assert status == 0
    assert torch.equal(back, form.load(codes, scales))
    assert own.nbytes + (own_scales.nbytes if scales is not None else 0) == form.row_bytes(head_dim) * x.shape[0]


def test_every_e4m3_number_is_read_exactly(native_library: ctypes.CDLL) -> None:
    codes = torch.cat((torch.arange(0, 0x7F), torch.arange(0x80, 0xFF), torch.zeros(2))).to(torch.uint8)
    back, one = torch.empty(256), torch.ones(1)
    native_library.facet_kv_load(3, codes.data_ptr(), one.data_ptr(), 1, 256, back.data_ptr())
    assert torch.equal(back, codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("arguments", [(5, 64), (-1, 64), (2, 33), (2, 0), (2, 288)])
def test_formats_and_heads_the_kernel_does_not_know_are_refused(
    native_library: ctypes.CDLL, arguments: tuple[int, int]
) -> None:
    form, head_dim = arguments
    assert native_library.facet_kv_store(form, None, 1, head_dim, None, None) == 2
    assert native_library.facet_kv_load(form, None, None, 1, head_dim, None) == 2


def test_int4_by_hand() -> None:
    """scale = 8 / 8 = 1: steps of one, middles at halves; the two halves of a row share bytes."""
    x = torch.tensor([[-8.0, -7.2, -0.1, 0.0, 0.9, 1.0, 6.99, 8.0]])
    codes, scales = FORMATS["int4"].store(x)
    assert scales is not None
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [[0 | 8 << 4, 0 | 9 << 4, 7 | 14 << 4, 8 | 15 << 4]]
    assert FORMATS["int4"].load(codes, scales).tolist() == [[-7.5, -7.5, -0.5, 0.5, 0.5, 1.5, 6.5, 7.5]]


def test_int8_by_hand() -> None:
    x = torch.tensor([[-254.0, 3.0, 1.0, 0.0]])
    codes, scales = FORMATS["int8"].store(x)
    assert scales is not None
    assert (codes.tolist(), scales.tolist()) == ([[-127, 2, 0, 0]], [2.0])  # 1.5 and 0.5: to even


def test_the_error_of_each_format_is_what_its_bits_allow() -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    largest = x.abs().amax(dim=1, keepdim=True)
    bounds = {
        "float32": torch.zeros_like(largest),
        "bfloat16": x.abs() / 256,
        "int8": largest / 254 * 1.0001,
        "float8": torch.maximum(x.abs() / 16, largest / 448 / 1024) * 1.0001,
        "int4": largest / 16 * 1.0001,
    }
    for name, form in FORMATS.items():
        error = (form.load(*form.store(x)) - x).abs()
        assert bool((error <= bounds[name]).all()), name


def test_the_rotation_is_its_own_inverse_and_keeps_products() -> None:
    generator = torch.Generator().manual_seed(2)
    for head_dim in (1, 2, 6, 32, 64, 96, 160):
        a, b = torch.randn(2, 5, head_dim, generator=generator).double().float().unbind()
        assert torch.allclose(hadamard(hadamard(a)), a, atol=1e-6)
        assert torch.allclose((hadamard(a) * hadamard(b)).sum(-1), (a * b).sum(-1), atol=1e-5)
    spike = torch.zeros(64)
    spike[17] = 8.0
    assert hadamard(spike).abs().tolist() == [1.0] * 64


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_returns_what_was_written_and_zeros_where_it_was_cleared(name: KVDType) -> None:
    layers, blocks, heads, size, head_dim = 2, 5, 3, 4, 16
    kv = allocate_kv_cache(layers, blocks, heads, size, head_dim, name)
    for tensor in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in the float formats and in all scales
    assert kv.num_bytes == 2 * layers * blocks * heads * size * kv.format.row_bytes(head_dim)
    k, v = torch.randn(2, 6, heads, head_dim, generator=torch.Generator().manual_seed(3)).unbind()
    slots = torch.tensor([12, 13, 14, 15, 4, 5])  # block 3 whole, two of block 1
    kv.clear(torch.tensor([1, 3]))
    kv.write(1, slots, k, v)
    keys, values = kv.read(1, torch.tensor([3, 1]))
    for read, x in ((keys, k), (values, v)):
        stored = kv.format.load(*kv.format.store(x))
        assert torch.equal(read.transpose(1, 2).flatten(0, 1)[:6], stored)
        assert read[1, :, 2:].abs().max() == 0.0
    other = allocate_kv_cache(layers, blocks, heads, size, head_dim, name)
    other.clear(torch.arange(blocks))
    rows = KVRows(other)
    flat = ((slots // size)[:, None] * heads + torch.arange(heads)) * size + (slots % size)[:, None]
    rows.write(1, flat.flatten(), k.flatten(0, 1), v.flatten(0, 1))
    again = rows.read(1, (torch.tensor([3, 1])[:, None] * heads + torch.arange(heads)).flatten())
    for read, expected in zip(again, (keys, values), strict=True):
        assert torch.equal(read.view(2, heads, size, head_dim), expected)


@pytest.mark.parametrize("name", SCALED)
def test_a_rows_bits_do_not_depend_on_its_neighbours(name: KVDType) -> None:
    x = awkward_rows(64)
    codes, scales = FORMATS[name].store(x)
    assert scales is not None
    for row in range(0, x.shape[0], 7):
        one, scale = FORMATS[name].store(x[row : row + 1])
        assert scale is not None
        assert torch.equal(one[0].view(torch.uint8), codes[row].view(torch.uint8))
        assert torch.equal(scale[0], scales[row])


def test_bytes_of_one_token_and_head() -> None:
    assert [FORMATS[name].row_bytes(64) for name in NAMES] == [256, 128, 68, 68, 36]
    assert np.unique([form.code for form in FORMATS.values()]).tolist() == [0, 1, 2, 3, 4]
