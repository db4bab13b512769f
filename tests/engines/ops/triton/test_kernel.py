"""One binary serves every batch: how many rows, sequences or drafts there are is never compiled in.

Else a row alone (T = 1) or among 16 would run other machine code than among 7, and might round otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from engines.ops.attention import AttentionInputs
from engines.ops.kv_write import LayerKV
from engines.ops.linear_w4a16 import W4Weight
from engines.ops.lora import LoraPlan
from engines.ops.philox import StreamKeys
from engines.ops.triton.draw import triton_draw, triton_probabilities
from engines.ops.triton.grammar_mask import triton_grammar_mask
from engines.ops.triton.kernel import ceil_div, next_power_of_2, row_warps
from engines.ops.triton.kv_write import triton_rope_kv_write
from engines.ops.triton.linear import triton_linear
from engines.ops.triton.linear_fp8 import triton_linear_fp8
from engines.ops.triton.linear_w4a16 import triton_linear_w4a16
from engines.ops.triton.linear_w8a8 import triton_linear_w8a8
from engines.ops.triton.log_softmax import triton_log_softmax
from engines.ops.triton.lora import triton_lora_expand, triton_lora_shrink
from engines.ops.triton.paged_attention import Cut, triton_paged_attention
from engines.ops.triton.rejection import triton_verify_matching, triton_verify_sampled
from engines.ops.triton.rmsnorm import triton_add_rms_norm, triton_rms_norm_int8
from engines.ops.triton.rope import triton_rope
from engines.ops.triton.row_quantize import triton_quantize_rows
from engines.ops.triton.silu_mul import triton_silu_mul
from engines.ops.triton.truncation import triton_keep
from engines.ops.truncation import Kept, Truncation

ROWS = (1, 2, 7, 16, 32)
BF16 = torch.bfloat16


def integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def attention(rows: int, num_splits: int, tree: bool) -> None:
    """`rows` sequences of as many rows, over as many blocks, with a tree as wide."""
    blocks = torch.empty(8, 2, 16, 64, dtype=BF16)
    inputs = AttentionInputs(integers(rows + 1), integers(rows), integers(rows, rows), integers(rows * rows))
    q, bias = torch.empty(rows * rows, 6, 64, dtype=BF16), torch.empty(rows * rows, rows) if tree else None
    triton_paged_attention(q, LayerKV(blocks, blocks.clone()), inputs, tree_bias=bias, cut=Cut(num_splits * rows))


def rows_ops(rows: int) -> None:
    x, weight = torch.empty(rows, 64, dtype=BF16), torch.empty(64, dtype=BF16)
    triton_add_rms_norm(x, x, weight, 1e-5)
    triton_rms_norm_int8(x, x, weight, 1e-5)
    triton_silu_mul(x)
    triton_quantize_rows(x)
    heads = torch.empty(rows, 4, 64, dtype=BF16)
    table = torch.empty(rows, 64)
    triton_rope(heads, table, table)
    blocks = torch.empty(8, 4, 16, 64, dtype=BF16)
    triton_rope_kv_write(heads, heads, heads, table, table, LayerKV(blocks, blocks.clone()), integers(rows))


def linears(rows: int) -> None:
    x, scales = torch.empty(rows, 64, dtype=BF16), torch.empty(64)
    triton_linear(x, torch.empty(64, 64, dtype=BF16))
    triton_linear_w8a8(x.to(torch.int8), scales[:rows], torch.empty(64, 64, dtype=torch.int8), scales)
    fp8 = torch.float8_e4m3fn
    triton_linear_fp8(x.to(fp8), scales[:rows], torch.empty(64, 64, dtype=fp8), scales)
    groups = torch.empty(64, 2)
    triton_linear_w4a16(x, W4Weight(torch.empty(64, 32, dtype=torch.uint8), groups, groups.clone()))
    plan, a = LoraPlan(integers(rows), integers(4)), torch.empty(3, 16, 64, dtype=BF16)
    hidden = triton_lora_shrink(x, a, scales[:3], plan)
    triton_lora_expand(hidden, torch.empty(3, 64, 16, dtype=BF16), plan, x)


def sampling(rows: int) -> None:
    logits, ones, ids = torch.empty(rows, 512), torch.ones(rows), integers(rows)
    params, kept = Truncation(ones, ids, ones, ones), Kept(ones, ones, ids, ones)
    triton_grammar_mask(logits, integers(rows, 16), ids)
    triton_keep(logits, params)
    triton_draw(logits, params, kept, StreamKeys(ids.long(), ids, ids))
    triton_probabilities(logits, params, kept)
    triton_log_softmax(logits)


def verification(rows: int) -> None:
    """As many sequences as rows, up to three drafts each."""
    starts, drafts, ids = integers(rows + 1), integers(2 * rows), integers(rows)
    triton_verify_matching(drafts, starts, integers(3 * rows), 3)
    triton_verify_sampled(
        drafts, starts, torch.empty(3 * rows, 512), torch.empty(2 * rows, 512), StreamKeys(ids.long(), ids, ids), 3
    )


BATCHES = {
    "attention": [partial(attention, rows, 0, False) for rows in ROWS],
    "attention-split": [partial(attention, rows, 1, False) for rows in ROWS],
    "attention-tree": [partial(attention, rows, 1, True) for rows in ROWS],
    "rows": [partial(rows_ops, rows) for rows in ROWS],
    "linears": [partial(linears, rows) for rows in ROWS],
    "sampling": [partial(sampling, rows) for rows in ROWS],
    "verification": [partial(verification, rows) for rows in ROWS],
}


@pytest.mark.parametrize("name", BATCHES)
def test_every_batch_runs_the_same_binary(binaries: Any, name: str) -> None:
    first, *others = binaries(name)
    assert first
    for other in others:
        assert other == first


def test_arithmetic_of_launches() -> None:
    assert [ceil_div(value, 4) for value in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_2(value) for value in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert [row_warps(block) for block in (1, 256, 512, 2048, 65536)] == [1, 1, 2, 8, 16]
