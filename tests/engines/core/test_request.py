"""A request's own counts, names of its blocks, and what it reports at its end."""

from __future__ import annotations

import numpy as np

from engines.api import GenerateRequest, SamplingParams, Timings, Usage
from engines.core.request import Arrival, Request, Status
from engines.text.block_hash import block_hashes, root_hash

ROOT = root_hash(b"s", "d")


def make_request(prompt: list[int], **options: int) -> Request:
    sampling = SamplingParams(max_tokens=500)
    source = GenerateRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling, **options)
    return Request(source, 2, Arrival(7, 1.5, ROOT), block_size=4)


def test_a_new_request_has_computed_nothing() -> None:
    request = make_request([5, 6, 7], priority=3)
    assert request.status is Status.HELD
    assert request.order == (3, 7, 2)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    assert (request.num_computed_tokens, request.num_tokens_to_compute) == (0, 3)
    assert (request.prompt_ids, request.output_ids) == ([5, 6, 7], [])


def test_tokens_of_another_replica_count_as_output() -> None:
    request = make_request([5, 6, 7, 8], num_emitted_tokens=3)
    assert (request.prompt_ids, request.output_ids) == ([5], [6, 7, 8])
    assert request.num_output_tokens == 3
    request.append(9)
    assert request.output_ids == [6, 7, 8, 9]
    assert request.usage() == Usage(prompt_tokens=1, completion_tokens=4)


def test_appending_grows_past_the_first_buffer() -> None:
    request = make_request([1, 2])
    for token in range(300):
        request.append(token % 50)
    assert request.token_ids.tolist() == [1, 2, *[token % 50 for token in range(300)]]
    assert request.token_ids.dtype == np.int64
    assert request.source.prompt_token_ids == [1, 2]


def test_block_names_are_the_routers_and_grow_with_the_output() -> None:
    request = make_request([1, 2, 3, 4, 5])
    request.append(6)
    assert request.full_block(0) == (
        block_hashes([1, 2, 3, 4], 4, ROOT)[0],
        bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0]),
    )
    request.append(7)
    request.append(8)
    assert [request.full_block(i)[0] for i in (1, 0)] == block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, ROOT)[::-1]


def test_timings_of_one_that_never_ran_are_all_queue() -> None:
    assert make_request([1]).timings(4.0) == Timings(queue_s=2.5, prefill_s=0.0, decode_s=0.0)


def test_timings_split_at_first_schedule_and_first_token() -> None:
    request = make_request([1])
    request.first_scheduled_s, request.first_token_s = 2.0, 2.5
    request.num_preemptions, request.num_steps = 1, 6
    expected = Timings(queue_s=0.5, prefill_s=0.5, decode_s=1.5, num_preemptions=1, num_steps=6)
    assert request.timings(4.0) == expected


def test_cached_tokens_are_never_more_than_the_prompt() -> None:
    request = make_request([1, 2, 3, 4, 5, 6, 7, 8, 9], num_emitted_tokens=6)
    request.num_cached_tokens = 8
    assert request.usage() == Usage(prompt_tokens=3, cached_tokens=3, completion_tokens=6)
