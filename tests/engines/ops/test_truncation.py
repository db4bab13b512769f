"""The definition of truncation by hand, and draws as a distribution."""

from __future__ import annotations

import torch

from engines.ops.philox import StreamKeys
from engines.ops.truncation import Kept, Truncation, reference_draw, reference_keep, reference_probabilities

# The 99th percentile of chi-square for 3 degrees of freedom.
CHI2_3 = 11.34


def settings(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Truncation:
    return Truncation(
        torch.tensor([temperature]),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )


def kept_ids(logits: list[float], params: Truncation) -> list[int]:
    row = torch.tensor([logits])
    return reference_probabilities(row, params, reference_keep(row, params))[0].nonzero().flatten().tolist()


def log(*weights: float) -> list[float]:
    return torch.tensor(weights).log().tolist()


def test_each_cut_by_hand() -> None:
    logits = log(2.0, 8.0, 4.0, 1.0, 1.0)  # shares 1/8, 1/2, 1/4, 1/16, 1/16
    assert kept_ids(logits, settings()) == [0, 1, 2, 3, 4]
    assert kept_ids(logits, settings(temperature=0.0, top_k=3)) == [1]
    assert kept_ids(logits, settings(top_k=2)) == [1, 2]
    assert kept_ids(logits, settings(top_k=4)) == [0, 1, 2, 3]  # the lower id of the two last
    assert kept_ids(logits, settings(top_p=0.5)) == [1]
    assert kept_ids(logits, settings(top_p=0.51)) == [1, 2]  # the token that crosses stays
    assert kept_ids(logits, settings(top_p=1e-9)) == [1]
    assert kept_ids(logits, settings(min_p=0.2)) == [0, 1, 2]
    assert kept_ids(logits, settings(min_p=1.0)) == [1]


def test_each_cut_sees_what_the_one_before_left() -> None:
    logits = log(8.0, 4.0, 2.0, 1.0, 1.0)
    # Of the first two, the first holds 2/3: alone it does not reach 0.7; of all it holds 1/2.
    assert kept_ids(logits, settings(top_k=2, top_p=0.7)) == [0, 1]
    assert kept_ids(logits, settings(top_k=2, top_p=0.6)) == [0]
    # Temperature comes first: at 1/2 the shares are those of the squares, 64/86 for the first.
    assert kept_ids(logits, settings(temperature=0.5, top_p=0.74)) == [0]
    assert kept_ids(logits, settings(temperature=0.5, min_p=0.2)) == [0, 1]


def test_rows_with_nothing_to_give() -> None:
    infinity, nan = float("inf"), float("nan")
    nothing = torch.tensor([[-infinity, nan, -infinity]])
    kept = reference_keep(nothing, settings())
    assert (float(kept.threshold), int(kept.last_id), float(kept.mass)) == (infinity, -1, 0.0)
    keys = StreamKeys(torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))
    assert reference_draw(nothing, settings(), kept, keys).tolist() == [-1]
    assert not bool(reference_probabilities(nothing, settings(), kept).any())
    assert kept_ids([nan, 1.0, infinity, -infinity], settings(temperature=0.0)) == [2]


def test_draws_have_the_distribution_of_what_is_kept() -> None:
    rows = 40_000
    logits = torch.tensor([log(5.0, 3.0, 2.0, 1.0, 0.5)]).expand(rows, 5)
    one = settings(top_k=4)
    kept = reference_keep(logits[:1], one)
    params = Truncation(*(getattr(one, name).expand(rows) for name in ("temperature", "top_k", "top_p", "min_p")))
    many = Kept(*(getattr(kept, name).expand(rows) for name in ("largest", "threshold", "last_id", "mass")))
    keys = StreamKeys(torch.full((rows,), -77), torch.zeros(rows).int(), torch.arange(rows).int())
    counts = reference_draw(logits, params, many, keys).long().bincount(minlength=5)
    assert int(counts[4]) == 0
    expected = torch.tensor([5.0, 3.0, 2.0, 1.0]).double() / 11 * rows
    assert float(((counts[:4] - expected) ** 2 / expected).sum()) < CHI2_3
