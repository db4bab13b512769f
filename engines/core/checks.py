"""What a request must satisfy before an engine queues it; every refusal names field, value and limit.

Read next: `engines/core/engine.py`, `engines/core/sampler.py` (`check_sampling`).
"""

from __future__ import annotations

from engines.api import Capabilities, GenerateRequest, InvalidRequestError
from engines.core.sampler import check_sampling


def check_request(source: GenerateRequest, capabilities: Capabilities) -> None:
    """Raises InvalidRequestError. Does not look at the queue."""
    length, limit = len(source.prompt_token_ids), capabilities.max_model_len - 1
    if not 1 <= length <= limit:
        raise refusal("prompt_token_ids", f"{length} tokens", f"1..{limit} tokens, so that one more can be generated")
    smallest, largest = min(source.prompt_token_ids), max(source.prompt_token_ids)
    if smallest < 0 or largest >= capabilities.vocab_size:
        stray = smallest if smallest < 0 else largest
        raise refusal("prompt_token_ids", f"id {stray}", f"ids 0..{capabilities.vocab_size - 1}")
    if source.n < 1:
        raise refusal("n", str(source.n), ">= 1")
    if not 0 <= source.num_emitted_tokens < length:
        raise refusal("num_emitted_tokens", str(source.num_emitted_tokens), f"0..{length - 1}")
    if source.num_emitted_tokens and source.n != 1:
        raise refusal("n", str(source.n), "1 when num_emitted_tokens is set")
    if source.num_emitted_tokens >= source.sampling.max_tokens:
        raise refusal(
            "num_emitted_tokens", str(source.num_emitted_tokens), f"below max_tokens {source.sampling.max_tokens}"
        )
    check_sampling(source.sampling, capabilities.vocab_size)


def refusal(field: str, value: str, limit: str) -> InvalidRequestError:
    """The one shape of a refused field."""
    return InvalidRequestError(f"{field} is {value}; allowed: {limit}", field=field, value=value, limit=limit)
