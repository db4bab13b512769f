"""The sampler as a distribution (chi-square, fixed seeds) and exactly, against a plain numpy reference."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engines.api import EngineFaultError, SamplingParams
from engines.core.sampler import SamplerRow, adjusted, mix, sample, truncated, uniform

DRAWS = 6000


def row(position: int = 0, choice: int = 0, prompt=(), output=(), banned=(), **params: Any) -> SamplerRow:
    return SamplerRow(SamplingParams(max_tokens=1, **params), choice, position, list(prompt), list(output), banned)


def logits_of(size: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def reference_logits(logits: torch.Tensor, the_row: SamplerRow) -> np.ndarray:
    """vLLM's order, token by token."""
    out = logits.double().numpy().copy()
    params = the_row.params
    for token_id in {*the_row.prompt_ids, *the_row.output_ids}:
        out[token_id] *= 1 / params.repetition_penalty if out[token_id] > 0 else params.repetition_penalty
    for token_id, count in Counter(the_row.output_ids).items():
        out[token_id] -= params.presence_penalty + params.frequency_penalty * count
    for token_id, bias in params.logit_bias.items():
        out[token_id] += bias
    for token_id in range(len(out)):
        if params.allowed_token_ids and token_id not in params.allowed_token_ids:
            out[token_id] = -math.inf
        if token_id in the_row.banned_ids:
            out[token_id] = -math.inf
    return out


def reference_distribution(logits: torch.Tensor, the_row: SamplerRow) -> np.ndarray:
    params = the_row.params
    scaled = reference_logits(logits, the_row) / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    order = np.argsort(-probabilities, kind="stable")
    ranked = probabilities[order]
    if params.top_k:
        ranked[params.top_k :] = 0
    ranked /= ranked.sum()
    ranked[np.cumsum(ranked) - ranked >= params.top_p] = 0
    ranked /= ranked.sum()
    ranked[ranked < params.min_p * ranked[0]] = 0
    out = np.zeros_like(ranked)
    out[order] = ranked / ranked.sum()
    return out


def chi_square_limit(freedom: int) -> float:
    """Wilson-Hilferty: exceeded by chance once in a million."""
    return freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_fits(counts: Counter[int], probabilities: np.ndarray, draws: int) -> None:
    assert all(probabilities[token_id] > 0 for token_id in counts), "a token that was truncated away was drawn"
    expected = probabilities * draws
    large = expected >= 5
    observed = np.array([counts.get(token_id, 0) for token_id in range(len(probabilities))], dtype=float)
    cells = [(o, e) for o, e, keep in zip(observed, expected, large, strict=True) if keep]
    if expected[~large].sum() >= 1:
        cells.append((observed[~large].sum(), expected[~large].sum()))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    assert statistic < chi_square_limit(max(1, len(cells) - 1))


CASES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "top_k and top_p": {"temperature": 1.3, "top_k": 12, "top_p": 0.7},
    "all three": {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "prompt": (1, 2, 3, 3),
        "output": (3, 4, 4, 4, 9),
    },
    "bias": {"temperature": 1.0, "logit_bias": {3: 2.5, 4: -100.0}, "banned": (7,)},
    "allowed": {"temperature": 1.0, "allowed_token_ids": (2, 3, 5, 8, 13, 21), "banned": (5,), "top_p": 0.9},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_draws_follow_the_distribution(settings: dict[str, Any]) -> None:
    logits = logits_of(48, seed=5)
    rows = [row(position=position, seed=11, **settings) for position in range(DRAWS)]
    drawn = sample(logits.expand(DRAWS, -1), rows)
    assert_fits(Counter(item.token_id for item in drawn), reference_distribution(logits, rows[0]), DRAWS)


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0], ids=["flat", "usual", "peaked"])
@pytest.mark.parametrize("settings", [CASES[name] for name in ("top_k", "top_p", "min_p", "all three")])
def test_truncation_of_a_large_vocabulary_is_exact(settings: dict[str, Any], spread: float) -> None:
    """A flat distribution needs nearly every token for top-p: more than the first candidates hold."""
    logits = logits_of(20_000, seed=3, spread=spread)
    the_row = row(**settings)
    weights = torch.exp((logits - logits.max()) / the_row.params.temperature)
    ids, kept = truncated(logits, weights, the_row.params)
    expected = reference_distribution(logits, the_row)
    probabilities = np.zeros(20_000)
    probabilities[np.arange(20_000) if ids is None else ids.numpy()] = (kept.double() / kept.double().sum()).numpy()
    # Float32 weights may move the edge of the nucleus by the tokens that lie within their rounding of it.
    assert abs(np.count_nonzero(probabilities) - np.count_nonzero(expected)) <= 1
    assert np.abs(probabilities - expected).sum() < 1e-4


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.stack([logits_of(4000, seed) for seed in range(6)])
    rows = [row(position=9, seed=seed, temperature=(0.0, 0.9)[seed % 2], top_p=0.95, logprobs=3) for seed in range(6)]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], [rows[i]])[0] for i in range(6)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


