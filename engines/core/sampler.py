"""Logits to tokens: penalties, bans, temperature, top-k, top-p, min-p, a draw, log-probs.

A row depends on its own request alone. Its random number is a hash of (seed, choice, position): no generator, no
state, so a replica that takes over draws the same, and neighbours change nothing. Plain greedy rows take one argmax for
all. Nothing sorts the vocabulary unless top-p needs more than the likeliest few hundred tokens.

Letters: R rows, V vocabulary. Knows nothing of requests beyond `SamplerRow`.
Read next: `engines/core/runner.py`, `engines/api.py` (SamplingParams).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.api import InvalidRequestError, SamplingParams, TokenLogprobs

FIRST_CANDIDATES = 256
MAX_LOGPROBS = 1024
NEGATIVE_INFINITY = float("-inf")
U64 = 2**64
# SplitMix64 (Steele, Lea, Flood 2014): increments and multipliers of its finalizer.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """`position`: index of the token to draw in prompt + output. `banned_ids`: must not be drawn now."""

    params: SamplingParams
    choice: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    banned_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None


def sample(logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """logits [R, V] float32, not changed -> one token a row."""
    plain = [number for number, row in enumerate(rows) if is_plain_greedy(row)]
    tokens: dict[int, int] = {}
    if plain:
        chosen = logits.argmax(dim=-1) if len(plain) == len(rows) else logits[plain].argmax(dim=-1)
        tokens = dict(zip(plain, chosen.tolist(), strict=True))
    drawn = []
    for number, row in enumerate(rows):
        token_id = tokens[number] if number in tokens else draw(logits[number], row)
        drawn.append(Sampled(token_id, logprobs_of(logits[number], token_id, row.params)))
    return drawn


def is_plain_greedy(row: SamplerRow) -> bool:
    """True if the likeliest token is the answer as it stands."""
    return row.params.temperature == 0 and not changes_logits(row)


def changes_logits(row: SamplerRow) -> bool:
    """True if something other than temperature and truncation touches this row."""
    params = row.params
    return bool(
        row.banned_ids
        or params.logit_bias
        or params.allowed_token_ids
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def draw(raw: torch.Tensor, row: SamplerRow) -> int:
    """raw [V] -> a token."""
    logits = adjusted(raw, row) if changes_logits(row) else raw  # [V]
    params = row.params
    if params.temperature == 0:
        return int(logits.argmax())
    ids, probabilities = candidates(logits / params.temperature, params)  # [C], [C] sorted by probability
    u = uniform(params.seed, row.choice, row.position)
    cumulative = probabilities.cumsum(0)
    place = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    return int(ids[min(place, len(ids) - 1)])


def adjusted(raw: torch.Tensor, row: SamplerRow) -> torch.Tensor:
    """raw [V] -> a changed copy [V]. Repetition looks at prompt and output, presence and frequency at output only."""
    params = row.params
    logits = raw.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor([*row.prompt_ids, *row.output_ids], dtype=torch.int64)
        seen = torch.unique(seen)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if row.output_ids and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.unique(torch.tensor(row.output_ids, dtype=torch.int64), return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    if params.allowed_token_ids:
        allowed = torch.tensor(params.allowed_token_ids, dtype=torch.int64)
        kept = torch.full_like(logits, NEGATIVE_INFINITY)
        kept[allowed] = logits[allowed]
        logits = kept
    if row.banned_ids:
        logits[torch.tensor(row.banned_ids, dtype=torch.int64)] = NEGATIVE_INFINITY
    return logits


def candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [V] after temperature -> (ids [C], probabilities [C] float64) that top-k, top-p and min-p leave.

    Each truncation sees the distribution that the one before left, renormalised. Exact for any parameters.
    """
    vocab_size = logits.shape[0]
    limited = 0 < params.top_k < vocab_size
    if not limited and params.top_p >= 1.0 and params.min_p <= 0.0:
        return torch.arange(vocab_size), torch.softmax(logits.double(), dim=-1)
    count = params.top_k if limited else min(FIRST_CANDIDATES, vocab_size)
    total = torch.logsumexp(logits.double(), dim=-1)
    while True:
        values, ids = torch.topk(logits, count)  # [count], likeliest first
        values = values.double()
        probabilities = torch.softmax(values, dim=-1) if limited else torch.exp(values - total)
        kept = kept_count(probabilities, params)
        if limited or kept < count or count == vocab_size:
            return ids[:kept], probabilities[:kept]
        count = min(8 * count, vocab_size)


