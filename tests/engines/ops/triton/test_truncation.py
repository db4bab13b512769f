"""Truncation and drawing in the interpreter and through the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from engines.ops.philox import StreamKeys
from engines.ops.triton.draw import triton_draw, triton_probabilities
from engines.ops.triton.truncation import triton_keep
from engines.ops.truncation import (
    Kept,
    Truncation,
    reference_draw,
    reference_keep,
    reference_probabilities,
    scaled_logits,
)

# (temperature, top-k, top-p, min-p)
SETTINGS = (
    (1.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.5),
    (0.7, 1, 1.0, 0.0),
    (1.3, 7, 1.0, 0.0),
    (1.0, 10_000_000, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 0, 1e-6, 0.0),
    (2.0, 40, 0.6, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.0, 50, 0.95, 0.02),
    (1.0, 0, 1.0, 1.0),
)


def params_of(lab: Any, settings: tuple[tuple[float, int, float, float], ...]) -> Truncation:
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    return Truncation(
        lab.put(torch.tensor(temperature)),
        lab.put(torch.tensor(top_k, dtype=torch.int32)),
        lab.put(torch.tensor(top_p)),
        lab.put(torch.tensor(min_p)),
    )


def keys_of(lab: Any, rows: int) -> StreamKeys:
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(4))
    return StreamKeys(
        lab.put(seeds), lab.put((torch.arange(rows) % 3).int()), lab.put((torch.arange(rows) * 7919).int())
    )


def is_kept(logits: torch.Tensor, params: Truncation, kept: Kept) -> torch.Tensor:
    x, ids = scaled_logits(logits, params.temperature), torch.arange(logits.shape[1])
    threshold = kept.threshold[:, None]
    return (x > threshold) | ((x == threshold) & (ids <= kept.last_id[:, None]))


def check(lab: Any, logits: torch.Tensor, settings: tuple[tuple[float, int, float, float], ...]) -> torch.Tensor:
    """Kept tokens and drawn tokens exactly, masses and probabilities closely; gives who is kept."""
    params, keys = params_of(lab, settings), keys_of(lab, len(settings))
    kept, expected = lab.run(triton_keep, logits, params), reference_keep(logits, params)
    mask = is_kept(logits, params, kept)
    assert torch.equal(mask, is_kept(logits, params, expected)), (mask.sum(1), is_kept(logits, params, expected).sum(1))
    lab.close(kept.largest, expected.largest)
    lab.close(kept.mass, expected.mass, relative=1e-5)
    lab.close(
        lab.run(triton_probabilities, logits, params, kept),
        reference_probabilities(logits, params, expected),
        relative=1e-5,
    )
    lab.same(lab.run(triton_draw, logits, params, kept, keys), reference_draw(logits, params, expected, keys))
    return mask


def random_logits(lab: Any, vocab_size: int, dtype: torch.dtype) -> None:
    check(lab, lab.put(2.5 * lab.randn(len(SETTINGS), vocab_size, dtype=dtype)), SETTINGS)


def ties(lab: Any) -> None:
    """Four values, each many times: cuts fall inside runs of equal tokens, and keep the lowest ids."""
    values = torch.randint(0, 4, (len(SETTINGS), 1100), generator=torch.Generator().manual_seed(2)).float()
    mask = check(lab, lab.put(values), SETTINGS)
    assert int(mask[3].sum()) == 7
    assert mask[3].nonzero().flatten().tolist() == (values[3] == 3).nonzero().flatten()[:7].tolist()


def exact_shares(lab: Any) -> None:
    """Eight equal tokens: top-p of n/8 keeps exactly n, and a little more one more."""
    logits = torch.full((4, 20), float("-inf"))
    logits[:, 3:19:2] = 1.5
    settings = ((1.0, 0, 0.5, 0.0), (1.0, 0, 0.501, 0.0), (1.0, 4, 0.5, 0.0), (1.0, 4, 0.5, 1.0))
    mask = check(lab, lab.put(logits), settings)
    assert [row.nonzero().flatten().tolist() for row in mask] == [[3, 5, 7, 9], [3, 5, 7, 9, 11], [3, 5], [3, 5]]


def strange_rows(lab: Any) -> None:
    """Nothing allowed, one token, NaN, +inf, huge spreads, a signed zero."""
    infinity, nan = float("inf"), float("nan")
    logits = torch.full((7, 9), -infinity)
    logits[1, 4] = -3.0
    logits[2] = torch.tensor([1.0, nan, 2.0, nan, 0.0, -infinity, 2.0, nan, 1.0])
    logits[3] = torch.tensor([1.0, infinity, 2.0, 3.0, infinity, 0.0, 0.0, 0.0, 0.0])
    logits[4] = torch.tensor([3e38, -3e38, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    logits[5] = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0, -0.0, 0.0])
    for setting in ((1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.5, 3, 0.9, 0.1)):
        mask = check(lab, lab.put(logits), (setting,) * 7)
        assert not bool(mask[0].any())
        assert mask[1].nonzero().flatten().tolist() == [4]
        assert not bool(mask[2, [1, 3, 5, 7]].any())
        everyone = [1, 4] if setting[1] else [*range(9)]
        assert mask[3].nonzero().flatten().tolist() == ([1] if setting[0] == 0 else everyone)
    params = params_of(lab, ((0.5, 3, 0.9, 0.1),) * 7)
    drawn = lab.run(
        triton_draw, lab.put(logits), params, lab.run(triton_keep, lab.put(logits), params), keys_of(lab, 7)
    )
    assert drawn[[0, 6]].tolist() == [-1, -1]


def alone(lab: Any) -> None:
    """A row by itself gives the bits it gives in a batch; the random numbers go with the row, not with its place."""
    logits = lab.randn(len(SETTINGS), 700)
    params, keys = params_of(lab, SETTINGS), keys_of(lab, len(SETTINGS))
    together = lab.run(triton_keep, logits, params)
    drawn = lab.run(triton_draw, logits, params, together, keys)
    for row in (3, 9):
        one = slice(row, row + 1)
        own = Truncation(*(getattr(params, name)[one] for name in ("temperature", "top_k", "top_p", "min_p")))
        kept = lab.run(triton_keep, logits[one], own)
        for name in ("largest", "threshold", "last_id", "mass"):
            lab.same(getattr(kept, name), getattr(together, name)[one])
        own_keys = StreamKeys(keys.seeds[one], keys.choices[one], keys.positions[one])
        lab.same(lab.run(triton_draw, logits[one], own, kept, own_keys), drawn[one])


CASES = {
    **{
        f"random-{vocab_size}-{str(dtype)[6:]}": partial(random_logits, vocab_size=vocab_size, dtype=dtype)
        for vocab_size, dtype in (
            (1, torch.float32),
            (100, torch.float32),
            (1024, torch.float16),
            (2500, torch.float32),
            (999, torch.bfloat16),
        )
    },
    "ties": ties,
    "exact-shares": exact_shares,
    "strange-rows": strange_rows,
    "alone": alone,
}

LOGITS = torch.empty(4, 49152)
FLOATS, INTEGERS = torch.ones(4), torch.ones(4, dtype=torch.int32)
PARAMS = Truncation(FLOATS, INTEGERS, FLOATS, FLOATS)
KEPT = Kept(FLOATS, FLOATS, INTEGERS, FLOATS)
LAUNCHES = {
    "keep": lambda: triton_keep(LOGITS, PARAMS),
    "draw": lambda: triton_draw(LOGITS, PARAMS, KEPT, StreamKeys(INTEGERS.long(), INTEGERS, INTEGERS)),
    "probabilities": lambda: triton_probabilities(LOGITS.bfloat16(), PARAMS, KEPT),
}


def test_case(interpreted: Any, case: str) -> None:
    interpreted(case)


def test_compiles(compiles: Any, launch: str, target: int) -> None:
    compiles(launch, target)