def test_the_stream_is_keyed_by_seed_choice_and_position_alone() -> None:
    keys = [(s, c, p) for s in (0, 1, 2**63, -1) for c in (0, 1, 127) for p in (0, 1, 4096)]
    assert len({uniform(*key) for key in keys}) == len(keys)
    assert uniform(3, 1, 7) == uniform(3, 1, 7)
    logits = logits_of(500)[None]
    first = sample(logits, [row(position=40, choice=2, seed=8, prompt=[1] * 40)])
    assert first == sample(logits, [row(position=40, choice=2, seed=8, prompt=[1] * 30, output=[5] * 10)])


def test_the_hash_is_splitmix64() -> None:
    """The published first outputs for the seeds 0 and 1234567."""
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(1234567) == 6457827717110365317


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    numbers = np.array([uniform(42, 0, position) for position in range(20_000)])
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
    assert ((counts - 20_000 / 64) ** 2 / (20_000 / 64)).sum() < chi_square_limit(63)
    pairs = np.histogram2d(numbers[:-1], numbers[1:], bins=8)[0]
    assert ((pairs - 19_999 / 64) ** 2 / (19_999 / 64)).sum() < chi_square_limit(63)


def test_greedy_is_the_largest_logit() -> None:
    logits = torch.stack([logits_of(1000, seed) for seed in range(5)])
    chosen = [item.token_id for item in sample(logits, [row(temperature=0.0)] * 5)]
    assert chosen == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}])
def test_the_limits_of_truncation_are_greedy(settings: dict[str, Any]) -> None:
    logits = logits_of(3000, seed=1)[None]
    for position in range(20):
        drawn = sample(logits, [row(position=position, seed=3, **({"temperature": 1.0} | settings))])
        assert drawn[0].token_id == int(logits[0].argmax())


def test_the_nucleus_is_the_smallest_that_reaches_top_p() -> None:
    """Four equal tokens: two of them reach one half exactly, a third is needed for a little more."""
    logits = torch.full((8,), -math.inf)
    logits[2:6] = 1.0
    for top_p, size in ((0.25, 1), (0.5, 2), (0.501, 3), (1 - 1e-9, 4)):
        ids, weights = truncated(logits, torch.exp(logits - 1.0), row(top_p=top_p).params)
        assert ids is not None
        assert len(ids) == len(weights) == size
        assert {*ids.tolist()} <= {2, 3, 4, 5}


def test_penalties_exactly() -> None:
    logits = torch.tensor([2.0, -2.0, 4.0, -4.0, 1.0])
    the_row = row(
        prompt=[0, 1],
        output=[1, 2, 2],
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={4: 3.0},
        banned=(3,),
    )
    # token 0: 2 / 2; token 1: -2 * 2 - 0.5 - 0.25; token 2: 4 / 2 - 0.5 - 2 * 0.25
    assert adjusted(logits, the_row).tolist() == [1.0, -4.75, 1.0, -math.inf, 4.0]
    assert logits.tolist() == [2.0, -2.0, 4.0, -4.0, 1.0]


def test_allowed_ids_win_over_bias_and_bans_win_over_allowed_ids() -> None:
    logits = torch.zeros(6)
    the_row = row(temperature=0.0, logit_bias={5: 100.0, 2: 1.0, 3: 2.0}, allowed_token_ids=(1, 2, 3), banned=(3,))
    assert sample(logits[None], [the_row])[0].token_id == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_to_draw_is_a_fault_not_a_token(temperature: float) -> None:
    logits = torch.zeros(2, 6)
    forbidden = row(temperature=temperature, allowed_token_ids=(1, 2), banned=(1, 2))
    with pytest.raises(EngineFaultError, match="-inf"):
        sample(logits, [row(), forbidden])
    logits[1, 3] = math.nan
    with pytest.raises(EngineFaultError, match="nan"):
        sample(logits, [row(temperature=temperature), row(temperature=temperature)])


def test_log_probs_are_of_the_models_own_distribution() -> None:
    logits = logits_of(100, seed=2)[None]
    the_row = row(temperature=3.0, top_k=5, logit_bias={7: 50.0}, logprobs=4, seed=1)
    (drawn,) = sample(logits, [the_row])
    expected = torch.log_softmax(logits[0].double(), dim=-1)
    assert drawn.token_id == 7
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(float(expected[7]), abs=1e-5)
    best = torch.topk(expected, 4)
    assert [pair[0] for pair in drawn.logprobs.top] == best.indices.tolist()
    assert [pair[1] for pair in drawn.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_log_probs_none_zero_and_named() -> None:
    logits = logits_of(50)[None]
    assert sample(logits, [row()])[0].logprobs is None
    (zero,) = sample(logits, [row(logprobs=0)])
    assert zero.logprobs is not None
    assert zero.logprobs.top == []
    (named,) = sample(logits, [row(logprob_token_ids=(9, 3, 30))])
    assert named.logprobs is not None
    expected = torch.log_softmax(logits[0], dim=-1)
    assert dict(named.logprobs.top) == pytest.approx({i: float(expected[i]) for i in (9, 3, 30)}, abs=1e-6)
    assert msgspec.to_builtins(named.logprobs)[1] == pytest.approx(float(expected[named.token_id]), abs=1e-6)


def test_logits_are_left_as_they_were() -> None:
    logits = logits_of(64)[None]
    before = logits.clone()
    for settings in CASES.values():
        sample(logits, [row(**settings)])
    assert torch.equal(logits, before)
