"""What a request must satisfy before an engine queues it; every refusal names field, value and limit.

The gateway has checked the same ranges on the wire; an engine trusts nobody. Knows nothing of queues.

Read next: `engines/core/engine.py`, `engines/core/sampler.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf, isfinite

from engines.api import Capabilities, GenerateRequest, InvalidRequestError, SamplingParams

# (field, smallest, largest), both allowed. The repetition penalty divides, so it may not come near zero.
RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, inf),
    ("min_tokens", 0, inf),
    ("temperature", 0, 1e3),
    ("top_k", 0, inf),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-3, 1e3),
    ("presence_penalty", -1e3, 1e3),
    ("frequency_penalty", -1e3, 1e3),
)
MAX_LOGPROBS = 1024


def check_request(source: GenerateRequest, capabilities: Capabilities, *, max_choices: int) -> None:
    """Raises InvalidRequestError."""
    length, limit = len(source.prompt_token_ids), capabilities.max_model_len - 1
    if not 1 <= length <= limit:
        raise refusal("prompt_token_ids", f"{length} tokens", f"1..{limit} tokens, so that one more can be generated")
    check_token_ids("prompt_token_ids", source.prompt_token_ids, capabilities.vocab_size)
    if not 1 <= source.n <= max_choices:
        raise refusal("n", str(source.n), f"1..{max_choices}")
    check_sampling(source.sampling, capabilities.vocab_size)
    emitted = source.num_emitted_tokens
    if emitted and source.n != 1:
        raise refusal("n", str(source.n), "1 when num_emitted_tokens is set")
    if not 0 <= emitted < min(length, source.sampling.max_tokens):
        raise refusal("num_emitted_tokens", str(emitted), "at least 0, less than the prompt and less than max_tokens")


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError. What passes always leaves a token to draw, short of a model that overflows."""
    for field, smallest, largest in RANGES:
        value = getattr(params, field)
        if not smallest <= value <= largest:  # NaN is refused too
            raise refusal(field, str(value), f"{smallest:g}..{largest:g}")
    most = min(vocab_size, MAX_LOGPROBS)
    if params.logprobs is not None and not 0 <= params.logprobs <= most:
        raise refusal("logprobs", str(params.logprobs), f"0..{most}")
    for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
        check_token_ids(field, getattr(params, field), vocab_size)
    for token_id, bias in params.logit_bias.items():
        if not isfinite(bias):
            raise refusal(f"logit_bias[{token_id}]", str(bias), "a finite number")
    if params.min_tokens > params.max_tokens:
        raise refusal("min_tokens", str(params.min_tokens), f"0..max_tokens ({params.max_tokens})")
    allowed = {*params.allowed_token_ids} or range(vocab_size)
    if params.min_tokens and {*params.stop_token_ids}.issuperset(allowed):
        raise refusal("min_tokens", str(params.min_tokens), "0 when only stop tokens are allowed")


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Every id is in the vocabulary. Raises InvalidRequestError."""
    smallest, largest = min(token_ids, default=0), max(token_ids, default=0)
    if smallest < 0 or largest >= vocab_size:
        stray = smallest if smallest < 0 else largest
        raise refusal(field, f"id {stray}", f"ids 0..{vocab_size - 1}")


def refusal(field: str, value: str, limit: str) -> InvalidRequestError:
    """The one shape of a refused field."""
    return InvalidRequestError(f"{field} is {value}; allowed: {limit}", field=field, value=value, limit=limit)
