"""Speculation changes no distribution, and without a drafter's distribution not even a token."""

from __future__ import annotations

import torch

from engines.ops.philox import StreamKeys
from engines.ops.rejection import reference_verify_matching, reference_verify_sampled
from engines.ops.truncation import reference_race

ROWS = 40_000
P = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
# The 99th percentile of chi-square for 3 and for 4 degrees of freedom.
CHI2_3, CHI2_4 = 11.34, 13.28


def keys_of(rows: int) -> StreamKeys:
    return StreamKeys(torch.arange(rows) * 17 + 3, torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 9).int())


def chi2(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities[probabilities > 0].double() * counts.sum()
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


def test_the_race_has_the_distribution_of_its_weights() -> None:
    weights = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0]).expand(20_000, 5)
    counts = reference_race(weights, keys_of(20_000)).bincount(minlength=5)
    assert int(counts[4]) == 0
    assert chi2(counts, P) < CHI2_3


def test_sampled_drafts_leave_the_models_distribution() -> None:
    """Drafts come from q, which is far from p: what is emitted first has distribution p all the same."""
    q = torch.tensor([0.05, 0.15, 0.2, 0.3, 0.3])
    drafts = torch.multinomial(q, ROWS, replacement=True, generator=torch.Generator().manual_seed(1)).int()
    tokens, counts = reference_verify_sampled(
        drafts, torch.arange(ROWS + 1), P.expand(2 * ROWS, 5), q.expand(ROWS, 5), keys_of(ROWS), 1
    )
    first = tokens[:, 0].long().bincount(minlength=5)
    assert int(first[4]) == 0
    assert chi2(first, P) < CHI2_3
    # Accepted with probability sum(min(p, q)) = 0.05 + 0.15 + 0.2 + 0.1, and then the bonus has distribution p as well.
    accepted = counts == 2
    share = float(accepted.float().mean())
    assert abs(share - 0.5) < 4 * (0.25 / ROWS) ** 0.5
    assert chi2(tokens[accepted, 1].long().bincount(minlength=5), P) < CHI2_3


def test_a_drafter_that_knows_p_is_always_believed() -> None:
    drafts = torch.multinomial(P, 200, replacement=True, generator=torch.Generator().manual_seed(1)).int()
    starts = torch.arange(0, 201, 4)
    tokens, counts = reference_verify_sampled(
        drafts, starts, P.expand(250, 5), P.expand(200, 5), keys_of(50), 4, torch.ones(50, dtype=torch.bool)
    )
    assert counts.tolist() == [5] * 50
    assert torch.equal(tokens[:, :4].flatten(), drafts)


def test_a_token_without_probability_never_stands() -> None:
    """Even if the drafter says that it could not have drafted it."""
    one_hot = torch.tensor([[0.0, 1.0, 0.0]])
    tokens, counts = reference_verify_sampled(
        torch.tensor([2]), torch.tensor([0, 1]), one_hot.expand(2, 3), torch.tensor([[1.0, 0.0, 0.0]]), keys_of(1), 1
    )
    assert (tokens.tolist(), counts.tolist()) == ([[1, -1]], [1])


def test_matching_emits_what_was_drawn_and_nothing_else() -> None:
    tokens, counts = reference_verify_matching(
        torch.tensor([5, 6, 7, 1, 2, 4]),
        torch.tensor([0, 3, 3, 5, 6]),
        torch.tensor([5, 6, 7, 8, 9, 1, 3, 0, -1, 2]),
        3,
    )
    assert tokens.tolist() == [[5, 6, 7, 8], [9, -1, -1, -1], [1, 3, -1, -1], [-1, -1, -1, -1]]
    assert counts.tolist() == [4, 1, 2, 1]


def test_a_sequence_without_q_takes_the_token_of_plain_decoding() -> None:
    generator = torch.Generator().manual_seed(3)
    probabilities = torch.rand(60, 5, generator=generator).softmax(-1)
    starts, keys = torch.arange(0, 41, 2), keys_of(20)
    rows = StreamKeys(
        keys.seeds.repeat_interleave(3),
        keys.choices.repeat_interleave(3),
        (keys.positions[:, None] + torch.arange(3)).flatten(),
    )
    plain = reference_race(probabilities, rows)
    drafts = torch.randint(0, 5, (40,), generator=generator).int()
    drafts[:20] = plain.view(20, 3)[:10, :2].flatten()
    expected = reference_verify_matching(drafts, starts, plain, 2)
    found = reference_verify_sampled(
        drafts, starts, probabilities, torch.full((40, 5), float("nan")), keys, 2, torch.zeros(20, dtype=torch.bool)
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert expected[1][:10].tolist() == [3] * 10
    for emitted, count, drawn in zip(found[0], found[1], plain.view(20, 3), strict=True):
        assert torch.equal(emitted[:count], drawn[:count])
