"""Every refusal names field, value and limit; everything in range passes."""

from __future__ import annotations

import math

import pytest

from engines.api import Capabilities, GenerateRequest, InvalidRequestError, SamplingParams
from engines.core.checks import check_request

CAPABILITIES = Capabilities(
    model="m", task="generate", digest="d", dtype="float32", vocab_size=100, max_model_len=10, block_size=4
)


EVERY_ID = tuple(range(100))


def check(**options: object) -> None:
    own = {name: options.pop(name) for name in set(GenerateRequest.__struct_fields__) & set(options)}
    sampling = SamplingParams(**{"max_tokens": 5, **options})
    request = GenerateRequest(**{"request_id": "r", "prompt_token_ids": [1, 2, 3], "sampling": sampling, **own})
    check_request(request, CAPABILITIES, max_choices=8)


@pytest.mark.parametrize(
    ("options", "field", "value", "limit"),
    [
        ({"prompt_token_ids": []}, "prompt_token_ids", "0 tokens", "1..9 tokens, so that one more can be generated"),
        (
            {"prompt_token_ids": [1] * 10},
            "prompt_token_ids",
            "10 tokens",
            "1..9 tokens, so that one more can be generated",
        ),
        ({"prompt_token_ids": [1, 100]}, "prompt_token_ids", "id 100", "ids 0..99"),
        ({"prompt_token_ids": [-1, 5]}, "prompt_token_ids", "id -1", "ids 0..99"),
        ({"n": 0}, "n", "0", "1..8"),
        ({"n": 9}, "n", "9", "1..8"),
        ({"n": 2, "num_emitted_tokens": 1}, "n", "2", "1 when num_emitted_tokens is set"),
        (
            {"num_emitted_tokens": 3},
            "num_emitted_tokens",
            "3",
            "at least 0, less than the prompt and less than max_tokens",
        ),
        (
            {"num_emitted_tokens": -1},
            "num_emitted_tokens",
            "-1",
            "at least 0, less than the prompt and less than max_tokens",
        ),
        (
            {"num_emitted_tokens": 2, "max_tokens": 2},
            "num_emitted_tokens",
            "2",
            "at least 0, less than the prompt and less than max_tokens",
        ),
        ({"max_tokens": 0}, "max_tokens", "0", "1..inf"),
        ({"min_tokens": -1}, "min_tokens", "-1", "0..inf"),
        ({"min_tokens": 6}, "min_tokens", "6", "0..max_tokens (5)"),
        ({"temperature": -0.1}, "temperature", "-0.1", "0..1000"),
        ({"temperature": math.nan}, "temperature", "nan", "0..1000"),
        ({"temperature": math.inf}, "temperature", "inf", "0..1000"),
        ({"top_k": -1}, "top_k", "-1", "0..inf"),
        ({"top_p": 1.5}, "top_p", "1.5", "0..1"),
        ({"min_p": -0.5}, "min_p", "-0.5", "0..1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "0.0", "0.001..1000"),
        ({"presence_penalty": math.nan}, "presence_penalty", "nan", "-1000..1000"),
        ({"frequency_penalty": 1e9}, "frequency_penalty", "1000000000.0", "-1000..1000"),
        ({"logprobs": -1}, "logprobs", "-1", "0..100"),
        ({"logprobs": 101}, "logprobs", "101", "0..100"),
        ({"stop_token_ids": (5, 100)}, "stop_token_ids", "id 100", "ids 0..99"),
        ({"allowed_token_ids": (-3,)}, "allowed_token_ids", "id -3", "ids 0..99"),
        ({"logprob_token_ids": (100,)}, "logprob_token_ids", "id 100", "ids 0..99"),
        ({"logit_bias": {100: 1.0}}, "logit_bias", "id 100", "ids 0..99"),
        ({"logit_bias": {7: math.inf}}, "logit_bias[7]", "inf", "a finite number"),
        (
            {"min_tokens": 1, "stop_token_ids": tuple(range(100))},
            "min_tokens",
            "1",
            "0 when only stop tokens are allowed",
        ),
        (
            {"min_tokens": 1, "allowed_token_ids": (3,), "stop_token_ids": (3, 4)},
            "min_tokens",
            "1",
            "0 when only stop tokens are allowed",
        ),
    ],
)
def test_a_refusal_names_field_value_and_limit(options: dict[str, object], field: str, value: str, limit: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(**options)
    assert (refused.value.field, refused.value.value, refused.value.limit) == (field, value, limit)
    assert str(refused.value) == f"{field} is {value}; allowed: {limit}"


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_token_ids": [0] * 9},
        {"prompt_token_ids": [99]},
        {"n": 8},
        {"num_emitted_tokens": 2, "max_tokens": 3},
        {"max_tokens": 1, "min_tokens": 1},
        {"temperature": 0.0, "top_p": 0.0, "min_p": 1.0, "top_k": 10**9, "repetition_penalty": 1000.0},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"logit_bias": {0: -100.0, 99: 100.0}},
        {"min_tokens": 1, "stop_token_ids": (3,), "allowed_token_ids": (3, 4)},
        {"logprobs": 0, "logprob_token_ids": (0, 99)},
    ],
)
def test_the_edges_of_every_range_are_allowed(options: dict[str, object]) -> None:
    check(**options)
