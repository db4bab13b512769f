"""Norm, rotary positions, gated activation, embeddings: against their definitions; a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engines.ops.embedding import GROUP_SIZE, embed_float32, embed_int8, quantize_groups
from engines.ops.rmsnorm import cpu_rms_norm, reference_rms_norm
from engines.ops.rope import cpu_rope, reference_rope, rotary_tables
from engines.ops.silu_mul import cpu_silu_mul, reference_silu_mul

ROWS = (1, 2, 3, 5, 16, 33, 64, 200)


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_are_their_own(op: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    together = op(x)
    for rows in ROWS:
        assert torch.equal(op(x[:rows]), together[:rows]), rows
    assert torch.equal(op(x.flip(0)), together.flip(0))


@pytest.mark.parametrize("width", [64, 576, 1000])
def test_rms_norm(width: int, threads: None) -> None:
    x, weight = 3 * normal(200, width), normal(width, seed=1)
    torch.testing.assert_close(cpu_rms_norm(x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-6)
    assert_rows_are_their_own(lambda rows: cpu_rms_norm(rows, weight, 1e-5), x)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(cpu_rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("width", [128, 1536, 1000])
def test_silu_mul(width: int, threads: None) -> None:
    x = 4 * normal(200, 2 * width)
    torch.testing.assert_close(cpu_silu_mul(x), reference_silu_mul(x), rtol=2e-6, atol=1e-6)
    assert_rows_are_their_own(cpu_silu_mul, x)


def test_silu_mul_of_huge_values_is_finite_or_the_limit() -> None:
    out = cpu_silu_mul(torch.tensor([[-200.0, 200.0, 3.0, 3.0]]))
    assert out.tolist() == [[0.0, 600.0]]


@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_rope(head_dim: int, threads: None) -> None:
    cos, sin = rotary_tables(400, head_dim, 10000.0)
    x = normal(200, 6, head_dim)
    torch.testing.assert_close(cpu_rope(x, cos[:200], sin[:200]), reference_rope(x, cos[:200], sin[:200]))
    together = cpu_rope(x, cos[:200], sin[:200])
    for rows in ROWS:
        assert torch.equal(cpu_rope(x[:rows], cos[:rows], sin[:rows]), together[:rows])


def test_rope_turns_pairs_of_halves_by_position() -> None:
    """Head dimension 4, theta 100: pairs (0, 2) and (1, 3) turn by p and p / 10."""
    cos, sin = rotary_tables(8, 4, 100.0)
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 1, 4)
    turned = cpu_rope(x, cos[5:6], sin[5:6])[0, 0]
    angle = torch.tensor([5.0, 0.5])
    expected = [angle[0].cos(), -2 * angle[1].sin(), angle[0].sin(), 2 * angle[1].cos()]
    assert turned.tolist() == pytest.approx([float(value) for value in expected], abs=1e-6)


def test_rotated_products_depend_on_distance_alone() -> None:
    cos, sin = rotary_tables(64, 32, 10000.0)
    q, k = normal(1, 1, 32), normal(1, 1, 32, seed=1)

    def product(at: int, other: int) -> float:
        a = cpu_rope(q, cos[at : at + 1], sin[at : at + 1])
        b = cpu_rope(k, cos[other : other + 1], sin[other : other + 1])
        return float((a * b).sum())

    assert product(40, 33) == pytest.approx(product(12, 5), abs=1e-4)
    assert product(40, 33) != pytest.approx(product(40, 5), abs=1e-2)


def test_embeddings() -> None:
    table = normal(50, 2 * GROUP_SIZE)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(embed_float32(ids, table), table[ids])
    groups, scales = quantize_groups(table)
    assert groups.shape == (50, 2, GROUP_SIZE)
    looked_up = embed_int8(ids, groups, scales)
    assert looked_up.shape == (4, 2 * GROUP_SIZE)
    largest = table[ids].view(4, 2, GROUP_SIZE).abs().amax(dim=-1, keepdim=True)
    error = (looked_up - table[ids]).view(4, 2, GROUP_SIZE).abs()
    assert bool((error <= largest / 127 * 0.5001).all())


def test_a_table_on_the_int8_grid_is_exact() -> None:
    codes = torch.randint(-126, 127, (20, 64), generator=torch.Generator().manual_seed(2))
    codes[:, ::GROUP_SIZE] = 127
    table = codes.float() * 0.125
    assert torch.equal(embed_int8(torch.arange(20), *quantize_groups(table)), table)


def test_a_width_that_32_does_not_divide_is_one_group() -> None:
    groups, scales = quantize_groups(normal(7, 40))
    assert groups.shape == (7, 1, 40)
    assert scales.shape == (7, 1)
