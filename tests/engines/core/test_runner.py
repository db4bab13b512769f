"""What the sampler is told of a request, and what a step without logits costs."""

from __future__ import annotations

from engines.api import GenerateRequest, SamplingParams
from engines.config import SchedulerConfig
from engines.core.request import Arrival, Request
from engines.core.runner import sampler_row
from engines.core.sampler import SamplerRow


def make_request(emitted: int, params: SamplingParams) -> Request:
    source = GenerateRequest(request_id="r", prompt_token_ids=[5, 6, 7, 8], sampling=params, num_emitted_tokens=emitted)
    return Request(source, 3, Arrival(0, 0.0, b""), block_size=4)


def test_position_is_the_index_of_the_drawn_token_in_prompt_and_output() -> None:
    params = SamplingParams(max_tokens=9)
    request = make_request(0, params)
    expected = SamplerRow(params=params, choice=3, position=4, prompt_ids=[5, 6, 7, 8], output_ids=[], banned_ids=())
    assert sampler_row(request) == expected
    request.append(9)
    row = sampler_row(request)
    assert (row.position, row.prompt_ids, row.output_ids) == (5, [5, 6, 7, 8], [9])


def test_a_taken_over_request_has_the_position_it_had_elsewhere() -> None:
    row = sampler_row(make_request(2, SamplingParams(max_tokens=9)))
    assert (row.position, row.prompt_ids, row.output_ids) == (4, [5, 6], [7, 8])


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(1, 2))
    request = make_request(0, params)
    for banned in ((1, 2), (1, 2), ()):
        assert sampler_row(request).banned_ids == banned
        request.append(9)
    assert sampler_row(make_request(2, params)).banned_ids == ()


def test_a_chunk_that_catches_nobody_up_draws_nothing(toy, monkeypatch) -> None:
    engine = toy.engine(scheduler=SchedulerConfig(max_batch_tokens=4))
    engine.core.add_request(toy.request("a", [1] * 10))
    monkeypatch.setattr("engines.core.runner.sample", None)
    assert engine.step() == []
    assert engine.step() == []
    assert engine.model.batches == [(4, 1, 0), (4, 1, 0)]
