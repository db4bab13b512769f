"""The compiled decoder: close to the reference, and one bit pattern a sequence however it is computed."""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from engines.config import KVDType
from engines.layers.forward_batch import ForwardBatch
from engines.ops.attention import Heads
from engines.ops.decoder import (
    PROJECTIONS,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
    NativeDecoder,
    ReferenceDecoder,
    why_unsupported,
)
from engines.ops.group_linear import pack_panels
from engines.ops.kv_cache import KVCache, allocate_kv_cache
from engines.ops.native import NativeUnavailableError
from engines.quant.group import GroupQuant, quantize_groups

LAYERS = 2
VOCAB = 101
NUM_BLOCKS = 64
NARROW = ("bfloat16", "int8", "float8", "int4")


@dataclass(frozen=True)
class Case:
    """A decoder's shape; `group` and `bits` of its matrices; whether projections have biases."""

    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 32
    hidden: int = 96
    inner: int = 160
    bits: int = 4
    group: int = 32
    biases: bool = False

    @property
    def shape(self) -> DecoderShape:
        heads = Heads(self.heads, self.kv_heads, self.head_dim)
        return DecoderShape(heads, self.hidden, self.inner, VOCAB, 512, 1e-5, 10000.0)


SMALL = Case()
CASES = {
    "gqa": SMALL,
    "mha, biases": Case(heads=2, kv_heads=2, head_dim=64, hidden=128, biases=True),
    "mqa": Case(heads=7, kv_heads=1, head_dim=32, hidden=64),
    "head 96, groups of 16": Case(heads=2, kv_heads=1, head_dim=96, hidden=192, inner=192, bits=8, group=16),
    "head 128": Case(heads=4, kv_heads=2, head_dim=128, hidden=256, bits=8),
}


def random_matrix(outputs: int, inputs: int, bits: int, group: int, rng: np.random.Generator) -> GroupQuant:
    weight = rng.normal(0.0, 1.0 / np.sqrt(inputs), size=(outputs, inputs)).astype(np.float32)
    if bits == 8:
        return quantize_groups(weight, group)
    grouped = weight.reshape(outputs, -1, group)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    scales, minima = ((high - low) / 15).astype(np.float16), low.astype(np.float16)
    codes = np.rint((grouped - minima[:, :, None].astype(np.float32)) / scales[:, :, None].astype(np.float32))
    return GroupQuant(np.clip(codes, 0, 15).astype(np.uint8).reshape(weight.shape), scales, minima, 0.0, 4)


def random_weights(case: Case, seed: int = 0, tied: bool = True) -> DecoderWeights:
    rng = np.random.default_rng(seed)
    query, kv = case.heads * case.head_dim, case.kv_heads * case.head_dim
    sizes = {
        "q": (query, case.hidden),
        "k": (kv, case.hidden),
        "v": (kv, case.hidden),
        "o": (case.hidden, query),
        "gate": (case.inner, case.hidden),
        "up": (case.inner, case.hidden),
        "down": (case.hidden, case.inner),
    }

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, size=case.hidden).astype(np.float32)

    def layer() -> LayerWeights:
        matrices = {name: pack_panels(random_matrix(*sizes[name], case.bits, case.group, rng)) for name in PROJECTIONS}
        biases = {
            name: rng.normal(0.0, 0.2, size=sizes[name][0]).astype(np.float32)
            for name in (PROJECTIONS if case.biases else ())
        }
        return LayerWeights(matrices, biases, norm(), norm())

    embedding = pack_panels(random_matrix(VOCAB, case.hidden, 8, 32, rng))
    head = embedding if tied else pack_panels(random_matrix(VOCAB, case.hidden, 4, 32, rng))
    return DecoderWeights(tuple(layer() for _ in range(LAYERS)), embedding, head, norm())