def kept_count(probabilities: torch.Tensor, params: SamplingParams) -> int:
    """How many of the likeliest tokens top-p and min-p keep; at least one. probabilities [C], descending."""
    kept = len(probabilities)
    if params.top_p < 1.0:
        # The token that crosses the threshold stays: what comes before it must be below top_p.
        before = probabilities.cumsum(0) - probabilities
        kept = int((before < params.top_p).sum())
    if params.min_p > 0.0:
        kept = min(kept, int((probabilities >= params.min_p * probabilities[0]).sum()))
    return max(1, kept)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on nothing but its arguments."""
    state = mix(seed % U64)
    state = mix((state + choice) % U64)
    state = mix((state + position) % U64)
    return (state >> 11) / float(1 << 53)


def mix(value: int) -> int:
    """SplitMix64's step: 64 bits in, 64 well-mixed bits out."""
    value = (value + GOLDEN_GAMMA) % U64
    value = ((value ^ (value >> 30)) * MIX_1) % U64
    value = ((value ^ (value >> 27)) * MIX_2) % U64
    return value ^ (value >> 31)


def logprobs_of(raw: torch.Tensor, token_id: int, params: SamplingParams) -> TokenLogprobs | None:
    """raw [V] -> the token's log-prob under the model's own distribution, and the alternatives asked for."""
    if params.logprobs is None and not params.logprob_token_ids:
        return None
    logprobs = torch.log_softmax(raw, dim=-1)
    if params.logprob_token_ids:
        labels = torch.tensor(params.logprob_token_ids, dtype=torch.int64)
        named = zip(params.logprob_token_ids, logprobs[labels].tolist(), strict=True)
        top = sorted(named, key=lambda pair: -pair[1])
    else:
        values, ids = torch.topk(logprobs, params.logprobs or 0)
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id=token_id, logprob=float(logprobs[token_id]), top=top)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError naming field, value and limit."""
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("max_tokens", params.max_tokens, 1, math.inf),
        ("min_tokens", params.min_tokens, 0, params.max_tokens),
        ("temperature", params.temperature, 0, 100),
        ("top_k", params.top_k, 0, math.inf),
        ("top_p", params.top_p, 1e-9, 1),
        ("min_p", params.min_p, 0, 1),
        ("repetition_penalty", params.repetition_penalty, 1e-3, 1e3),
        ("presence_penalty", params.presence_penalty, -100, 100),
        ("frequency_penalty", params.frequency_penalty, -100, 100),
        ("logprobs", params.logprobs or 0, 0, min(vocab_size, MAX_LOGPROBS)),
    )
    for field, value, low, high in ranges:
        if not low <= value <= high:
            raise InvalidRequestError(
                f"{field} is {value}; allowed: {low:g} to {high:g}",
                field=field,
                value=str(value),
                limit=f"{low:g} to {high:g}",
            )
    id_lists: tuple[tuple[str, Sequence[int]], ...] = (
        ("logit_bias", tuple(params.logit_bias)),
        ("allowed_token_ids", params.allowed_token_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
    )
    for field, ids in id_lists:
        stray = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
        if stray is not None:
            raise InvalidRequestError(
                f"{field} names the token id {stray}; allowed: 0 to {vocab_size - 1}",
                field=field,
                value=str(stray),
                limit=f"0 to {vocab_size - 1}",
            )
    if any(not math.isfinite(bias) for bias in params.logit_bias.values()):
        raise InvalidRequestError("logit_bias holds a value that is not finite", field="logit_bias", limit="finite")
