"""Packing: exact tensors, and random batches against a loop over tokens."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.api import GenerateRequest, SamplingParams
from engines.core.batch import BatchPacker
from engines.core.request import Arrival, Request


def make_request(tokens: list[int], computed: int, scheduled: int, block_ids: list[int], block_size: int) -> Request:
    source = GenerateRequest(request_id="r", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=9))
    request = Request(source, 0, Arrival(0, 0.0, b""), block_size=block_size)
    request.num_computed_tokens, request.num_scheduled_tokens, request.block_ids = computed, scheduled, block_ids
    return request


def make_packer(block_size: int = 4) -> BatchPacker:
    return BatchPacker(max_tokens=64, max_requests=8, max_blocks=16, block_size=block_size)


def test_a_prompt_a_chunk_and_a_single_token() -> None:
    whole = make_request([10, 11, 12, 13, 14], 0, 5, [7, 2], 4)
    chunk = make_request(list(range(20, 32)), 4, 4, [3, 1, 5], 4)
    single = make_request(list(range(40, 49)), 8, 1, [0, 9, 6], 4)
    batch, caught_up = make_packer().pack([whole, chunk, single])
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 24, 25, 26, 27, 48]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert batch.slot_mapping.tolist() == [28, 29, 30, 31, 8, 4, 5, 6, 7, 24]
    assert batch.query_start.tolist() == [0, 5, 9, 10]
    assert batch.context_lens.tolist() == [5, 8, 9]
    assert batch.block_tables.tolist() == [[7, 2, 0], [3, 1, 5], [0, 9, 6]]
    assert batch.logits_rows.tolist() == [4, 9]
    assert caught_up == [whole, single]


def test_dtypes_are_those_of_the_contract() -> None:
    batch, _ = make_packer().pack([make_request([1, 2], 0, 2, [0], 4)])
    int64 = {batch.token_ids.dtype, batch.logits_rows.dtype}
    int32 = {
        tensor.dtype
        for tensor in (
            batch.positions,
            batch.slot_mapping,
            batch.query_start,
            batch.context_lens,
            batch.block_tables,
        )
    }
    assert (int64, int32) == ({torch.int64}, {torch.int32})
    assert all(getattr(batch, name).is_contiguous() for name in batch.__slots__)


def test_nothing_of_the_batch_before_shines_through() -> None:
    packer = make_packer()
    packer.pack([make_request(list(range(30)), 0, 30, list(range(1, 9)), 4) for _ in range(2)])
    batch, caught_up = packer.pack([make_request([5, 6, 7], 1, 1, [4], 4)])
    assert batch.block_tables.tolist() == [[4]]
    assert batch.logits_rows.tolist() == []
    assert caught_up == []
    wide, _ = packer.pack([make_request([5] * 3, 0, 3, [4], 4), make_request([5] * 9, 0, 9, [3, 2, 1], 4)])
    assert wide.block_tables.tolist() == [[4, 0, 0], [3, 2, 1]]


@given(st.data())
def test_packing_equals_a_loop_over_tokens(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4, 16]))
    requests, free = [], list(range(200))
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(1, 10))
        computed = data.draw(st.integers(0, length - 1))
        scheduled = data.draw(st.integers(1, length - computed))
        blocks = [free.pop(data.draw(st.integers(0, len(free) - 1))) for _ in range(-(-length // block_size))]
        tokens = data.draw(st.lists(st.integers(0, 999), min_size=length, max_size=length))
        requests.append(make_request(tokens, computed, scheduled, blocks, block_size))
    batch, caught_up = BatchPacker(max_tokens=60, max_requests=6, max_blocks=10, block_size=block_size).pack(requests)
    tokens, positions, slots, starts, logits_rows = [], [], [], [0], []
    for request in requests:
        for position in range(request.num_computed_tokens, request.num_computed_tokens + request.num_scheduled_tokens):
            tokens.append(request.source.prompt_token_ids[position])
            positions.append(position)
            slots.append(request.block_ids[position // block_size] * block_size + position % block_size)
        starts.append(len(tokens))
        if request.num_computed_tokens + request.num_scheduled_tokens == request.num_tokens:
            logits_rows.append(len(tokens) - 1)
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.query_start.tolist() == starts
    assert batch.logits_rows.tolist() == logits_rows
    assert [starts.index(row + 1) - 1 for row in logits_rows] == [requests.index(request) for request in caught_up]
    for s, request in enumerate(requests):
        assert batch.context_lens[s] == request.num_computed_tokens + request.num_scheduled_tokens
        assert batch.block_tables[s, : len(request.block_ids)].tolist() == request.block_ids
        assert not batch.block_tables[s, len(request.block_ids) :].any()
