"""Paged attention: against the definition, and bitwise the same however sequences are cut, mixed and laid out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from engines.config import KVDType
from engines.ops.attention import (
    AttentionBackend,
    AttentionInputs,
    CpuAttention,
    Heads,
    ReferenceAttention,
    padded_keys,
    query_tile,
)
from engines.ops.kv_cache import KVCache, allocate_kv_cache

LENGTHS = (530, 200, 33, 1, 16)
SHAPES = [Heads(9, 3, 64), Heads(4, 2, 16), Heads(8, 1, 32), Heads(3, 3, 80)]
Steps = list[list[tuple[int, int]]]  # steps of (sequence, new tokens)


@dataclass(frozen=True)
class Sequence:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def sequences_of(heads: Heads) -> list[Sequence]:
    generator = torch.Generator().manual_seed(heads.head_dim)

    def tokens(length: int, count: int) -> torch.Tensor:
        return torch.randn(length, count, heads.head_dim, generator=generator)

    return [
        Sequence(tokens(n, heads.num_heads), tokens(n, heads.num_kv_heads), tokens(n, heads.num_kv_heads))
        for n in LENGTHS
    ]


def poisoned_cache(heads: Heads, num_blocks: int, block_size: int, kv_dtype: KVDType = "float32") -> KVCache:
    kv = allocate_kv_cache(2, num_blocks, heads.num_kv_heads, block_size, heads.head_dim, kv_dtype)
    for tensor in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in the float formats and in all scales
    if kv_dtype == "float32":
        kv.v.fill_(float("inf"))
    return kv


def run(
    backend: AttentionBackend,
    heads: Heads,
    sequences: list[Sequence],
    steps: Steps,
    block_size: int = 16,
    seed: int = 0,
    kv_dtype: KVDType = "float32",
) -> list[torch.Tensor]:
    """Results of every sequence, [n, H * D] each, with blocks in an order that `seed` shuffles. Uses layer 1 of 2."""
    needed = [-(-len(one.q) // block_size) for one in sequences]
    ids = list(range(sum(needed) + 2))
    random.Random(seed).shuffle(ids)
    tables = [[ids.pop() for _ in range(n)] for n in needed]
    kv = poisoned_cache(heads, sum(needed) + 2, block_size, kv_dtype)
    width = max(needed)
    padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
    done = [0] * len(sequences)
    outs: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        spans = [(s, done[s], done[s] + n) for s, n in step]
        lengths = [stop - start for _, start, stop in spans]
        inputs = AttentionInputs(
            query_start=torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32),
            context_lens=torch.tensor([stop for _, _, stop in spans], dtype=torch.int32),
            block_tables=padded[[s for s, _, _ in spans]],
            slot_mapping=torch.tensor(
                [tables[s][p // block_size] * block_size + p % block_size for s, a, b in spans for p in range(a, b)],
                dtype=torch.int32,
            ),
        )
        q, k, v = (
            torch.cat([getattr(sequences[s], name)[start:stop] for s, start, stop in spans]) for name in ("q", "k", "v")
        )
        together = backend.begin(inputs, kv).attend(1, q, k, v)
        for (s, _, stop), part in zip(spans, torch.split(together, lengths), strict=True):
            outs[s].append(part)
            done[s] = stop
    return [torch.cat(parts) for parts in outs]


def whole() -> Steps:
    return [[(s, length) for s, length in enumerate(LENGTHS)]]


def random_steps(seed: int) -> Steps:
    rng = random.Random(seed)
    left, steps = list(LENGTHS), []
    while any(left):
        chosen = [s for s in range(len(left)) if left[s] and rng.random() < 0.7]
        rng.shuffle(chosen)
        step = [(s, min(left[s], rng.choice((1, 1, 2, 5, 16, 17, 100, 300)))) for s in chosen]
        for s, n in step:
            left[s] -= n
        if step:
            steps.append(step)
    return steps


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_the_kernel_agrees_with_the_definition(heads: Heads) -> None:
    sequences = sequences_of(heads)
    exact = run(ReferenceAttention(heads), heads, sequences, whole())
    for got, wanted in zip(run(CpuAttention(heads), heads, sequences, whole()), exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=3e-6)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_cuts_neighbours_blocks_and_threads_do_not_change_a_bit(heads: Heads, threads: Callable[[int], None]) -> None:
    sequences, backend = sequences_of(heads), CpuAttention(heads)
    threads(2)
    expected = run(backend, heads, sequences, whole())
    for seed, (num_threads, block_size) in enumerate([(1, 16), (3, 8), (2, 32), (1, 128)]):
        threads(num_threads)
        got = run(backend, heads, sequences, random_steps(seed), block_size, seed)
        assert [torch.equal(a, b) for a, b in zip(got, expected, strict=True)] == [True] * len(LENGTHS), seed


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8", "int4"])
@pytest.mark.parametrize("heads", SHAPES[:2], ids=str)
def test_narrow_keys_and_values(heads: Heads, kv_dtype: KVDType, threads: Callable[[int], None]) -> None:
    """What is stored is the same for both, so they agree as in float32; and no cut or neighbour changes a bit."""
    sequences, backend = sequences_of(heads), CpuAttention(heads)
    exact = run(ReferenceAttention(heads), heads, sequences, whole(), kv_dtype=kv_dtype)
    threads(2)
    expected = run(backend, heads, sequences, whole(), kv_dtype=kv_dtype)
    for got, wanted in zip(expected, exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=5e-6)
    float32 = run(backend, heads, sequences, whole())
    error = max(float((a - b).abs().max()) for a, b in zip(expected, float32, strict=True))
    assert 1e-4 < error < {"bfloat16": 0.02, "int8": 0.05, "float8": 0.3, "int4": 1.0}[kv_dtype]
    for seed, (num_threads, block_size) in enumerate([(1, 16), (2, 32)]):
        threads(num_threads)
        got = run(backend, heads, sequences, random_steps(seed), block_size, seed, kv_dtype)
        assert [torch.equal(a, b) for a, b in zip(got, expected, strict=True)] == [True] * len(LENGTHS), seed


@pytest.mark.parametrize("window", [1, 16, 150, 300])
def test_windows(window: int, threads: Callable[[int], None]) -> None:
    """Against the definition, and bitwise the same however cut; 512 keys and more begin late in the sequence."""
    heads = SHAPES[0]
    sequences, backend = sequences_of(heads), CpuAttention(heads, window)
    threads(2)
    expected = run(backend, heads, sequences, whole())
    exact = run(ReferenceAttention(heads, window), heads, sequences, whole())
    for got, wanted in zip(expected, exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=3e-6)
    for seed, (num_threads, block_size) in enumerate([(1, 16), (2, 128)]):
        threads(num_threads)
        got = run(backend, heads, sequences, random_steps(seed), block_size, seed)
        assert [torch.equal(a, b) for a, b in zip(got, expected, strict=True)] == [True] * len(LENGTHS), seed


def test_a_large_mask_is_cut_without_changing_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = SHAPES[0]
    sequences = sequences_of(heads)
    expected = run(CpuAttention(heads), heads, sequences, whole())
    monkeypatch.setattr("engines.ops.attention.MASK_ROWS_TIMES_KEYS", 4000)
    for got, wanted in zip(run(CpuAttention(heads), heads, sequences, whole()), expected, strict=True):
        assert torch.equal(got, wanted)


def test_alone_is_as_among_others() -> None:
    heads = SHAPES[0]
    sequences, backend = sequences_of(heads), CpuAttention(heads)
    together = run(backend, heads, sequences, whole())
    for s, sequence in enumerate(sequences):
        (alone,) = run(backend, heads, [sequence], [[(0, len(sequence.q))]])
        assert torch.equal(alone, together[s])


def test_the_reference_reads_nothing_past_a_context() -> None:
    heads = SHAPES[1]
    for out in run(ReferenceAttention(heads), heads, sequences_of(heads), random_steps(9)):
        assert bool(torch.isfinite(out).all())


def test_keys_and_values_are_written_at_their_slots_and_nowhere_else() -> None:
    heads = Heads(4, 2, 16)
    kv = poisoned_cache(heads, 4, 16)
    kv.k.fill_(7.0)
    kv.v.fill_(8.0)
    inputs = AttentionInputs(
        query_start=torch.tensor([0, 2], dtype=torch.int32),
        context_lens=torch.tensor([5], dtype=torch.int32),
        block_tables=torch.tensor([[2]], dtype=torch.int32),
        slot_mapping=torch.tensor([35, 36], dtype=torch.int32),
    )
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    CpuAttention(heads).begin(inputs, kv).attend(1, q, k, v)
    assert torch.equal(kv.k[1, 2, :, 3:5], k.transpose(0, 1))
    assert torch.equal(kv.v[1, 2, :, 3:5], v.transpose(0, 1))
    kv.k[1, 2, :, 3:5], kv.v[1, 2, :, 3:5] = 7.0, 8.0
    assert bool((kv.k == 7.0).all())
    assert bool((kv.v == 8.0).all())


def test_a_new_block_forgets_its_last_owner_in_every_layer() -> None:
    heads = Heads(4, 2, 16)
    kv = poisoned_cache(heads, 3, 16)
    inputs = AttentionInputs(
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=torch.tensor([17], dtype=torch.int32),
        block_tables=torch.tensor([[0, 2]], dtype=torch.int32),
        slot_mapping=torch.tensor([32], dtype=torch.int32),
    )
    CpuAttention(heads).begin(inputs, kv)
    assert bool((kv.k[:, 2] == 0).all())
    assert bool((kv.v[:, 2] == 0).all())
    assert bool(kv.k[:, 0].isnan().all())


def test_padding_follows_from_the_position_and_holds_it() -> None:
    positions = (0, 127, 128, 383, 384, 511, 512, 1023, 1024, 5000)
    assert [padded_keys(p) for p in positions] == [128, 128, 256, 384, 512, 512, 1024, 1024, 1536, 5120]


def test_tiles_hold_about_sixteen_rows() -> None:
    assert [query_tile(repeats) for repeats in (1, 2, 3, 4, 7, 8, 16)] == [16, 8, 4, 4, 2, 2, 2]