def poisoned_cache(case: Case, block_size: int, kv_dtype: KVDType = "float32") -> KVCache:
    """Every slot or its scale a NaN: whatever is read without having been written shows."""
    kv = allocate_kv_cache(LAYERS, NUM_BLOCKS, case.kv_heads, block_size, case.head_dim, kv_dtype)
    for tensor in (kv.k, kv.v, kv.k_scale, kv.v_scale):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(0xFF)
    return kv


@dataclass(frozen=True)
class Part:
    """Tokens start..start + n of a sequence that owns `blocks`; logits of all of them or of the last."""

    tokens: list[int]
    start: int
    blocks: list[int]
    all_logits: bool = True


def batch_of(parts: list[Part], block_size: int) -> ForwardBatch:
    ids, positions, slots, starts, contexts, rows = [], [], [], [0], [], []
    width = max(len(part.blocks) for part in parts)
    for part in parts:
        places = range(part.start, part.start + len(part.tokens))
        ids += part.tokens
        positions += places
        slots += [part.blocks[p // block_size] * block_size + p % block_size for p in places]
        first, end = starts[-1], starts[-1] + len(part.tokens)
        rows += range(first, end) if part.all_logits else [end - 1]
        starts.append(end)
        contexts.append(places[-1] + 1)
    tables = [part.blocks + [0] * (width - len(part.blocks)) for part in parts]

    def int32(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return ForwardBatch(
        torch.tensor(ids),
        int32(positions),
        int32(slots),
        int32(starts),
        int32(contexts),
        int32(tables),
        torch.tensor(rows, dtype=torch.int64),
    )


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def shuffled_blocks(count: int, seed: int) -> list[int]:
    return torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed))[:count].tolist()


def decode(
    model: NativeDecoder,
    case: Case,
    ids: list[int],
    block_size: int,
    cuts: list[int],
    kv_dtype: KVDType = "float32",
) -> torch.Tensor:
    """Logits of every token, the prompt cut after each of `cuts`; a fresh poisoned cache in shuffled blocks."""
    kv = poisoned_cache(case, block_size, kv_dtype)
    blocks = shuffled_blocks(-(-len(ids) // block_size), seed=len(cuts))
    edges = [0, *cuts, len(ids)]
    parts = [Part(ids[a:b], a, blocks) for a, b in itertools.pairwise(edges)]
    return torch.cat([model.forward(batch_of([part], block_size), kv) for part in parts])


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_the_reference_computes(native_library: ctypes.CDLL, name: str) -> None:
    case = CASES[name]
    weights = random_weights(case, seed=1, tied=name != "mqa")
    parts = [Part(tokens(83, 1), 0, [3, 9, 1, 7, 11, 2]), Part(tokens(9, 2), 0, [20]), Part(tokens(1, 3), 0, [30])]
    batch = batch_of(parts, 16)
    expected = ReferenceDecoder(case.shape, weights).forward(batch, poisoned_cache(case, 16))
    for threads in (1, 2):
        kv = poisoned_cache(case, 16)
        out = NativeDecoder(native_library, case.shape, weights, threads).forward(batch, kv)
        error = (out - expected).norm(dim=1) / expected.norm(dim=1)  # [rows]
        # Rows agree to float rounding, until the rounding of one activation falls the other way (a step of 1/127 of
        # its group): then that row, and rows that see its keys, move a little.
        assert error.median() < 1e-6, error
        assert error.max() < 0.04, error
        written = batch.slot_mapping.long()
        flat = kv.v.permute(1, 3, 0, 2, 4).reshape(NUM_BLOCKS * 16, -1)
        assert torch.isfinite(flat[written]).all()
        assert int(torch.isfinite(flat).all(dim=1).sum()) == len(written)


@pytest.mark.parametrize("block_size", [1, 8, 16, 48])
def test_a_prompt_cut_anywhere_gives_the_same_bits(native_library: ctypes.CDLL, block_size: int) -> None:
    case, count = SMALL, 150 if block_size > 1 else 60
    weights, ids = random_weights(case, seed=2), tokens(count, 4)
    model = NativeDecoder(native_library, case.shape, weights, 2)
    whole = decode(model, case, ids, block_size, [])
    assert torch.isfinite(whole).all()
    for cuts in ([count - 1], [49], [7, 8, 40], list(range(50, count)), list(range(1, count))):
        assert torch.equal(decode(model, case, ids, block_size, cuts), whole), cuts


@pytest.mark.parametrize("name", CASES)
def test_the_number_of_threads_does_not_show(native_library: ctypes.CDLL, name: str) -> None:
    case = CASES[name]
    weights, ids = random_weights(case, seed=3), tokens(140, 5)
    cuts = [100, 101, 102, 103]
    alone = decode(NativeDecoder(native_library, case.shape, weights, 1), case, ids, 16, cuts)
    for threads in (2, 3, 5):
        model = NativeDecoder(native_library, case.shape, weights, threads)
        assert torch.equal(decode(model, case, ids, 16, cuts), alone), threads


def test_neighbours_do_not_show(native_library: ctypes.CDLL) -> None:
    """A sequence alone, among decoding rows, and among prompts that turn the schedule to blocks of rows."""
    case = SMALL
    weights, ids = random_weights(case, seed=4), tokens(90, 6)
    model = NativeDecoder(native_library, case.shape, weights, 2)
    alone = decode(model, case, ids, 16, [89])
    for neighbours in ([1] * 15, [40], [1, 130, 1, 33]):
        kv, own = poisoned_cache(case, 16), [40, 41, 42, 43, 44, 45]
        first = model.forward(batch_of([Part(ids[:89], 0, own)], 16), kv)
        free = itertools.count()
        others = [
            Part(tokens(n, 50 + i), 0, [next(free) for _ in range(-(-n // 16))]) for i, n in enumerate(neighbours)
        ]
        place = len(others) // 2
        parts = [*others[:place], Part(ids[89:], 89, own), *others[place:]]
        logits = model.forward(batch_of([replace(part, all_logits=False) for part in parts], 16), kv)
        assert torch.equal(first, alone[:89])
        assert torch.equal(logits[place], alone[89]), neighbours


@pytest.mark.parametrize("block_size", [16, 96])
def test_sharing_blocks_does_not_show(native_library: ctypes.CDLL, block_size: int) -> None:
    """Sequences that share key blocks attend together; each has the bits it has alone.

    A tree: a prefix of all, two branches of some, own tails, a sequence that is another's beginning, one that shares
    nothing; single rows and several, in an order that mixes them.
    """
    case = SMALL
    weights = random_weights(case, seed=10)
    model = NativeDecoder(native_library, case.shape, weights, 2)
    kv, free = poisoned_cache(case, block_size), iter(shuffled_blocks(NUM_BLOCKS, seed=3))
    unit = math.lcm(block_size, 64)

    def stretch(ids: list[int], before: list[int], start: int) -> list[int]:
        """Blocks of a computed sequence: `before`, then new ones for `ids` from `start` on."""
        blocks = before + [next(free) for _ in range(-(-len(ids) // block_size))]
        model.forward(batch_of([Part(ids, start, blocks)], block_size), kv)
        return blocks

    root = stretch(tokens(unit, 20), [], 0)
    left, right = (stretch(tokens(unit, seed), root, unit) for seed in (21, 22))
    parts = []
    for i, (before, start) in enumerate(
        [(left, 2 * unit), (root, unit), ([], 0), (right, 2 * unit), (left, 2 * unit), (root, unit), (left, 2 * unit)]
    ):
        length = 3 * i % block_size
        blocks = stretch(tokens(length, 30 + i), before, start) if length else list(before)
        new = tokens(1 if i % 2 else 4, 40 + i)
        while len(blocks) * block_size < start + length + len(new):
            blocks.append(next(free))
        parts.append(Part(new, start + length, blocks))
    alone = [model.forward(batch_of([part], block_size), kv) for part in parts]
    assert all(torch.isfinite(logits).all() for logits in alone)
    for threads in (1, 2, 5):
        together = NativeDecoder(native_library, case.shape, weights, threads).forward(batch_of(parts, block_size), kv)
        assert torch.equal(together, torch.cat(alone)), threads


def test_logits_come_for_the_rows_that_are_asked_for(native_library: ctypes.CDLL) -> None:
    case = SMALL
    weights, ids = random_weights(case, seed=5), tokens(160, 7)
    own = list(range(5, 16))
    model = NativeDecoder(native_library, case.shape, weights, 2)
    for count in (160, 70, 20):  # by rows, by columns
        every = batch_of([Part(ids[:count], 0, own)], 16)
        whole = model.forward(every, poisoned_cache(case, 16))
        for rows in ([], [0], [count - 1], [3, 4, count - 2]):
            wanted = replace(every, logits_rows=torch.tensor(rows, dtype=torch.int64))
            kv = poisoned_cache(case, 16)
            assert torch.equal(model.forward(wanted, kv), whole[rows])
            # Keys and values are written although nobody asked for logits: the next token sees them.
            again = batch_of([Part(ids[count : count + 1] or [1], count, own)], 16)
            assert torch.isfinite(model.forward(again, kv)).all()


@pytest.mark.parametrize("kv_dtype", NARROW)
@pytest.mark.parametrize("name", CASES)
def test_narrow_keys_and_values_are_the_references(native_library: ctypes.CDLL, name: str, kv_dtype: KVDType) -> None:
    case = CASES[name]
    weights = random_weights(case, seed=11)
    model = NativeDecoder(native_library, case.shape, weights, 2)
    parts = [Part(tokens(83, 12), 0, [3, 9, 1, 7, 11, 2]), Part(tokens(9, 13), 0, [20])]
    batch = batch_of(parts, 16)
    caches = [poisoned_cache(case, 16, kv_dtype) for _ in range(2)]
    expected = ReferenceDecoder(case.shape, weights).forward(batch, caches[0])
    out = model.forward(batch, caches[1])
    error = (out - expected).norm(dim=1) / expected.norm(dim=1)  # [rows]
    # A key whose code falls the other way at a tie moves the rows that see it, as a rounded activation does.
    assert error.median() < 0.03, error
    exact = model.forward(batch, poisoned_cache(case, 16))
    narrow = (out - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0 < narrow.median() < {"bfloat16": 0.04, "int8": 0.05, "float8": 0.15, "int4": 0.4}[kv_dtype], narrow
    # Codes of the first layer follow from the embedding alone: the same but for ties.
    for mine, theirs in ((caches[1].k, caches[0].k), (caches[1].v, caches[0].v)):
        written = [table[0] for table in batch.block_tables.tolist()]
        first = [one[0, written].view(torch.uint8)[:, :, :9] for one in (mine, theirs)]
        assert (first[0] != first[1]).float().mean() < 0.02


@pytest.mark.parametrize("kv_dtype", NARROW)
@pytest.mark.parametrize("name", ["gqa", "head 96, groups of 16", "head 128"])
def test_narrow_keys_keep_one_bit_pattern_a_sequence(native_library: ctypes.CDLL, name: str, kv_dtype: KVDType) -> None:
    """Cut anywhere, on any number of threads, among neighbours that turn the schedule: the bits it has alone."""
    case = CASES[name]
    weights, ids = random_weights(case, seed=12), tokens(150, 14)
    model = NativeDecoder(native_library, case.shape, weights, 2)
    whole = decode(model, case, ids, 16, [], kv_dtype)
    assert torch.isfinite(whole).all()
    for block_size, cuts in ((16, [149]), (16, [7, 8, 40]), (8, [49]), (32, list(range(60, 150)))):
        assert torch.equal(decode(model, case, ids, block_size, cuts, kv_dtype), whole), cuts
    one = NativeDecoder(native_library, case.shape, weights, 1)
    assert torch.equal(decode(one, case, ids, 16, [100, 101], kv_dtype), whole)
    kv, own = poisoned_cache(case, 16, kv_dtype), list(range(40, 50))
    model.forward(batch_of([Part(ids[:149], 0, own)], 16), kv)
    parts = [Part(tokens(130, 60), 0, list(range(9))), Part(ids[149:], 149, own), Part(tokens(1, 61), 0, [20])]
    logits = model.forward(batch_of([replace(part, all_logits=False) for part in parts], 16), kv)
    assert torch.equal(logits[1], whole[149])


def test_an_outlier_of_one_sequence_stays_in_it(native_library: ctypes.CDLL) -> None:
    """A NaN in one sequence's keys spoils that sequence and no other."""
    case = SMALL
    model = NativeDecoder(native_library, case.shape, random_weights(case, seed=6), 2)
    kv = poisoned_cache(case, 16)
    parts = [Part(tokens(20, 8), 0, [1, 2]), Part(tokens(20, 9), 0, [3, 4])]
    model.forward(batch_of(parts, 16), kv)
    nexts = [Part([5], 20, [1, 2], False), Part([6], 20, [3, 4], False)]
    clean = model.forward(batch_of(nexts, 16), kv)
    kv.k[0, 1] = float("nan")
    spoiled = model.forward(batch_of(nexts, 16), kv)
    assert torch.isnan(spoiled[0]).all()
    assert torch.equal(spoiled[1], clean[1])


def test_a_batch_that_contradicts_itself_is_our_bug(native_library: ctypes.CDLL) -> None:
    case = SMALL
    model = NativeDecoder(native_library, case.shape, random_weights(case, seed=7), 1)
    good = batch_of([Part(tokens(5, 10), 0, [1])], 16)

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    wrong = (
        replace(good, token_ids=torch.tensor([0, 1, 2, 3, VOCAB])),
        replace(good, token_ids=torch.tensor([0, 1, 2, 3, -1])),
        replace(good, positions=int32(0, 1, 2, 4, 5)),
        replace(good, slot_mapping=int32(16, 17, 18, 19, NUM_BLOCKS * 16)),
        replace(good, block_tables=int32(NUM_BLOCKS).view(1, 1)),
        replace(good, context_lens=int32(513)),
        replace(good, query_start=int32(0, 4)),
        replace(good, logits_rows=torch.tensor([5])),
        replace(good, logits_rows=torch.tensor([3, 3])),
    )
    kv = poisoned_cache(case, 16)
    for batch in wrong:
        with pytest.raises(AssertionError, match="contradicts itself"):
            model.forward(batch, kv)
    assert torch.isnan(kv.k).all()


def test_models_beyond_the_kernels_are_refused(native_library: ctypes.CDLL) -> None:
    case = SMALL
    assert why_unsupported(case.shape) == ""
    small = replace(case.shape, heads=Heads(3, 1, 48))
    assert why_unsupported(small) == "head dimension 48 is not a multiple of 32 up to 256"
    assert why_unsupported(replace(case.shape, hidden_size=100)) == "hidden size 100 is not a multiple of 32"
    weights = random_weights(case, seed=8)
    with pytest.raises(NativeUnavailableError, match="head dimension 48"):
        NativeDecoder(native_library, small, weights, 1)
    with pytest.raises(NativeUnavailableError, match="do not take"):
        NativeDecoder(native_library, replace(case.shape, intermediate_size=192), weights, 1)


def test_the_arena_grows_to_the_largest_pass_and_stays(native_library: ctypes.CDLL) -> None:
    case = SMALL
    model = NativeDecoder(native_library, case.shape, random_weights(case, seed=9), 1)
    assert model.scratch_bytes == 0
    kv, blocks = poisoned_cache(case, 16), list(range(20))
    sizes = []
    for count in (1, 100, 1):
        model.forward(batch_of([Part(tokens(count, 11), 0, blocks)], 16), kv)
        sizes.append(model.scratch_bytes)
    assert 0 < sizes[0] < sizes[1] == sizes[2] < 2_000_000
