"""What a request must satisfy before an engine queues it; every refusal names field, value and limit.

The gateway has checked the same ranges on the wire; an engine trusts nobody. Knows nothing of queues.

Read next: `engines/core/engine.py`, `engines/core/sampler.py`.
"""

from __future__ import annotations

from collections.abc import Collection

from engines.api import Capabilities, GenerateRequest, InvalidRequestError
from engines.core.sampler import check_sampling


def check_request(source: GenerateRequest, capabilities: Capabilities, *, max_choices: int) -> None:
    """Raises InvalidRequestError."""
    length, limit = len(source.prompt_token_ids), capabilities.max_model_len - 1
    if not 1 <= length <= limit:
        raise refusal("prompt_token_ids", f"{length} tokens", f"1..{limit} tokens, so that one more can be generated")
    check_token_ids("prompt_token_ids", source.prompt_token_ids, capabilities.vocab_size)
    if not 1 <= source.n <= max_choices:
        raise refusal("n", str(source.n), f"1..{max_choices}")
    emitted = source.num_emitted_tokens
    if emitted and source.n != 1:
        raise refusal("n", str(source.n), "1 when num_emitted_tokens is set")
    if not 0 <= emitted < min(length, max(1, source.sampling.max_tokens)):
        raise refusal("num_emitted_tokens", str(emitted), "at least 0, less than the prompt and less than max_tokens")
    sampling = source.sampling
    check_sampling(sampling, capabilities.vocab_size)
    allowed = {*sampling.allowed_token_ids}
    if sampling.min_tokens and allowed and allowed <= {*sampling.stop_token_ids}:
        raise refusal("min_tokens", str(sampling.min_tokens), "0 when only stop tokens are allowed")


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Every id is in the vocabulary. Raises InvalidRequestError."""
    smallest, largest = min(token_ids, default=0), max(token_ids, default=0)
    if smallest < 0 or largest >= vocab_size:
        stray = smallest if smallest < 0 else largest
        raise refusal(field, f"id {stray}", f"ids 0..{vocab_size - 1}")


def refusal(field: str, value: str, limit: str) -> InvalidRequestError:
    """The one shape of a refused field."""
    return InvalidRequestError(f"{field} is {value}; allowed: {limit}", field=field, value=value, limit=limit)
