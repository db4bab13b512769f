"""Which tokens temperature, top-k, top-p and min-p leave, and a token drawn from them; no sort of the vocabulary.

Letters: R rows, V vocabulary.

Contract. x = logit / temperature (temperature 0: greedy); NaN counts as -inf, +inf as the largest float32. Tokens are
ordered by (x descending, id ascending), so every cut is exact, ties included:
  top-k  (0: off) keeps the first k;
  top-p  (>= 1: off) keeps the shortest prefix of those whose share of their mass reaches top_p, at least one token;
  min-p  (0: off) keeps of those the tokens with exp(x - x_max) >= min_p;
  greedy keeps the first token.
What is left is a prefix of the order, hence four numbers a row (`Kept`): token t is kept iff x > threshold, or
x = threshold and t <= last_id. A row without a finite logit keeps nothing.

`keep(logits [R, V], params)` -> Kept;  `draw(logits, params, kept, keys)` -> tokens [R] int32: the argmax over kept
tokens of p / Exp(1) with p = exp(x - x_max) / mass and the random number of (seed, choice, position, token), the lowest
id if equal, -1 if nothing is kept;  `probabilities(logits, params, kept)` -> [R, V] float32, p where kept, else 0.
Row-local. Float32.

Source: the exponential race is the Gumbel-max trick, Maddison, Tarlow, Minka, 2014, https://arxiv.org/abs/1411.0030.
Read next: `engines/ops/philox.py`, `engines/ops/rejection.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engines.ops.philox import STREAM_DRAW, StreamKeys, exponential, random_bits

NEGATIVE_INFINITY = float("-inf")
LARGEST_FLOAT = torch.finfo(torch.float32).max
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Truncation:
    """Of R rows: `temperature`, `top_p`, `min_p` [R] float32, `top_k` [R] int32."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """Of R rows: `largest` x, `threshold` x (+inf: nothing is kept) and `mass`, the kept tokens' sum of exp(x -
    largest), float32; `last_id` int32."""

    largest: torch.Tensor
    threshold: torch.Tensor
    last_id: torch.Tensor
    mass: torch.Tensor


def scaled_logits(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """logits [R, V], temperature [R] -> x [R, V] float32."""
    x = torch.nan_to_num(logits.float(), nan=NEGATIVE_INFINITY, posinf=LARGEST_FLOAT, neginf=NEGATIVE_INFINITY)
    return (x / torch.where(temperature > 0, temperature, 1.0)[:, None]).clamp(max=LARGEST_FLOAT)


def reference_keep(logits: torch.Tensor, params: Truncation) -> Kept:
    """The definition, row by row, with a sort and double sums."""
    x = scaled_logits(logits, params.temperature)
    rows = [
        _keep_row(row, *settings)
        for row, *settings in zip(
            x, *(t.tolist() for t in (params.temperature, params.top_k, params.top_p, params.min_p)), strict=True
        )
    ]
    largest, threshold, mass = (torch.tensor([row[i] for row in rows]) for i in (0, 1, 3))
    return Kept(largest, threshold, torch.tensor([row[2] for row in rows], dtype=torch.int32), mass)


def _keep_row(
    x: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[float, float, int, float]:
    values, ids = torch.sort(x, descending=True, stable=True)
    count = int((values > NEGATIVE_INFINITY).sum())
    if count == 0:
        return NEGATIVE_INFINITY, float("inf"), NO_TOKEN, 0.0
    if temperature == 0:
        return float(values[0]), float(values[0]), int(ids[0]), 1.0
    weights = torch.exp(values - values[0]).double()
    if 0 < top_k < count:
        count = top_k
    if top_p < 1.0:
        before = weights[:count].cumsum(0) - weights[:count]
        count = max(1, int((before < top_p * weights[:count].sum()).sum()))
    if min_p > 0.0:
        count = max(1, int((weights[:count] >= min_p).sum()))
    threshold = values[count - 1]
    return float(values[0]), float(threshold), int(ids[count - 1]), float(weights[:count].sum())


def reference_probabilities(logits: torch.Tensor, params: Truncation, kept: Kept) -> torch.Tensor:
    """See the contract."""
    x = scaled_logits(logits, params.temperature)
    ids, threshold = torch.arange(x.shape[1], device=x.device), kept.threshold[:, None]
    is_kept = (x > threshold) | ((x == threshold) & (ids <= kept.last_id[:, None]))
    weights = torch.exp(x - torch.where(kept.mass > 0, kept.largest, 0.0)[:, None])
    return torch.where(is_kept, weights / torch.where(kept.mass > 0, kept.mass, 1.0)[:, None], 0.0)


def reference_race(weights: torch.Tensor, keys: StreamKeys, stream: int = STREAM_DRAW) -> torch.Tensor:
    """weights [R, V] >= 0 -> tokens [R] int32, drawn in proportion to them; -1 for a row of zeros."""
    ids = torch.arange(weights.shape[1], device=weights.device)
    bits = random_bits(keys.seeds[:, None], keys.choices[:, None], keys.positions[:, None], stream, ids)
    best, tokens = (weights / exponential(bits)).max(dim=-1)
    # torch.max does not promise the first of equals.
    tokens = torch.where(weights / exponential(bits) == best[:, None], ids, weights.shape[1]).amin(-1)
    return torch.where(best > 0, tokens, NO_TOKEN).int()


def reference_draw(logits: torch.Tensor, params: Truncation, kept: Kept, keys: StreamKeys) -> torch.Tensor:
    """See the contract."""
    return reference_race(reference_probabilities(logits, params, kept), keys)
