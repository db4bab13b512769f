"""Logits to tokens: penalties, bans, temperature, top-k, top-p, min-p, a draw, log-probs.

A row depends on its own request alone. Its random number is a hash of (seed, choice, position): no generator, no
state, so a replica that takes over draws the same, and neighbours change nothing. Plain greedy rows take one maximum
for all. Nothing sorts the vocabulary unless top-p needs nearly all of it. Order: repetition, presence and frequency
penalties, logit bias, allowed ids, banned ids; temperature; top-k, top-p, min-p; the draw.

Letters: R rows, V vocabulary. Knows nothing of requests beyond `SamplerRow`.
Read next: `engines/core/runner.py`, `engines/api.py` (SamplingParams).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.api import EngineFaultError, SamplingParams, TokenLogprobs

FIRST_CANDIDATES = 64
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
    """logits [R, V] float32, not changed -> one token a row. Raises EngineFaultError if nothing can be drawn."""
    plain = [number for number, row in enumerate(rows) if is_plain_greedy(row)]
    tokens: dict[int, int] = {}
    if plain:
        peaks, chosen = (logits if len(plain) == len(rows) else logits[plain]).max(dim=-1)
        check_peak(float(peaks.sum()))  # the sum is not finite if one of them is not
        tokens = dict(zip(plain, chosen.tolist(), strict=True))
    drawn = []
    for number, row in enumerate(rows):
        token_id = tokens[number] if number in tokens else draw(logits[number], row)
        drawn.append(Sampled(token_id, logprobs_of(logits[number], token_id, row.params)))
    return drawn


def check_peak(peak: float) -> None:
    """The largest logit is a number, so that there is something to draw. Raises EngineFaultError."""
    if not math.isfinite(peak):
        raise EngineFaultError(f"the largest logit is {peak}: the model overflowed, or no token is allowed")


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
    """raw [V] -> a token: the inverse of the distribution function at this row's random number."""
    logits = adjusted(raw, row) if changes_logits(row) else raw  # [V]
    params = row.params
    peak = logits.max()
    check_peak(float(peak))
    if params.temperature == 0:
        return int(logits.argmax())
    weights = torch.sub(logits, peak).div_(params.temperature).exp_()  # [V], 1 at the likeliest
    ids, weights = truncated(logits, weights, params)
    cumulative = weights.cumsum(0, dtype=torch.float64)
    target = uniform(params.seed, row.choice, row.position) * float(cumulative[-1])
    place = int(torch.searchsorted(cumulative, target, right=True))
    if place == len(cumulative):  # the product was rounded up to the sum
        place = int(weights.argmax())
    return place if ids is None else int(ids[place])


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


def truncated(
    logits: torch.Tensor, weights: torch.Tensor, params: SamplingParams
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What top-k, top-p and min-p leave: (ids [C], or None for all in order; weights [C]).

    logits, weights [V]: the weights are proportional to probabilities and 1 at the likeliest. Each truncation sees the
    distribution that the one before left. Exact: candidates are added until those left out cannot belong to the result.
    """
    vocab_size = weights.shape[0]
    limited = 0 < params.top_k < vocab_size
    if not limited and params.top_p >= 1.0:
        return None, weights if params.min_p <= 0.0 else torch.where(weights >= params.min_p, weights, 0.0)
    count = params.top_k if limited else min(FIRST_CANDIDATES, vocab_size)
    total = float("nan") if limited else float(weights.sum(dtype=torch.float64))
    while True:
        ids = torch.topk(logits, count).indices  # [count], likeliest first
        likeliest = weights[ids].double()
        kept = kept_count(likeliest / (likeliest.sum() if limited else total), params)
        if limited or kept < count or count == vocab_size:
            return ids[:kept], likeliest[:kept]
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
