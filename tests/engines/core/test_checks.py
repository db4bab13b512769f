"""Every refusal names field, value and limit; everything in range passes."""

from __future__ import annotations

import math

import pytest

from engines.api import Capabilities, GenerateRequest, InvalidRequestError, SamplingParams
from engines.core.checks import check_request

CAPABILITIES = Capabilities(
    model="m", task="generate", digest="d", dtype="float32", vocab_size=100, max_model_len=10, block_size=4
)


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


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"temperature": math.nan}, {"stop_token_ids": (100,)}])
def test_sampling_is_checked_by_the_samplers_own_ranges(options: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(**options)
    assert refused.value.field == next(iter(options))


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_token_ids": [0] * 9},
        {"prompt_token_ids": [99]},
        {"n": 8},
        {"num_emitted_tokens": 2, "max_tokens": 3},
        {"max_tokens": 1, "min_tokens": 1},
        {"seed": 2**64 - 1},
        {"logprobs": 0, "logprob_token_ids": (0, 99)},
    ],
)
def test_the_edges_of_every_range_are_allowed(options: dict[str, object]) -> None:
    check(**options)
