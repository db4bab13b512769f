"""Attention over blocks in the interpreter and through the compiler.

Every slot past a context, every block of nobody, and every table entry past the last is NaN or nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from engines.ops.attention import AttentionInputs
from engines.ops.kv_write import LEVELS, LayerKV, reference_quantize_heads
from engines.ops.paged_attention import PLAIN, AttentionOptions, reference_paged_attention
from engines.ops.triton.paged_attention import Cut, triton_paged_attention
from engines.ops.triton.tiles import AttentionTiles

SMALL = AttentionTiles(block_m=16, tile_keys=16, segment_keys=32, num_warps=4, num_stages=2)
SPLIT = Cut(num_splits=2, tiles=SMALL)  # contexts up to 64
WHOLE = Cut(tiles=SMALL)
# (context, how many of it are new): alone, around a border of blocks, tiles and splits, a chunk, a prompt, nothing new.
MIXED = ((1, 1), (33, 1), (64, 1), (36, 7), (5, 5), (9, 0))
SHORT = ((33, 1), (18, 4))


@dataclass(frozen=True)
class Setup:
    """One batch over one layer."""

    sequences: tuple[tuple[int, int], ...] = MIXED
    num_kv_heads: int = 1
    repeats: int = 3
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache: torch.dtype = torch.float32
    options: AttentionOptions = PLAIN
    tree_width: int = 0


@dataclass(frozen=True)
class Batch:
    """Guarded tensors of a setup."""

    q: torch.Tensor
    kv: LayerKV
    inputs: AttentionInputs
    tree_bias: torch.Tensor | None


def filled(lab: Any, setup: Setup, used: list[tuple[int, int]]) -> LayerKV:
    """A pool in which only the `used` (block, slots) hold numbers."""
    blocks = sum(1 for _ in used) + 2
    shape = (blocks, setup.num_kv_heads, setup.block_size, setup.head_dim)
    real = torch.zeros(shape[0], 1, shape[2], dtype=torch.bool)
    for block, slots in used:
        real[block, :, :slots] = True
    tensors = []
    for seed in (11, 12):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if setup.cache in LEVELS:
            narrow, scales = reference_quantize_heads(values, setup.cache)
            narrow.view(torch.uint8).masked_fill_(~real[..., None].expand(shape), 0x7F)
            tensors += [lab.put(narrow), lab.put(scales.masked_fill(~real, float("nan")))]
        else:
            tensors += [lab.put(values.masked_fill(~real[..., None], float("nan")).to(setup.cache)), None]
    return LayerKV(tensors[0], tensors[2], tensors[1], tensors[3])


def build(lab: Any, setup: Setup) -> Batch:
    used: list[tuple[int, int]] = []
    width = max(-(-context // setup.block_size) for context, _ in setup.sequences) + 2
    tables = torch.full((len(setup.sequences), width), 0x0FFFFFFF, dtype=torch.int32)
    total = sum(-(-context // setup.block_size) for context, _ in setup.sequences)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(3)).tolist()
    for row, (context, _) in enumerate(setup.sequences):
        for column in range(-(-context // setup.block_size)):
            tables[row, column] = block = order[len(used)] + 1
            used.append((block, min(setup.block_size, context - column * setup.block_size)))
    starts = torch.tensor([0, *(new for _, new in setup.sequences)]).cumsum(0)
    tokens, num_heads = int(starts[-1]), setup.num_kv_heads * setup.repeats
    inputs = AttentionInputs(
        query_start=lab.put(starts.int()),
        context_lens=lab.put(torch.tensor([context for context, _ in setup.sequences], dtype=torch.int32)),
        block_tables=lab.put(tables),
        slot_mapping=torch.empty(0, dtype=torch.int32),
    )
    q = lab.randn(tokens, num_heads, setup.head_dim, dtype=setup.dtype)
    bias = lab.put(tree(tokens, setup), padded=False) if setup.tree_width else None
    return Batch(q, filled(lab, setup, used), inputs, bias)


def tree(tokens: int, setup: Setup) -> torch.Tensor:
    """Each new token sees itself, and any earlier one or not, with some bias."""
    generator = torch.Generator().manual_seed(9)
    bias = torch.randn(tokens, setup.tree_width, generator=generator)
    bias[torch.rand(bias.shape, generator=generator) < 0.4] = float("-inf")
    row = 0
    for _, new in setup.sequences:
        for i in range(new):
            bias[row, i] = 0.0
            bias[row, i + 1 :] = float("-inf")
            row += 1
    return bias


def attend(lab: Any, batch: Batch, setup: Setup, cut: Cut) -> torch.Tensor:
    result: torch.Tensor = lab.run(
        triton_paged_attention, batch.q, batch.kv, batch.inputs, setup.options, batch.tree_bias, cut
    )
    return result


def equals_the_reference(lab: Any, setup: Setup) -> None:
    """And split over programs is not, to the bit."""
    batch = build(lab, setup)
    expected = reference_paged_attention(batch.q, batch.kv, batch.inputs, setup.options, batch.tree_bias)
    whole = attend(lab, batch, setup, WHOLE)
    half = setup.dtype == torch.float16 and setup.cache == torch.float16
    lab.close(whole, expected, relative=2e-3 if half else 0.0)
    lab.same(attend(lab, batch, setup, SPLIT), whole)


def alone_and_in_chunks(lab: Any, setup: Setup) -> None:
    """A sequence by itself, and its rows one step at a time, give the bits that the mixed batch gives."""
    batch = build(lab, setup)
    together = attend(lab, batch, setup, WHOLE)
    starts = batch.inputs.query_start.tolist()
    for row, (context, new) in enumerate(setup.sequences):
        for first, last in {(0, new), *((i, i + 1) for i in range(0, new, 3))} if new else ():
            part = slice(starts[row] + first, starts[row] + last)
            inputs = replace(
                batch.inputs,
                query_start=torch.tensor([0, last - first], dtype=torch.int32),
                context_lens=torch.tensor([context - new + last], dtype=torch.int32),
                block_tables=batch.inputs.block_tables[row : row + 1],
            )
            one = Batch(batch.q[part], batch.kv, inputs, None)
            for cut in (WHOLE, SPLIT):
                lab.same(attend(lab, one, setup, cut), together[part])


def a_tree_is_the_paths_it_holds(lab: Any) -> None:
    """A causal tree bias of zeros is plain attention, to the bit."""
    setup = Setup(sequences=((20, 5), (40, 3)))
    batch = build(lab, setup)
    bias = torch.zeros(8, 5)
    for row, i in enumerate((0, 1, 2, 3, 4, 0, 1, 2)):
        bias[row, i + 1 :] = float("-inf")
    with_tree = replace(batch, tree_bias=lab.put(bias, padded=False))
    lab.same(attend(lab, with_tree, setup, WHOLE), attend(lab, batch, setup, WHOLE))


def a_row_that_sees_nothing_is_zero(lab: Any) -> None:
    setup = Setup(sequences=((4, 4),), tree_width=4)
    batch = build(lab, setup)
    bias = batch.tree_bias.clone() if batch.tree_bias is not None else torch.zeros(0)
    bias[2] = float("-inf")
    blind = replace(batch, tree_bias=lab.put(bias, padded=False))
    for cut in (WHOLE, SPLIT):
        out = attend(lab, blind, setup, cut)
        lab.same(out[2], torch.zeros(3, 64))
        assert not bool(out.isnan().any())


def rows_of_no_sequence_are_left_alone(lab: Any) -> None:
    """A captured batch is padded: rows past query_start[S], and sequences without rows."""
    setup = Setup(sequences=((20, 2), (9, 1), (0, 0), (0, 0)))
    batch = build(lab, setup)
    padded = replace(batch, q=lab.put(torch.cat((batch.q, torch.full((3, 3, 64), float("nan"))))))
    for cut in (WHOLE, SPLIT):
        out = attend(lab, padded, setup, cut)
        lab.same(out[:3], attend(lab, batch, setup, cut))
        assert bool(out[3:].isnan().all())  # as allocated


def no_tokens(lab: Any) -> None:
    batch = build(lab, Setup(sequences=((9, 0),)))
    assert attend(lab, batch, Setup(), WHOLE).shape == (0, 3, 64)


def default_tiles(lab: Any) -> None:
    setup = Setup(sequences=((300, 2), (5, 5)), num_kv_heads=2, repeats=4)
    batch = build(lab, setup)
    expected = reference_paged_attention(batch.q, batch.kv, batch.inputs)
    whole = attend(lab, batch, setup, Cut())
    lab.close(whole, expected)
    lab.same(attend(lab, batch, setup, Cut(num_splits=2)), whole)


WINDOWED = AttentionOptions(window=17)
CAPPED = AttentionOptions(scale=0.3, softcap=5.0)
SETUPS = {
    "repeats-3": Setup(num_kv_heads=2),
    **{f"repeats-{r}": Setup(repeats=r, sequences=SHORT) for r in (1, 4, 8)},
    **{f"head_dim-{d}": Setup(head_dim=d, sequences=SHORT) for d in (32, 80, 96, 128)},
    **{f"block_size-{b}": Setup(block_size=b, sequences=SHORT) for b in (1, 5, 32)},
    **{f"q-{str(d)[6:]}": Setup(dtype=d, cache=d, sequences=SHORT) for d in (torch.float16, torch.bfloat16)},
    **{
        f"cache-{str(c)[6:]}-q-{str(d)[6:]}": Setup(dtype=d, cache=c, sequences=SHORT)
        for c in (torch.int8, torch.float8_e4m3fn, torch.bfloat16)
        for d in (torch.float32, torch.float16, torch.bfloat16)
        if c != d
    },
    **{
        f"window-{w}": Setup(options=AttentionOptions(window=w), sequences=((60, 1), (36, 7)))
        for w in (1, 16, 17, 32, 100)
    },
    "softcap": Setup(options=CAPPED, sequences=SHORT),
    "tree": Setup(tree_width=12),
    "tree-window-softcap": Setup(
        tree_width=12, options=AttentionOptions(window=17, softcap=5.0), sequences=((36, 7), (10, 10), (33, 1))
    ),
    "tree-int8": Setup(tree_width=8, cache=torch.int8, sequences=((36, 7), (33, 1))),
    "window-int8": Setup(options=WINDOWED, cache=torch.int8, num_kv_heads=2, sequences=((36, 7), (33, 1))),
}
CASES = {
    **{name: partial(equals_the_reference, setup=setup) for name, setup in SETUPS.items()},
    "alone": partial(alone_and_in_chunks, setup=Setup(sequences=((33, 1), (40, 7), (5, 5)))),
    "alone-window": partial(alone_and_in_chunks, setup=Setup(sequences=((50, 4), (40, 7)), options=WINDOWED)),
    "alone-int8": partial(alone_and_in_chunks, setup=Setup(sequences=((50, 4),), cache=torch.int8, repeats=4)),
    "tree-of-a-chain": a_tree_is_the_paths_it_holds,
    "blind-row": a_row_that_sees_nothing_is_zero,
    "padding": rows_of_no_sequence_are_left_alone,
    "no-tokens": no_tokens,
    "default-tiles": default_tiles,
}


def launch(setup: Setup, cut: Cut) -> None:
    blocks = torch.empty(8, setup.num_kv_heads, setup.block_size, setup.head_dim, dtype=setup.cache)
    scale = torch.empty(blocks.shape[:3]) if setup.cache in LEVELS else None
    integers = torch.zeros(4, 8, dtype=torch.int32)
    inputs = AttentionInputs(integers[0, :5], integers[0, :4], integers, integers[0])
    q = torch.empty(16, setup.num_kv_heads * setup.repeats, setup.head_dim, dtype=setup.dtype)
    bias = torch.empty(16, setup.tree_width) if setup.tree_width else None
    triton_paged_attention(q, LayerKV(blocks, blocks.clone(), scale, scale), inputs, setup.options, bias, cut)


def narrow(cache: torch.dtype) -> Setup:
    return Setup(num_kv_heads=4, repeats=4, dtype=torch.bfloat16, cache=cache)


LAUNCHES = {
    "bfloat16-128": partial(launch, replace(narrow(torch.bfloat16), head_dim=128), Cut()),
    "float16-split": partial(launch, replace(narrow(torch.float16), dtype=torch.float16), Cut(num_splits=8)),
    "float32": partial(launch, Setup(num_kv_heads=3), Cut()),
    "float8-80": partial(launch, replace(narrow(torch.float8_e4m3fn), head_dim=80), Cut()),
    "int8-split-tree-window-softcap": partial(
        launch,
        replace(narrow(torch.int8), tree_width=16, options=AttentionOptions(window=17, softcap=5.0)),
        Cut(num_splits=8),
    ),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
